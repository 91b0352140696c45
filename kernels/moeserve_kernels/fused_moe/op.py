"""Experts that a rank holds, applied to the tokens that were routed to them."""

from typing import Literal

import torch

from moeserve_kernels.linear import linear
from moeserve_kernels.moe_align import moe_align
from moeserve_kernels.silu_and_mul import silu_and_mul

Activation = Literal["silu", "swiglu_clamped"]


def fused_moe(
    hidden_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    expert_ids_TK: torch.Tensor,
    gate_up_proj_p2FD: torch.Tensor,
    down_proj_pDF: torch.Tensor,
    *,
    activation: Activation = "silu",
    alpha: float = 1.702,
    limit: float = 7.0,
    gate_up_bias_p2F: torch.Tensor | None = None,
    down_bias_pD: torch.Tensor | None = None,
) -> torch.Tensor:
    """`out[t] = sum over k of weights[t, k] * expert[expert_ids[t, k]](hidden[t])`, in the dtype of hidden_TD.

    Expert ids are local, 0 <= id < p; a choice of -1 is another rank's and adds nothing. The sum is taken in float32,
    in the order of k, so it does not depend on where an expert lies. alpha and limit belong to swiglu_clamped.
    """
    num_tokens, top_k = expert_ids_TK.shape
    num_experts, double_width, hidden_size = gate_up_proj_p2FD.shape
    assert hidden_TD.shape == (num_tokens, hidden_size)
    assert weights_TK.shape == expert_ids_TK.shape
    assert down_proj_pDF.shape == (num_experts, hidden_size, double_width // 2)

    order_R, counts_p = moe_align(expert_ids_TK.flatten(), num_experts)
    counts = counts_p.tolist()
    order_R = order_R[: sum(counts)]
    rows_RD = hidden_TD[order_R // top_k]
    outputs = []
    start = 0
    for expert, count in enumerate(counts):
        if count == 0:
            continue
        gate_up_bias = None if gate_up_bias_p2F is None else gate_up_bias_p2F[expert]
        down_bias = None if down_bias_pD is None else down_bias_pD[expert]
        gate_up_r2F = linear(rows_RD[start : start + count], gate_up_proj_p2FD[expert], gate_up_bias)
        inner_rF = silu_and_mul(gate_up_r2F) if activation == "silu" else _swiglu_clamped(gate_up_r2F, alpha, limit)
        outputs.append(linear(inner_rF, down_proj_pDF[expert], down_bias))
        start += count
    if not outputs:
        return torch.zeros_like(hidden_TD)
    rows_out = torch.zeros(num_tokens * top_k, hidden_size, dtype=torch.float32, device=hidden_TD.device)
    rows_out[order_R] = torch.cat(outputs).float()
    weighted_T1D = weights_TK.float().unsqueeze(1) @ rows_out.view(num_tokens, top_k, hidden_size)
    return weighted_T1D.squeeze(1).to(hidden_TD.dtype)


def _swiglu_clamped(gate_up_r2F: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """The activation of gpt-oss."""
    gate_rF, up_rF = gate_up_r2F.chunk(2, dim=-1)
    gate_rF = gate_rF.clamp(max=limit)
    up_rF = up_rF.clamp(min=-limit, max=limit)
    return gate_rF * torch.sigmoid(alpha * gate_rF) * (up_rF + 1)
