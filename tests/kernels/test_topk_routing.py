"""Router op: oracle over every scoring rule, and invariants of choice and weights."""

import pytest
import torch

from moeserve_kernels import topk_routing
from moeserve_kernels.topk_routing.op import Scoring
from moeserve_kernels.topk_routing.reference import topk_routing_reference


def _logits(num_tokens: int, num_experts: int = 12) -> torch.Tensor:
    return torch.randn(num_tokens, num_experts, generator=torch.Generator().manual_seed(num_tokens)) * 2


CASES = {
    "mixtral": {"top_k": 2, "scoring": "softmax", "renormalize": True},
    "olmoe": {"top_k": 3, "scoring": "softmax", "renormalize": False},
    "gpt_oss": {"top_k": 4, "scoring": "topk_softmax", "renormalize": False},
    "all_experts": {"top_k": 12, "scoring": "softmax", "renormalize": True},
    "one_expert": {"top_k": 1, "scoring": "sigmoid", "renormalize": False},
    "deepseek_v2": {
        "top_k": 3, "scoring": "softmax", "renormalize": False, "scaling_factor": 16.0,
        "num_groups": 4, "num_selected_groups": 2, "group_score": "max",
    },
    "deepseek_v3": {
        "top_k": 3, "scoring": "sigmoid", "renormalize": True, "scaling_factor": 2.5,
        "num_groups": 3, "num_selected_groups": 1, "group_score": "top2_sum",
        "correction_bias_E": torch.linspace(0.3, -0.3, 12),
    },
    "groups_hold_just_enough": {
        "top_k": 2, "scoring": "softmax", "renormalize": True, "num_groups": 6, "num_selected_groups": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("num_tokens", [1, 17])
def test_against_reference(case: str, num_tokens: int) -> None:
    logits = _logits(num_tokens)
    weights, ids = topk_routing(logits, **CASES[case])
    expected_weights, expected_ids = topk_routing_reference(logits, **CASES[case])
    assert weights.dtype == torch.float32
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights.double(), expected_weights, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("case", CASES)
def test_no_tokens(case: str) -> None:
    weights, ids = topk_routing(_logits(0), **CASES[case])
    assert weights.shape == ids.shape == (0, CASES[case]["top_k"])
    assert ids.dtype == torch.int64


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "topk_softmax"])
def test_every_expert_is_chosen_once_at_most(scoring: Scoring) -> None:
    _, ids = topk_routing(torch.zeros(5, 8), top_k=4, scoring=scoring, renormalize=True)
    assert all(len(set(row)) == 4 for row in ids.tolist())


def test_correction_bias_moves_the_choice_and_not_the_weights() -> None:
    logits = torch.tensor([[1.0, 0.0, -1.0]])
    bias = torch.tensor([0.0, 0.0, 5.0])
    weights, ids = topk_routing(logits, top_k=1, scoring="sigmoid", renormalize=False, correction_bias_E=bias)
    assert ids.tolist() == [[2]]
    torch.testing.assert_close(weights, logits[:, 2:].sigmoid())


def test_negative_choice_scores_stay_inside_the_selected_groups() -> None:
    """A large negative bias must not make a masked expert look better than a selected one."""
    options = {
        "top_k": 3, "scoring": "sigmoid", "renormalize": True, "num_groups": 2, "num_selected_groups": 1,
        "group_score": "top2_sum", "correction_bias_E": torch.full((8,), -10.0),
    }  # fmt: skip
    _, ids = topk_routing(_logits(20, 8), **options)
    assert torch.equal(ids, topk_routing_reference(_logits(20, 8), **options)[1])


def test_vanishing_sigmoids_give_finite_weights() -> None:
    weights, _ = topk_routing(torch.full((1, 4), -200.0), top_k=2, scoring="sigmoid", renormalize=True)
    assert torch.isfinite(weights).all()


def test_half_logits_are_scored_in_float32() -> None:
    logits = _logits(9).bfloat16()
    weights, ids = topk_routing(logits, top_k=2, scoring="softmax", renormalize=True)
    wide_weights, wide_ids = topk_routing(logits.float(), top_k=2, scoring="softmax", renormalize=True)
    assert torch.equal(ids, wide_ids)
    assert torch.equal(weights, wide_weights)
