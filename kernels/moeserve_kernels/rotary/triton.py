"""Rotary embedding on GPUs: one program turns a tile of heads of one token."""
# mypy: disable-error-code="untyped-decorator"
# ruff: noqa: PLR0917

import torch
import triton
import triton.language as tl

from moeserve_kernels.tuning import Tuning, tuning_for


@triton.jit
def _rotary_kernel(
    x: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    out: tl.tensor,
    num_heads: tl.tensor,
    width: tl.tensor,
    num_pairs: tl.tensor,
    x_stride_token: tl.tensor,
    x_stride_head: tl.tensor,
    cos_stride: tl.tensor,
    sin_stride: tl.tensor,
    INTERLEAVED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    x_rows = x + token * x_stride_token + (heads * x_stride_head)[:, None]
    out_rows = out + token * num_heads * width + (heads * width)[:, None]
    pairs = tl.arange(0, BLOCK_R)
    is_pair = pairs < num_pairs
    is_inside = (heads < num_heads)[:, None] & is_pair[None, :]
    first = (2 * pairs if INTERLEAVED else pairs)[None, :]
    second = (2 * pairs + 1 if INTERLEAVED else pairs + num_pairs)[None, :]
    a = tl.load(x_rows + first, mask=is_inside, other=0.0).to(tl.float32)
    b = tl.load(x_rows + second, mask=is_inside, other=0.0).to(tl.float32)
    c = tl.load(cos + token * cos_stride + pairs, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + token * sin_stride + pairs, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    tl.store(out_rows + first, (a * c - b * s).to(out.dtype.element_ty), mask=is_inside)
    tl.store(out_rows + second, (b * c + a * s).to(out.dtype.element_ty), mask=is_inside)
    if BLOCK_TAIL > 0:
        columns = 2 * num_pairs + tl.arange(0, BLOCK_TAIL)
        is_tail = (heads < num_heads)[:, None] & (columns < width)[None, :]
        tl.store(out_rows + columns[None, :], tl.load(x_rows + columns[None, :], mask=is_tail), mask=is_tail)


def rotary(
    x_THD: torch.Tensor,
    cos_TR: torch.Tensor,
    sin_TR: torch.Tensor,
    interleaved: bool,
    *,
    tuning: Tuning | None = None,
) -> torch.Tensor:
    """As the op."""
    num_tokens, num_heads, width = x_THD.shape
    num_pairs = cos_TR.shape[1]
    if x_THD.stride(-1) != 1:
        x_THD = x_THD.contiguous()
    config = dict((tuning or tuning_for("rotary", x_THD.device))["any"])
    config["BLOCK_H"] = min(config["BLOCK_H"], triton.next_power_of_2(num_heads))
    out = torch.empty(x_THD.shape, dtype=x_THD.dtype, device=x_THD.device)
    tail = width - 2 * num_pairs
    if out.numel() > 0:
        _rotary_kernel[(num_tokens, triton.cdiv(num_heads, config["BLOCK_H"]))](
            x_THD,
            cos_TR,
            sin_TR,
            out,
            num_heads,
            width,
            num_pairs,
            x_THD.stride(0),
            x_THD.stride(1),
            cos_TR.stride(0),
            sin_TR.stride(0),
            INTERLEAVED=interleaved,
            BLOCK_R=triton.next_power_of_2(num_pairs),
            BLOCK_TAIL=triton.next_power_of_2(tail) if tail > 0 else 0,
            **config,
        )
    return out
