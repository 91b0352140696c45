"""RMS norm on GPUs: a tile of whole rows per program, so a row is summed in the same order in any batch."""
# mypy: disable-error-code="untyped-decorator"
# ruff: noqa: PLR0917

import torch
import triton
import triton.language as tl

from moeserve_kernels.tuning import Tuning, tuning_for

_MAX_HEAD_WIDTH = 512


@triton.jit
def _rms_norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    total: tl.tensor,
    num_rows: tl.tensor,
    rows_per_group: tl.tensor,
    width: tl.tensor,
    x_stride_group: tl.tensor,
    x_stride_row: tl.tensor,
    eps: tl.tensor,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    rows = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    columns = tl.arange(0, BLOCK_D)
    is_inside = (rows < num_rows)[:, None] & (columns < width)[None, :]
    x_rows = rows // rows_per_group * x_stride_group + rows % rows_per_group * x_stride_row
    values = tl.load(x + x_rows[:, None] + columns[None, :], mask=is_inside, other=0.0)
    offsets = rows[:, None] * width + columns[None, :]
    if HAS_RESIDUAL:
        other = tl.load(residual + offsets, mask=is_inside, other=0.0)
        # The sum is normalised as it is stored, so that the next layer's residual is what was normalised here.
        values = (values.to(tl.float32) + other.to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + offsets, values, mask=is_inside)
    wide = values.to(tl.float32)
    mean = tl.sum(wide * wide, axis=1) / width
    scale = tl.rsqrt(mean + eps)
    weights = tl.load(weight + columns, mask=columns < width, other=0.0).to(tl.float32)
    normed = wide * scale[:, None] * weights[None, :]
    tl.store(out + offsets, normed.to(out.dtype.element_ty), mask=is_inside)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    *,
    tuning: Tuning | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(x + residual), x + residual), both contiguous; without a residual the second is x."""
    tuning = tuning or tuning_for("rms_norm", x.device)
    width = x.shape[-1]
    rows = x.reshape(1, -1, width) if x.ndim < 3 else x.reshape(-1, *x.shape[-2:])
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    num_rows = rows.shape[0] * rows.shape[1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(out)
    if num_rows == 0:
        return out, total
    config = tuning["heads" if width <= _MAX_HEAD_WIDTH else "hidden"]
    _rms_norm_kernel[(triton.cdiv(num_rows, config["BLOCK_R"]),)](
        rows,
        out if residual is None else residual.contiguous(),
        weight,
        out,
        out if residual is None else total,
        num_rows,
        rows.shape[1],
        width,
        rows.stride(0),
        rows.stride(1),
        eps,
        HAS_RESIDUAL=residual is not None,
        BLOCK_D=triton.next_power_of_2(width),
        **config,
    )
    return out, total
