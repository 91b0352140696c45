"""Router op: oracle over every scoring rule on each backend, invariants of choice and weights, and counts of load."""

import pytest
import torch

from moeserve_kernels import topk_routing
from moeserve_kernels.backend import Backend
from moeserve_kernels.topk_routing.op import Scoring
from moeserve_kernels.topk_routing.reference import topk_routing_reference


def _logits(num_tokens: int, generator: torch.Generator, num_experts: int = 12) -> torch.Tensor:
    """In no row two alike: steps of 1/4 with noise too small to close them."""
    order = torch.rand(num_tokens, num_experts, generator=generator).argsort(dim=1)
    return order / 4 + torch.rand(num_tokens, num_experts, generator=generator) / 8 - num_experts / 8


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
@pytest.mark.parametrize("num_tokens", [0, 1, 17])
def test_against_reference(case: str, num_tokens: int, backend: Backend, generator: torch.Generator) -> None:
    logits = _logits(num_tokens, generator)
    weights, ids = topk_routing(logits, **CASES[case], backend=backend)
    expected_weights, expected_ids = topk_routing_reference(logits, **CASES[case])
    assert weights.dtype == torch.float32
    assert ids.dtype == torch.int64
    shape = (num_tokens, CASES[case]["top_k"])
    assert torch.equal(ids, expected_ids.view(shape))
    torch.testing.assert_close(weights.double(), expected_weights.view(shape), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("num_experts", [8, 61, 64, 256])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "topk_softmax"])
def test_many_experts(num_experts: int, scoring: Scoring, backend: Backend, generator: torch.Generator) -> None:
    """Whole vectors and a rest; logits far apart, so that float32 scores do not tie where float64 ones differ."""
    order = torch.rand(9, num_experts, generator=generator).argsort(dim=1)
    logits = order * (8.0 / num_experts) - 4.0
    options = {"top_k": 8, "scoring": scoring, "renormalize": True}
    weights, ids = topk_routing(logits, **options, backend=backend)
    expected_weights, expected_ids = topk_routing_reference(logits, **options)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights.double(), expected_weights, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("case", CASES)
def test_a_token_knows_no_batch(case: str, backend: Backend, generator: torch.Generator) -> None:
    """To the bit, natively; torch computes a sigmoid differently at the end of a tensor."""
    logits = _logits(23, generator)
    weights, ids = topk_routing(logits, **CASES[case], backend=backend)
    for token in range(23):
        alone_weights, alone_ids = topk_routing(logits[token : token + 1], **CASES[case], backend=backend)
        assert torch.equal(alone_ids[0], ids[token])
        tolerance = 0.0 if backend == "cpu" else 1e-6
        torch.testing.assert_close(alone_weights[0], weights[token], rtol=tolerance, atol=0.0)


@pytest.mark.parametrize("num_counted_tokens", [None, 0, 1, 13, 17])
@pytest.mark.parametrize("case", ["mixtral", "deepseek_v3", "all_experts"])
def test_load_counts_the_choices_of_real_tokens(
    case: str, num_counted_tokens: int | None, backend: Backend, generator: torch.Generator
) -> None:
    """On top of what the accumulator holds; rows behind the real ones are routed and not counted."""
    logits = _logits(17, generator)
    load = torch.arange(12)
    _, ids = topk_routing(logits, **CASES[case], load_E=load, num_counted_tokens=num_counted_tokens, backend=backend)
    assert torch.equal(ids, topk_routing(logits, **CASES[case], backend=backend)[1])
    expected = list(range(12))
    for expert in ids[:num_counted_tokens].flatten().tolist():
        expected[expert] += 1
    assert load.tolist() == expected


@pytest.mark.parametrize(("num_real_tokens", "num_counted_tokens"), [(0, None), (5, None), (17, None), (9, 4), (4, 9)])
@pytest.mark.parametrize("case", ["mixtral", "deepseek_v3", "all_experts"])
def test_padding_chooses_nobody_and_is_not_counted(
    case: str, num_real_tokens: int, num_counted_tokens: int | None, backend: Backend, generator: torch.Generator
) -> None:
    logits = _logits(17, generator)
    load = torch.arange(12)
    weights, ids = topk_routing(
        logits,
        **CASES[case],
        load_E=load,
        num_counted_tokens=num_counted_tokens,
        num_real_tokens_1=torch.tensor([num_real_tokens]),
        backend=backend,
    )
    whole_weights, whole_ids = topk_routing(logits, **CASES[case], backend=backend)
    assert torch.equal(ids[:num_real_tokens], whole_ids[:num_real_tokens])
    assert torch.equal(weights[:num_real_tokens], whole_weights[:num_real_tokens])
    assert (ids[num_real_tokens:] == -1).all()
    counted = whole_ids[:num_real_tokens][:num_counted_tokens].flatten()
    assert torch.equal(load - torch.arange(12), torch.bincount(counted, minlength=12))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "topk_softmax"])
def test_every_expert_is_chosen_once_at_most(scoring: Scoring, backend: Backend) -> None:
    _, ids = topk_routing(torch.zeros(5, 8), top_k=4, scoring=scoring, renormalize=True, backend=backend)
    assert all(len(set(row)) == 4 for row in ids.tolist())
    if backend == "cpu":
        assert ids.tolist() == [[0, 1, 2, 3]] * 5  # of equal experts the lower id


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_choices_are_experts_whatever_the_logits(bad: float, backend: Backend) -> None:
    _, ids = topk_routing(torch.full((2, 6), bad), top_k=3, scoring="softmax", renormalize=True, backend=backend)
    assert all(len(set(row)) == 3 and min(row) >= 0 and max(row) < 6 for row in ids.tolist())


def test_correction_bias_moves_the_choice_and_not_the_weights(backend: Backend) -> None:
    logits = torch.tensor([[1.0, 0.0, -1.0]])
    options = {"top_k": 1, "scoring": "sigmoid", "renormalize": False}
    bias = torch.tensor([0.0, 0.0, 5.0])
    weights, ids = topk_routing(logits, **options, correction_bias_E=bias, backend=backend)
    assert ids.tolist() == [[2]]
    torch.testing.assert_close(weights, logits[:, 2:].sigmoid())


def test_negative_choice_scores_stay_inside_the_selected_groups(backend: Backend, generator: torch.Generator) -> None:
    """A large negative bias must not make a masked expert look better than a selected one."""
    options = {
        "top_k": 3, "scoring": "sigmoid", "renormalize": True, "num_groups": 2, "num_selected_groups": 1,
        "group_score": "top2_sum", "correction_bias_E": torch.full((8,), -10.0),
    }  # fmt: skip
    _, ids = topk_routing(_logits(20, generator, 8), **options, backend=backend)
    assert all(max(row) < 4 or min(row) >= 4 for row in ids.tolist())


def test_vanishing_sigmoids_give_finite_weights(backend: Backend) -> None:
    logits = torch.full((1, 4), -200.0)
    weights, _ = topk_routing(logits, top_k=2, scoring="sigmoid", renormalize=True, backend=backend)
    assert torch.isfinite(weights).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_logits_are_scored_in_float32(dtype: torch.dtype, backend: Backend, generator: torch.Generator) -> None:
    logits = _logits(9, generator).to(dtype)
    options = {"top_k": 2, "scoring": "softmax", "renormalize": True, "backend": backend}
    weights, ids = topk_routing(logits, **options)
    wide_weights, wide_ids = topk_routing(logits.float(), **options)
    assert torch.equal(ids, wide_ids)
    assert torch.equal(weights, wide_weights)


def test_logits_may_be_a_view(backend: Backend, generator: torch.Generator) -> None:
    wide = _logits(7, generator, 30)
    options = {"top_k": 2, "scoring": "sigmoid", "renormalize": True, "backend": backend}
    for view in (wide[:, 5:17], wide[:, ::2]):
        assert torch.equal(topk_routing(view, **options)[0], topk_routing(view.contiguous(), **options)[0])
