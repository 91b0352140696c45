"""Experts that a rank holds, applied to the tokens that were routed to them."""

from typing import Literal

import torch

from moeserve_kernels.fused_moe import torch_impl
from moeserve_kernels.fused_moe.packed import PackedExperts

Activation = Literal["silu", "swiglu_clamped"]


def fused_moe(
    hidden_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    expert_ids_TK: torch.Tensor,
    experts: PackedExperts,
    *,
    activation: Activation = "silu",
    alpha: float = 1.702,
    limit: float = 7.0,
) -> torch.Tensor:
    """`out[t] = sum over k of weights[t, k] * expert[expert_ids[t, k]](hidden[t])`, in the dtype of hidden_TD.

    Expert ids are places of `experts`; a choice of -1 is another rank's and adds nothing. The sum is taken in float32,
    in the order of k, so it does not depend on where an expert lies. alpha and limit belong to swiglu_clamped. The
    backend is the one the experts were packed for; on cpu a token's result does not depend on the others, to the bit.
    """
    assert hidden_TD.shape == (expert_ids_TK.shape[0], experts.shape.hidden_size)
    assert hidden_TD.dtype == experts.shape.dtype, f"packed for {experts.shape.dtype}, got {hidden_TD.dtype}"
    assert weights_TK.shape == expert_ids_TK.shape
    tensors = experts.tensors
    if experts.backend == "torch":
        return torch_impl.fused_moe(
            hidden_TD, weights_TK, expert_ids_TK, experts, activation=activation, alpha=alpha, limit=limit
        )
    if experts.backend == "triton":
        from moeserve_kernels.fused_moe import triton as triton_impl

        return triton_impl.fused_moe(
            hidden_TD,
            weights_TK,
            expert_ids_TK,
            tensors["gate_up_proj"],
            tensors["down_proj"],
            activation=activation,
            alpha=alpha,
            limit=limit,
            gate_up_bias_p2F=tensors.get("gate_up_bias"),
            down_bias_pD=tensors.get("down_bias"),
            gate_up_scale=tensors.get("gate_up_scale"),
            down_scale=tensors.get("down_scale"),
        )
    return torch.ops.moeserve.fused_moe.default(
        hidden_TD,
        weights_TK.float(),
        expert_ids_TK,
        tensors["gate_up_proj"],
        tensors["down_proj"],
        experts.shape.width,
        tensors.get("gate_up_scale"),
        tensors.get("down_scale"),
        tensors.get("gate_up_bias"),
        tensors.get("down_bias"),
        activation == "swiglu_clamped",
        alpha,
        limit,
    )
