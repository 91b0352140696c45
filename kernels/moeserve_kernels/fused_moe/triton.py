"""The experts of one rank on GPUs: sort, two grouped products, weighted sum; nothing waits for the host.

Every launch has a shape that follows from the shapes of the arguments, so a step can be captured in a CUDA graph.
Results do not depend on how rows are grouped; between two classes of tuned configurations they agree to the bit only
if the tensor cores add the terms of one instruction in the same order for all tile sizes, which is not documented.
"""

from dataclasses import dataclass

import torch
import triton

from moeserve_kernels.fused_moe.triton_gemm import (
    BLOCK_SCALED,
    CHANNEL_SCALED,
    PLAIN,
    SCALE_BLOCK,
    combine_kernel,
    grouped_gemm_kernel,
    quantize_groups_kernel,
)
from moeserve_kernels.moe_align.triton import SortedRows, sort_rows
from moeserve_kernels.tuning import Config, Tuning, tuning_for

_MAX_DECODE_ROWS = 16
_MAX_MIXED_ROWS = 64
"""Mean routed rows of an expert up to which a class of configurations is meant."""
_NARROW = {torch.int8: "int8", torch.float8_e4m3fn: "float8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Projection:
    """One grouped product: weights, their scales and biases, and how rows enter and leave."""

    weight_pND: torch.Tensor
    scale: torch.Tensor | None
    bias_pN: torch.Tensor | None
    copies: int
    """Neighbouring routed rows that read the same input row."""
    gated: bool
    clamped: bool = False
    alpha: float = 0.0
    limit: float = 0.0


def fused_moe(
    hidden_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    expert_ids_TK: torch.Tensor,
    gate_up_proj_p2FD: torch.Tensor,
    down_proj_pDF: torch.Tensor,
    *,
    activation: str = "silu",
    alpha: float = 1.702,
    limit: float = 7.0,
    gate_up_bias_p2F: torch.Tensor | None = None,
    down_bias_pD: torch.Tensor | None = None,
    gate_up_scale: torch.Tensor | None = None,
    down_scale: torch.Tensor | None = None,
    tuning: Tuning | None = None,
) -> torch.Tensor:
    """As the op. Scales: [p, channels] for int8 weights, [p, channels / 128, inputs / 128] for float8 ones."""
    num_tokens, top_k = expert_ids_TK.shape
    num_experts, hidden_size = gate_up_proj_p2FD.shape[0], hidden_TD.shape[1]
    out_TD = torch.empty(hidden_TD.shape, dtype=hidden_TD.dtype, device=hidden_TD.device)
    if num_tokens == 0:
        return out_TD
    tuning = tuning or tuning_for("fused_moe", hidden_TD.device)
    shape = _shape_class(gate_up_proj_p2FD.dtype, num_tokens * top_k / num_experts)
    if f"gate_up/{shape}" not in tuning:
        raise ValueError(f"no configuration for {gate_up_proj_p2FD.dtype} weights on {hidden_TD.device}")
    assert tuning[f"gate_up/{shape}"]["BLOCK_M"] == tuning[f"down/{shape}"]["BLOCK_M"], (
        "both read the same tiles of rows"
    )
    expert_ids_TK = expert_ids_TK.contiguous()
    rows = sort_rows(expert_ids_TK.flatten(), num_experts, tile_rows=tuning[f"gate_up/{shape}"]["BLOCK_M"])
    gate_up = _Projection(
        weight_pND=gate_up_proj_p2FD,
        scale=gate_up_scale,
        bias_pN=gate_up_bias_p2F,
        copies=top_k,
        gated=True,
        clamped=activation == "swiglu_clamped",
        alpha=alpha,
        limit=limit,
    )
    down = _Projection(weight_pND=down_proj_pDF, scale=down_scale, bias_pN=down_bias_pD, copies=1, gated=False)
    inner_RF = _grouped_gemm(hidden_TD, gate_up, rows, tuning[f"gate_up/{shape}"])
    rows_RD = _grouped_gemm(inner_RF, down, rows, tuning[f"down/{shape}"])
    combine = tuning["combine"]
    combine_kernel[(num_tokens, triton.cdiv(hidden_size, combine["BLOCK_D"]))](
        rows_RD, weights_TK.contiguous(), expert_ids_TK, out_TD, hidden_size, top_k, **combine
    )
    return out_TD


def _shape_class(weight_dtype: torch.dtype, mean_rows: float) -> str:
    """Narrow weights have no class of their own between decode and prefill."""
    if weight_dtype == torch.float32:
        return "float32"
    if mean_rows <= _MAX_DECODE_ROWS:
        phase = "decode"
    else:
        phase = "mixed" if mean_rows <= _MAX_MIXED_ROWS and weight_dtype not in _NARROW else "prefill"
    return f"{_NARROW.get(weight_dtype, 'half')}/{phase}"


def _grouped_gemm(x: torch.Tensor, projection: _Projection, rows: SortedRows, config: Config) -> torch.Tensor:
    """[R, outputs] by routed row, not by sorted place; rows of other ranks stay unwritten."""
    weight, scale = projection.weight_pND, projection.scale
    assert weight.stride(2) == 1
    num_inputs = weight.shape[2]
    num_outputs = weight.shape[1] // 2 if projection.gated else weight.shape[1]
    weight_format = {torch.int8: CHANNEL_SCALED, torch.float8_e4m3fn: BLOCK_SCALED}.get(weight.dtype, PLAIN)
    out = x.new_empty(len(rows.order_R), num_outputs)
    if x.stride(1) != 1:
        x = x.contiguous()
    values, x_scale = _quantize_groups(x) if weight_format == BLOCK_SCALED else (x, x)
    bias = projection.bias_pN
    grouped_gemm_kernel[(len(rows.tiles_B3) * triton.cdiv(num_outputs, config["BLOCK_N"]),)](
        values,
        x_scale,
        weight,
        out if scale is None else scale,
        out if bias is None else bias.contiguous(),
        out,
        rows.order_R,
        rows.tiles_B3,
        len(rows.tiles_B3),
        num_inputs,
        num_outputs,
        projection.copies,
        values.stride(0),
        weight.stride(0),
        weight.stride(1),
        0 if scale is None else scale.stride(0),
        projection.alpha,
        projection.limit,
        FORMAT=weight_format.value,
        GATED=projection.gated,
        CLAMPED=projection.clamped,
        HAS_BIAS=bias is not None,
        EVEN_K=num_inputs % config["BLOCK_K"] == 0,
        **config,
    )
    return out


def _quantize_groups(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, width = x.shape
    block = SCALE_BLOCK.value
    narrow = torch.empty(num_rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(num_rows, triton.cdiv(width, block), dtype=torch.float32, device=x.device)
    quantize_groups_kernel[(num_rows, scale.shape[1])](x, narrow, scale, width, x.stride(0), BLOCK=block, num_warps=1)
    return narrow, scale
