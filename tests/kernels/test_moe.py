"""moe_align and fused_moe: permutation invariants first, then numbers, on skewed and empty routings."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve_kernels import fused_moe, moe_align
from moeserve_kernels.fused_moe.reference import fused_moe_reference
from moeserve_kernels.moe_align.reference import moe_align_reference

EXPERTS, WIDTH, HIDDEN = 5, 6, 8


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(-1, 6), max_size=40), st.integers(7, 9))
def test_moe_align(expert_ids: list[int], num_experts: int) -> None:
    ids = torch.tensor(expert_ids, dtype=torch.int64)
    order, counts = moe_align(ids, num_experts)
    expected_order, expected_counts = moe_align_reference(ids, num_experts)
    assert sorted(order.tolist()) == list(range(len(expert_ids)))
    assert torch.equal(order, expected_order)
    assert torch.equal(counts, expected_counts)


def _weights(dtype: torch.dtype = torch.float32, *, bias: bool = False) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    weights = {
        "gate_up_proj_p2FD": randn(EXPERTS, 2 * WIDTH, HIDDEN),
        "down_proj_pDF": randn(EXPERTS, HIDDEN, WIDTH),
    }
    if bias:
        weights |= {"gate_up_bias_p2F": randn(EXPERTS, 2 * WIDTH), "down_bias_pD": randn(EXPERTS, HIDDEN)}
    return weights


def _inputs(num_tokens: int, top_k: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.randn(num_tokens, HIDDEN, generator=generator).to(dtype), torch.rand(
        num_tokens, top_k, generator=generator
    )


ROUTINGS = {
    "one_token": [[3, 1]],
    "all_tokens_to_one_expert": [[2, 2], [2, 2], [2, 2]],
    "nothing_is_ours": [[-1, -1], [-1, -1]],
    "some_are_ours": [[-1, 4], [0, -1], [-1, -1], [0, 4]],
    "first_and_last_expert_idle": [[1, 2], [3, 1], [2, 3]],
    "no_tokens": [],
}


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("activation", ["silu", "swiglu_clamped"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.15)])
def test_fused_moe(routing: str, activation: str, bias: bool, dtype: torch.dtype, tolerance: float) -> None:
    ids = torch.tensor(ROUTINGS[routing], dtype=torch.int64).reshape(-1, 2)
    hidden, weights = _inputs(len(ids), 2, dtype)
    parameters = _weights(dtype, bias=bias)
    options = {"activation": activation, "alpha": 1.5, "limit": 1.0}  # a limit that clamps
    actual = fused_moe(hidden, weights, ids, **parameters, **options)
    expected = fused_moe_reference(hidden, weights, ids, **parameters, **options)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


def test_experts_of_two_ranks_add_up() -> None:
    """Each choice is on exactly one rank, the others mark it -1."""
    ids = torch.tensor([[0, 3], [4, 1], [2, 0]])
    hidden, weights = _inputs(3, 2)
    parameters = _weights()
    first = fused_moe(hidden, weights, torch.where(ids < 2, ids, -1), *(x[:2] for x in parameters.values()))
    second = fused_moe(hidden, weights, torch.where(ids >= 2, ids - 2, -1), *(x[2:] for x in parameters.values()))
    torch.testing.assert_close(first + second, fused_moe(hidden, weights, ids, **parameters))


def test_order_of_experts_in_memory_does_not_matter() -> None:
    """Placement invariance, to the bit: the sum follows k, not the place of the expert."""
    ids = torch.randint(0, EXPERTS, (16, 3), generator=torch.Generator().manual_seed(0))
    hidden, weights = _inputs(16, 3)
    parameters = _weights(bias=True)
    places = torch.tensor([3, 0, 4, 2, 1])  # expert e lies at places[e]
    moved = {name: torch.empty_like(x).index_copy_(0, places, x) for name, x in parameters.items()}
    assert torch.equal(fused_moe(hidden, weights, places[ids], **moved), fused_moe(hidden, weights, ids, **parameters))
