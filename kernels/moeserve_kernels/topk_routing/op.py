"""Top-k choice of experts: plain (Mixtral, Qwen, OLMoE, gpt-oss) and group-limited (DeepSeek, arXiv 2405.04434)."""

from typing import Any, Literal

import torch

from moeserve_kernels.backend import Backend, choose_backend
from moeserve_kernels.native import is_loaded
from moeserve_kernels.topk_routing import torch_impl

Scoring = Literal["softmax", "sigmoid", "topk_softmax"]
GroupScore = Literal["max", "top2_sum"]


def topk_routing(
    logits_TE: torch.Tensor,
    *,
    top_k: int,
    scoring: Scoring,
    renormalize: bool,
    scaling_factor: float = 1.0,
    num_groups: int = 1,
    num_selected_groups: int = 1,
    group_score: GroupScore = "max",
    correction_bias_E: torch.Tensor | None = None,
    load_E: torch.Tensor | None = None,
    num_counted_tokens: int | None = None,
    num_real_tokens_1: torch.Tensor | None = None,
    backend: Backend | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (weights_TK float32, expert_ids_TK int64), best expert first.

    scoring: softmax or sigmoid over all experts, then the choice; or the choice by logits, then a softmax over the
    chosen. correction_bias_E (float32) is added to the scores for the choice and not for the weights. With
    num_groups > 1 (equal groups of neighbours) only the experts of the num_selected_groups best groups can be chosen; a
    group's score is that of its best expert, or the sum of its two best. renormalize: weights sum to 1 before
    scaling_factor. load_E (int64) is an accumulator: each of the K choices of the first num_counted_tokens tokens
    (default: all) adds 1 to its expert. num_real_tokens_1 (int64 [1], on the device): rows from there on only fill up
    the batch; they choose nobody (-1) and are not counted.
    """
    num_experts = logits_TE.shape[1]
    assert 1 <= top_k <= num_experts
    assert num_experts % num_groups == 0
    assert 1 <= num_selected_groups <= num_groups
    assert group_score == "max" or num_groups == 1 or num_experts >= 2 * num_groups, "a group needs two experts"
    assert top_k <= num_selected_groups * (num_experts // num_groups), "the selected groups hold too few experts"
    assert load_E is None or (load_E.dtype == torch.int64 and load_E.shape == (num_experts,))
    num_counted = len(logits_TE) if num_counted_tokens is None else num_counted_tokens
    assert 0 <= num_counted <= len(logits_TE)
    chosen = choose_backend(logits_TE.device, backend, has_native=is_loaded())
    options: dict[str, Any] = {
        "top_k": top_k,
        "scoring": scoring,
        "renormalize": renormalize,
        "scaling_factor": scaling_factor,
        "num_groups": num_groups,
        "num_selected_groups": num_selected_groups,
        "group_score": group_score,
        "correction_bias_E": correction_bias_E,
    }
    if chosen == "triton":
        from moeserve_kernels.topk_routing import triton as triton_impl

        return triton_impl.topk_routing(
            logits_TE, **options, load_E=load_E, num_counted_tokens=num_counted, num_real_tokens_1=num_real_tokens_1
        )
    counter_E = load_E if num_real_tokens_1 is None else None
    if chosen == "cpu":
        weights_TK, expert_ids_TK = torch.ops.moeserve.topk_routing.default(
            logits_TE, *options.values(), counter_E, num_counted
        )
    else:
        weights_TK, expert_ids_TK = torch_impl.topk_routing(logits_TE, **options)
        if counter_E is not None:
            counter_E += torch.bincount(expert_ids_TK[:num_counted].flatten(), minlength=num_experts)
    if num_real_tokens_1 is not None:
        expert_ids_TK = torch_impl.drop_padding(expert_ids_TK, num_real_tokens_1, num_counted, load_E)
    return weights_TK, expert_ids_TK
