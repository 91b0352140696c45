"""KV cache writes on GPUs: one program carries one token to its slot, and narrows it on the way."""
# mypy: disable-error-code="untyped-decorator"
# ruff: noqa: PLR0917

import torch
import triton
import triton.language as tl

from moeserve_kernels.kv_cache_write.quantize import LARGEST
from moeserve_kernels.tuning import Tuning, tuning_for

_TO_NEAREST: tl.constexpr = tl.constexpr(12582912.0)
"""1.5 * 2 ** 23: adding and subtracting it rounds a small float32 to the nearest integer, halves to even."""


@triton.jit
def _kv_cache_write_kernel(
    x: tl.tensor,
    cache: tl.tensor,
    slot_mapping: tl.tensor,
    scale: tl.tensor,
    num_heads: tl.tensor,
    width: tl.tensor,
    x_stride_token: tl.tensor,
    x_stride_head: tl.tensor,
    cache_stride_slot: tl.tensor,
    cache_stride_head: tl.tensor,
    LARGEST: tl.constexpr,
    TO_INTEGER: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot < 0:
        return
    heads = tl.arange(0, BLOCK_G)
    columns = tl.arange(0, BLOCK_D)
    is_inside = (heads < num_heads)[:, None] & (columns < width)[None, :]
    x_offsets = token * x_stride_token + (heads * x_stride_head)[:, None] + columns[None, :]
    values = tl.load(x + x_offsets, mask=is_inside, other=0.0)
    if LARGEST > 0.0:
        values = values.to(tl.float32)
        largest = tl.max(tl.abs(values), axis=1)
        scales = tl.where(largest > 0.0, tl.div_rn(largest, tl.zeros_like(largest) + LARGEST), 1.0)
        tl.store(scale + slot * num_heads + heads, scales, mask=heads < num_heads)
        values = tl.div_rn(values, tl.broadcast_to(scales[:, None], values.shape))
        if TO_INTEGER:
            values = values + _TO_NEAREST - _TO_NEAREST
    cache_offsets = slot * cache_stride_slot + (heads * cache_stride_head)[:, None] + columns[None, :]
    tl.store(cache + cache_offsets, values.to(cache.dtype.element_ty), mask=is_inside)


def kv_cache_write(
    x_T: torch.Tensor,
    cache_NS: torch.Tensor,
    slot_mapping_T: torch.Tensor,
    scale_NS: torch.Tensor | None = None,
    *,
    tuning: Tuning | None = None,
) -> None:
    """As the op."""
    config = (tuning or tuning_for("kv_cache_write", x_T.device))["any"]
    x_THD = x_T.flatten(1, -2) if x_T.ndim > 2 else x_T.unsqueeze(1)
    cache_CHD = cache_NS.flatten(0, 1)
    cache_CHD = cache_CHD.flatten(1, -2) if cache_CHD.ndim > 2 else cache_CHD.unsqueeze(1)
    if x_THD.stride(-1) != 1:
        x_THD = x_THD.contiguous()
    assert cache_CHD.stride(-1) == 1
    assert cache_CHD.data_ptr() == cache_NS.data_ptr(), "the cache must be contiguous over its blocks and slots"
    assert scale_NS is None or scale_NS.is_contiguous()
    num_tokens, num_heads, width = x_THD.shape
    if x_THD.numel() == 0:
        return
    _kv_cache_write_kernel[(num_tokens,)](
        x_THD,
        cache_CHD,
        slot_mapping_T,
        x_THD if scale_NS is None else scale_NS,
        num_heads,
        width,
        x_THD.stride(0),
        x_THD.stride(1),
        cache_CHD.stride(0),
        cache_CHD.stride(1),
        LARGEST=0.0 if scale_NS is None else LARGEST[cache_NS.dtype],
        TO_INTEGER=cache_NS.dtype == torch.int8,
        BLOCK_G=triton.next_power_of_2(num_heads),
        BLOCK_D=triton.next_power_of_2(width),
        **config,
    )
