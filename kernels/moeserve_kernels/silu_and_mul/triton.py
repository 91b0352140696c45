"""silu(gate) * up on GPUs."""
# mypy: disable-error-code="untyped-decorator"

import torch
import triton
import triton.language as tl

from moeserve_kernels.tuning import Tuning, tuning_for


@triton.jit
def _silu_and_mul_kernel(
    x: tl.tensor, out: tl.tensor, width: tl.tensor, x_stride: tl.tensor, BLOCK_F: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    is_inside = columns < width
    gate = tl.load(x + row * x_stride + columns, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + width + columns, mask=is_inside, other=0.0).to(tl.float32)
    inner = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * width + columns, inner.to(out.dtype.element_ty), mask=is_inside)


def silu_and_mul(x_T2F: torch.Tensor, *, tuning: Tuning | None = None) -> torch.Tensor:
    """As the op."""
    config = (tuning or tuning_for("silu_and_mul", x_T2F.device))["any"]
    width = x_T2F.shape[-1] // 2
    rows = x_T2F.reshape(-1, 2 * width)
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    out = x_T2F.new_empty(*x_T2F.shape[:-1], width)
    if out.numel() > 0:
        grid = (len(rows), triton.cdiv(width, config["BLOCK_F"]))
        _silu_and_mul_kernel[grid](rows, out, width, rows.stride(0), **config)
    return out
