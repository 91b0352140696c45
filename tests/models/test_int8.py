"""Weights in 8 bits: which ones are, what that makes of the logits, and what it costs on text no model has seen."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import moeserve
from moeserve.config import ConfigError
from moeserve.engine.sampling_params import SamplingParams
from moeserve.llm import LLM
from moeserve.models.decoder import Decoder
from moeserve.models.parameters import DictReader
from moeserve.models.spec import ModelSpec
from moeserve.parallel import ParallelContext, single_rank_context
from moeserve.testing.thread_ranks import run_thread_ranks
from moeserve.testing.tiny_models import Style, forward_batch, random_parameters, tiny_kv_cache, tiny_spec
from moeserve_kernels import Quantization
from moeserve_kernels.linear.quantize import dequantize_weight, quantize_weight
from moeserve_placement import ExpertPlacement

STYLES: list[Style] = ["qwen3", "qwen2", "deepseek", "gpt_oss"]
KEPT = ("embed_tokens", "norm", "moe.gate", "shared_gate", "kv_b_proj", "bias", "sinks")
"""Parts of the names of tensors that stay as they are."""
TOKENS = [3, 50, 50, 7, 91, 0, 12, 33, 64, 2, 18]


def rounded(spec: ModelSpec, parameters: dict[str, torch.Tensor]) -> tuple[ModelSpec, dict[str, torch.Tensor]]:
    """The model that int8 makes of one; where embedding and output head were one tensor, only the head is rounded."""
    if spec.tie_word_embeddings:
        parameters = parameters | {"lm_head.weight": parameters["embed_tokens.weight"]}

    def round_one(tensor: torch.Tensor) -> torch.Tensor:
        rows = tensor.reshape(-1, tensor.shape[-1])
        return dequantize_weight(*quantize_weight(rows), torch.float32).view_as(tensor)

    tensors = {
        name: tensor if any(part in name for part in KEPT) else round_one(tensor) for name, tensor in parameters.items()
    }
    return dataclasses.replace(spec, tie_word_embeddings=False), tensors


def logits_of(
    spec: ModelSpec,
    parameters: dict[str, torch.Tensor],
    quantization: Quantization | None = None,
    parallel: ParallelContext | None = None,
) -> torch.Tensor:
    context = parallel or single_rank_context()
    placement = ExpertPlacement.identity(
        num_layers=len(spec.moe_layer_ids),
        num_logical_experts=spec.num_experts,
        num_ranks=context.layout.world_size,
    )
    reader = DictReader(parameters, quantization=quantization)
    decoder = Decoder.build(spec, reader, context, placement, dtype=torch.float32)
    return decoder.compute_logits(decoder.forward(forward_batch([TOKENS]), tiny_kv_cache(decoder, num_requests=1)))


@pytest.mark.parametrize("style", STYLES)
def test_the_logits_are_those_of_the_rounded_weights(style: Style) -> None:
    spec = tiny_spec(style)
    parameters = random_parameters(spec)
    actual = logits_of(spec, parameters, "int8")
    torch.testing.assert_close(actual, logits_of(*rounded(spec, parameters)), rtol=1e-4, atol=1e-4)
    assert (actual - logits_of(spec, parameters)).abs().max() > 1e-3, "nothing was quantized"


@pytest.mark.parametrize("style", STYLES)
def test_ranks_with_parts_of_the_model_come_close_to_one_with_all(style: Style) -> None:
    """Not to the bit: where the inputs are split, each rank has a scale of its own for its part of a channel."""
    spec = tiny_spec(style)
    parameters = random_parameters(spec)
    whole, exact = logits_of(spec, parameters, "int8"), logits_of(spec, parameters)
    error = (whole - exact).pow(2).mean()
    ranks = run_thread_ranks(lambda parallel: logits_of(spec, parameters, "int8", parallel), tp_size=2)
    assert torch.equal(ranks[0], ranks[1])
    assert (ranks[0] - exact).pow(2).mean() < 2 * error


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_held_out_loss_stays_within_half_a_percent(dtype: str) -> None:
    """On the sources of this project, which no demo model was trained on."""
    sources = [Path(moeserve.__path__[0], name).read_text() for name in ("config.py", "llm.py")]

    def losses(**settings: Any) -> torch.Tensor:
        llm = LLM("demo", dtype=dtype, kv_cache_memory=2**26, **settings)
        token_ids = llm.tokenizer.encode("".join(sources))
        windows = [token_ids[start : start + 512] for start in range(0, 4096, 512)]
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        records = [result.prompt_logprobs or [] for result in llm.generate(windows, params, use_tqdm=False)]
        return -torch.tensor([record.logprob for window in records for record in window], dtype=torch.float64)

    exact, quantized = losses(), losses(quantization="int8")
    assert len(exact) == 8 * 511
    assert 3.0 < exact.mean() < 5.0, "the model knows Python"
    assert float(quantized.mean()) == pytest.approx(float(exact.mean()), rel=0.005)
    assert not torch.equal(quantized, exact)


def test_another_width_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.quantization must be one of none, int8, got 'int4'"):
        LLM("demo", quantization="int4")
