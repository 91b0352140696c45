"""The experts in plain torch: sort the rows by expert, then one linear layer an expert."""

import torch

from moeserve_kernels.fused_moe.packed import PackedExperts
from moeserve_kernels.linear.torch_impl import linear
from moeserve_kernels.moe_align.torch_impl import moe_align
from moeserve_kernels.silu_and_mul.torch_impl import silu_and_mul


def fused_moe(
    hidden_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    expert_ids_TK: torch.Tensor,
    experts: PackedExperts,
    *,
    activation: str,
    alpha: float,
    limit: float,
) -> torch.Tensor:
    """As the op."""
    num_tokens, top_k = expert_ids_TK.shape
    order_R, counts_p = moe_align(expert_ids_TK.flatten(), experts.num_places)
    counts = counts_p.tolist()
    order_R = order_R[: sum(counts)]
    rows_RD = hidden_TD[order_R // top_k]
    outputs = []
    start = 0
    for place, count in enumerate(counts):
        if count == 0:
            continue
        gate_up_r2F = linear(rows_RD[start : start + count], *_layer(experts, "gate_up", place))
        inner_rF = silu_and_mul(gate_up_r2F) if activation == "silu" else _swiglu_clamped(gate_up_r2F, alpha, limit)
        outputs.append(linear(inner_rF, *_layer(experts, "down", place)))
        start += count
    if not outputs:
        return torch.zeros_like(hidden_TD)
    rows_out = torch.zeros(num_tokens * top_k, hidden_TD.shape[1], dtype=torch.float32, device=hidden_TD.device)
    rows_out[order_R] = torch.cat(outputs).float()
    weighted_T1D = weights_TK.float().unsqueeze(1) @ rows_out.view(num_tokens, top_k, hidden_TD.shape[1])
    return weighted_T1D.squeeze(1).to(hidden_TD.dtype)


def _layer(
    experts: PackedExperts, name: str, place: int
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Weight, scale and bias of a projection."""
    scale, bias = (experts.tensors.get(f"{name}_{field}") for field in ("scale", "bias"))
    weight = experts.tensors[f"{name}_proj"][place]
    return weight, None if scale is None else scale[place], None if bias is None else bias[place]


def _swiglu_clamped(gate_up_r2F: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """The activation of gpt-oss."""
    gate_rF, up_rF = gate_up_r2F.chunk(2, dim=-1)
    gate_rF = gate_rF.clamp(max=limit)
    up_rF = up_rF.clamp(min=-limit, max=limit)
    return gate_rF * torch.sigmoid(alpha * gate_rF) * (up_rF + 1)
