"""Scatter the rows of a step into the slots of the KV cache, narrowing them where the cache is narrow."""

import torch

from moeserve_kernels.backend import Backend, choose_backend
from moeserve_kernels.kv_cache_write import torch_impl
from moeserve_kernels.kv_cache_write.quantize import LARGEST
from moeserve_kernels.native import is_loaded


def kv_cache_write(
    x_T: torch.Tensor,
    cache_NS: torch.Tensor,
    slot_mapping_T: torch.Tensor,
    scale_NS: torch.Tensor | None = None,
    *,
    backend: Backend | None = None,
) -> None:
    """`cache[slot // S, slot % S] = x[t]` for every token t, in place; a slot of -1 is not written.

    x_T: [T, G, D] or [T, D]; cache_NS: [N, S, G, D] or [N, S, D], contiguous; slot_mapping_T: int64. A cache of int8 or
    float8_e4m3fn holds `x / scale`, with scale_NS (float32: the cache's shape without D) such that the largest value of
    each row becomes the dtype's largest; a cache of any other dtype has no scale, and rows are rounded to it.
    """
    assert x_T.shape[1:] == cache_NS.shape[2:], f"rows {tuple(x_T.shape)} do not fit cache {tuple(cache_NS.shape)}"
    assert x_T.shape[:1] == slot_mapping_T.shape
    assert (scale_NS is not None) == (cache_NS.dtype in LARGEST), f"a cache of {cache_NS.dtype} and its scale"
    assert scale_NS is None or scale_NS.shape == cache_NS.shape[:-1]
    chosen = choose_backend(x_T.device, backend, has_native=is_loaded())
    if chosen == "cpu":
        torch.ops.moeserve.kv_cache_write.default(x_T, cache_NS, slot_mapping_T, scale_NS)
    elif chosen == "triton":
        from moeserve_kernels.kv_cache_write import triton as triton_impl

        triton_impl.kv_cache_write(x_T, cache_NS, slot_mapping_T, scale_NS)
    else:
        torch_impl.kv_cache_write(x_T, cache_NS, slot_mapping_T, scale_NS)
