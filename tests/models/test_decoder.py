"""The decoder against itself: any chunking, any layout and any valid placement give the same tokens."""

import pytest
import torch

from moeserve.models.decoder import Decoder
from moeserve.models.parameters import DictReader
from moeserve.models.spec import ModelSpec
from moeserve.parallel import ParallelContext, single_rank_context
from moeserve.testing.placements import random_placement
from moeserve.testing.thread_ranks import ThreadGroup, run_thread_ranks
from moeserve.testing.tiny_models import (
    Style,
    forward_batch,
    greedy_tokens,
    random_parameters,
    tiny_kv_cache,
    tiny_spec,
)
from moeserve_placement import ExpertPlacement

STYLES: list[Style] = ["qwen3", "qwen2", "deepseek", "gpt_oss"]
PROMPTS = [[5, 17, 80, 3, 42, 9], [61], [11, 2, 90, 44, 1, 63, 8, 25, 70], [33, 12]]


def build(
    spec: ModelSpec, parallel: ParallelContext | None = None, placement: ExpertPlacement | None = None
) -> Decoder:
    context = parallel or single_rank_context()
    placement = placement or ExpertPlacement.identity(
        num_layers=len(spec.moe_layer_ids),
        num_logical_experts=spec.num_experts,
        num_ranks=context.layout.world_size,
    )
    return Decoder.build(spec, DictReader(random_parameters(spec)), context, placement, dtype=torch.float32)


def logits_of(decoder: Decoder, chunk_lens: list[int], tokens: list[int]) -> torch.Tensor:
    """Logits at every position of one request computed in chunks of these lengths."""
    kv_cache = tiny_kv_cache(decoder, num_requests=1)
    parts, start = [], 0
    for length in chunk_lens:
        batch = forward_batch([tokens[start : start + length]], num_computed=[start])
        parts.append(decoder.compute_logits(decoder.forward(batch, kv_cache)))
        start += length
    assert start == len(tokens)
    return torch.cat(parts)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("chunk_lens", [[4, 4, 3], [1] * 11, [10, 1], [3, 1, 1, 6]], ids=str)
def test_chunks_give_the_logits_of_the_whole_prompt(style: Style, chunk_lens: list[int]) -> None:
    decoder = build(tiny_spec(style))
    tokens = [3, 50, 50, 7, 91, 0, 12, 33, 64, 2, 18]
    whole_TV = logits_of(decoder, [11], tokens)
    assert whole_TV.dtype == torch.float32
    assert whole_TV.shape == (11, decoder.spec.vocab_size)
    torch.testing.assert_close(logits_of(decoder, chunk_lens, tokens), whole_TV, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("style", STYLES)
def test_requests_do_not_see_each_other(style: Style) -> None:
    decoder = build(tiny_spec(style))
    together = greedy_tokens(decoder, [PROMPTS], num_tokens=8)
    assert together == [greedy_tokens(decoder, [[prompt]], num_tokens=8)[0] for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens in together}) > 1, "a model that ignores its prompt tests nothing"


@pytest.mark.parametrize(
    ("style", "tp_size", "dp_size"),
    [
        ("qwen3", 2, 1),
        ("qwen3", 1, 2),
        ("qwen3", 4, 1),
        ("gpt_oss", 1, 3),
        *((style, 2, 2) for style in STYLES),
    ],
)
def test_every_layout_and_placement_gives_the_tokens_of_one_rank(style: Style, tp_size: int, dp_size: int) -> None:
    spec = tiny_spec(style)
    truth = greedy_tokens(build(spec), [PROMPTS], num_tokens=8)
    rows_by_dp_rank = [[0, 1, 2, 3][dp_rank::dp_size] for dp_rank in range(dp_size)]
    if dp_size == 3:
        rows_by_dp_rank = [[0, 1], [], [2, 3]]
    prompts_by_dp_rank = [[PROMPTS[i] for i in rows] for rows in rows_by_dp_rank]
    for num_redundant_experts in (0, 3):
        placement = random_placement(
            num_layers=len(spec.moe_layer_ids),
            num_experts=spec.num_experts,
            num_ranks=tp_size * dp_size,
            num_redundant_experts=num_redundant_experts,
            seed=num_redundant_experts,
        )

        def run(parallel: ParallelContext, placement: ExpertPlacement = placement) -> list[list[int]]:
            return greedy_tokens(build(spec, parallel, placement), prompts_by_dp_rank, num_tokens=8)

        for rank, tokens in enumerate(run_thread_ranks(run, tp_size=tp_size, dp_size=dp_size)):
            assert tokens == [truth[i] for i in rows_by_dp_rank[rank // tp_size]]


def test_a_step_without_a_token_anywhere_runs_no_collective() -> None:
    spec = tiny_spec()

    def run(parallel: ParallelContext) -> tuple[torch.Size, list[str]]:
        decoder = build(spec, parallel)
        batch = forward_batch([], num_tokens_by_dp_rank=(0, 0))
        hidden_TD = decoder.forward(batch, tiny_kv_cache(decoder, num_requests=0))
        assert isinstance(parallel.ep, ThreadGroup)
        return hidden_TD.shape, parallel.ep.calls

    assert run_thread_ranks(run, dp_size=2) == [((0, spec.hidden_size), [])] * 2


def test_logits_of_no_row() -> None:
    decoder = build(tiny_spec())
    assert decoder.compute_logits(torch.empty(0, decoder.spec.hidden_size)).shape == (0, decoder.spec.vocab_size)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_stays_near_float32(dtype: torch.dtype) -> None:
    spec = tiny_spec("deepseek")
    tokens = [3, 50, 50, 7, 91, 0, 12]
    parameters = {name: tensor.to(dtype).float() for name, tensor in random_parameters(spec).items()}
    placement = ExpertPlacement.identity(num_layers=1, num_logical_experts=8, num_ranks=1)

    def logits(of_dtype: torch.dtype) -> torch.Tensor:
        reader = DictReader(parameters, dtype=of_dtype)
        decoder = Decoder.build(spec, reader, single_rank_context(), placement, dtype=of_dtype)
        assert decoder.dtype == of_dtype
        return logits_of(decoder, [7], tokens)

    exact_TV = logits(torch.float32)
    error_T = (logits(dtype) - exact_TV).abs().mean(dim=1) / exact_TV.abs().mean(dim=1)
    assert error_T.median() < 0.1  # a token may take another expert where two are nearly tied


def test_reports_each_loaded_layer() -> None:
    spec = tiny_spec("deepseek", num_layers=3)
    placement = ExpertPlacement.identity(num_layers=2, num_logical_experts=8, num_ranks=1)
    loaded: list[int] = []
    Decoder.build(
        spec,
        DictReader(random_parameters(spec)),
        single_rank_context(),
        placement,
        dtype=torch.float32,
        on_layer_loaded=loaded.append,
    )
    assert loaded == [0, 1, 2]
