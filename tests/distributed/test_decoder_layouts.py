"""The decoder over gloo: every layout continues every prompt exactly as one rank does."""

from dataclasses import dataclass

import pytest
import torch

from moeserve.models.decoder import Decoder
from moeserve.models.parameters import DictReader
from moeserve.models.spec import ModelSpec
from moeserve.parallel import ParallelLayout, init_parallel, single_rank_context
from moeserve.testing.multiprocess import run_ranks
from moeserve.testing.placements import random_placement
from moeserve.testing.tiny_models import Style, greedy_tokens, random_parameters, tiny_spec

pytestmark = pytest.mark.distributed

PROMPTS = [[5, 17, 80, 3, 42, 9], [61], [7, 7, 30], [11, 2, 90, 44, 1, 63, 8, 25, 70], [33, 12]]
NUM_TOKENS = 8


def build(spec: ModelSpec, layout: ParallelLayout | None, *, num_redundant_experts: int = 0) -> Decoder:
    context = single_rank_context() if layout is None else init_parallel(layout, torch.device("cpu"))
    placement = random_placement(
        num_layers=len(spec.moe_layer_ids),
        num_experts=spec.num_experts,
        num_ranks=context.layout.world_size,
        num_redundant_experts=num_redundant_experts,
        seed=context.layout.world_size,
    )
    reader = DictReader(random_parameters(spec, seed=3))
    return Decoder.build(spec, reader, context, placement, dtype=torch.float32)


@dataclass(frozen=True, kw_only=True)
class Case:
    tp_size: int
    dp_size: int
    style: Style = "qwen3"
    num_experts: int = 16
    num_redundant_experts: int = 0


def continue_in_layouts(rank: int, cases: list[Case]) -> None:
    """Every rank computes the truth for all prompts itself and compares its replica's prompts with it."""
    for case in cases:
        spec = tiny_spec(case.style, num_experts=case.num_experts)
        truth = greedy_tokens(build(spec, None), [PROMPTS], num_tokens=NUM_TOKENS)
        layout = ParallelLayout(tp_size=case.tp_size, dp_size=case.dp_size, rank=rank)
        decoder = build(spec, layout, num_redundant_experts=case.num_redundant_experts)
        # All prompts but one on the first replica, one on the second, none on the others.
        dealt = [list(range(len(PROMPTS))), [], [], []][: case.dp_size]
        if case.dp_size > 1:
            dealt[1].append(dealt[0].pop())
        prompts_by_dp_rank = [[PROMPTS[i] for i in rows] for rows in dealt]
        tokens = greedy_tokens(decoder, prompts_by_dp_rank, num_tokens=NUM_TOKENS)
        assert tokens == [truth[i] for i in dealt[layout.dp_rank]], f"{case} differs"


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param([Case(tp_size=2, dp_size=1), Case(tp_size=1, dp_size=2)], id="two ranks"),
        pytest.param([Case(tp_size=1, dp_size=3, style="qwen2")], id="16 experts on three ranks"),
        pytest.param(
            [
                Case(tp_size=2, dp_size=2, num_redundant_experts=5),
                Case(tp_size=4, dp_size=1),
                Case(tp_size=1, dp_size=4, num_redundant_experts=48),  # every expert on every rank
                Case(tp_size=2, dp_size=2, style="gpt_oss", num_experts=5),
                Case(tp_size=2, dp_size=2, style="deepseek", num_experts=8, num_redundant_experts=3),
            ],
            id="four ranks",
        ),
    ],
)
def test_greedy_tokens_are_those_of_one_rank(cases: list[Case]) -> None:
    run_ranks(continue_in_layouts, cases[0].tp_size * cases[0].dp_size, cases, timeout_s=200.0)
