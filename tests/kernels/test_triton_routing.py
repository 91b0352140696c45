"""Triton topk_routing: every scoring rule against the oracle, ties, odd groups, expert load, tokens alone."""

from typing import Any

import pytest
import torch

from moeserve_kernels.topk_routing.reference import topk_routing_reference
from moeserve_kernels.topk_routing.triton import topk_routing

TUNING = {"any": {"TILE": 64}}
"""Four tokens a program with 12 experts, so that 17 tokens end in the middle of a tile."""
CASES: dict[str, dict[str, Any]] = {
    "mixtral": {"top_k": 2, "scoring": "softmax", "renormalize": True},
    "olmoe": {"top_k": 3, "scoring": "softmax", "renormalize": False},
    "gpt_oss": {"top_k": 3, "scoring": "topk_softmax", "renormalize": False},
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
    "negative_choice_scores_in_groups": {
        "top_k": 3, "scoring": "sigmoid", "renormalize": True, "num_groups": 2, "num_selected_groups": 1,
        "group_score": "top2_sum", "correction_bias_E": torch.full((12,), -10.0),
    },
    "groups_of_one": {
        "top_k": 2, "scoring": "softmax", "renormalize": True,
        "num_groups": 12, "num_selected_groups": 5, "group_score": "max",
    },
}  # fmt: skip


def _logits(num_tokens: int, device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(num_tokens, 12, generator=torch.Generator().manual_seed(num_tokens)) * 2).to(device, dtype)


def _options(case: str, device: torch.device) -> dict[str, Any]:
    return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in CASES[case].items()}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("num_tokens", [0, 1, 17])
def test_against_reference(case: str, num_tokens: int, triton_device: torch.device) -> None:
    logits = _logits(num_tokens, triton_device)
    weights, ids = topk_routing(logits, **_options(case, triton_device), tuning=TUNING)
    assert weights.dtype == torch.float32
    assert ids.dtype == torch.int64
    assert weights.shape == ids.shape == (num_tokens, CASES[case]["top_k"])
    if num_tokens > 0:
        expected_weights, expected_ids = topk_routing_reference(logits.cpu(), **CASES[case])
        assert torch.equal(ids.cpu(), expected_ids)
        torch.testing.assert_close(weights.double().cpu(), expected_weights, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "topk_softmax"])
def test_of_equal_scores_the_lower_id_is_chosen(scoring: str, triton_device: torch.device) -> None:
    logits = torch.zeros(5, 12, device=triton_device)
    logits[2, 7] = 1.0
    options = {"top_k": 4, "scoring": scoring, "renormalize": True}
    _, ids = topk_routing(logits, **options, tuning=TUNING)
    assert torch.equal(ids.cpu(), topk_routing_reference(logits.cpu(), **options)[1])


@pytest.mark.parametrize("num_counted", [None, 0, 6])
@pytest.mark.parametrize("case", ["olmoe", "deepseek_v3"])
def test_load_grows_by_the_choices_of_real_tokens(
    case: str, num_counted: int | None, triton_device: torch.device
) -> None:
    load = torch.arange(12, device=triton_device)
    _, ids = topk_routing(
        _logits(9, triton_device),
        **_options(case, triton_device),
        load_E=load,
        num_counted_tokens=num_counted,
        tuning=TUNING,
    )
    chosen = ids[:num_counted].flatten().cpu()
    assert torch.equal(load.cpu() - torch.arange(12), torch.bincount(chosen, minlength=12))


@pytest.mark.parametrize(("num_real", "num_counted"), [(0, None), (1, None), (9, None), (6, 3), (3, 6)])
@pytest.mark.parametrize("case", ["olmoe", "deepseek_v3"])
def test_padding_chooses_nobody_and_is_not_counted(
    case: str, num_real: int, num_counted: int | None, triton_device: torch.device
) -> None:
    load = torch.arange(12, device=triton_device)
    logits, options = _logits(9, triton_device), _options(case, triton_device)
    weights, ids = topk_routing(
        logits,
        **options,
        load_E=load,
        num_counted_tokens=num_counted,
        num_real_tokens_1=torch.tensor([num_real], device=triton_device),
        tuning=TUNING,
    )
    whole_weights, whole_ids = topk_routing(logits, **options, tuning=TUNING)
    assert torch.equal(ids[:num_real], whole_ids[:num_real])
    assert torch.equal(weights[:num_real], whole_weights[:num_real])
    assert (ids[num_real:] == -1).all()
    chosen = whole_ids[:num_real][:num_counted].flatten().cpu()
    assert torch.equal(load.cpu() - torch.arange(12), torch.bincount(chosen, minlength=12))


def test_half_logits_in_a_view_are_scored_in_float32(triton_device: torch.device) -> None:
    merged = torch.full((9, 20), torch.nan, device=triton_device, dtype=torch.float16)
    merged[:, 3:15] = _logits(9, triton_device, torch.float16)
    weights, ids = topk_routing(merged[:, 3:15], **CASES["mixtral"], tuning=TUNING)
    wide_weights, wide_ids = topk_routing(merged[:, 3:15].float(), **CASES["mixtral"], tuning=TUNING)
    assert torch.equal(ids, wide_ids)
    assert torch.equal(weights, wide_weights)


def test_vanishing_sigmoids_give_finite_weights(triton_device: torch.device) -> None:
    logits = torch.full((1, 4), -200.0, device=triton_device)
    weights, _ = topk_routing(logits, top_k=2, scoring="sigmoid", renormalize=True, tuning=TUNING)
    assert torch.isfinite(weights).all()


def test_a_row_of_nan_chooses_experts_that_exist(triton_device: torch.device) -> None:
    logits = torch.full((2, 11), torch.nan, device=triton_device)
    _, ids = topk_routing(logits, top_k=3, scoring="softmax", renormalize=True, tuning=TUNING)
    assert ((ids >= 0) & (ids < 11)).all()


@pytest.mark.parametrize("case", CASES)
def test_a_token_knows_no_batch(case: str, triton_device: torch.device) -> None:
    logits, options = _logits(17, triton_device), _options(case, triton_device)
    weights, ids = topk_routing(logits, **options, tuning=TUNING)
    for token in (0, 6, 16):
        alone = topk_routing(logits[token : token + 1], **options, tuning=TUNING)
        assert torch.equal(alone[0][0], weights[token])
        assert torch.equal(alone[1][0], ids[token])
