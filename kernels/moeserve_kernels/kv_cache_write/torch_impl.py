"""KV cache writes in plain torch."""

import torch

from moeserve_kernels.kv_cache_write.quantize import quantize


def kv_cache_write(
    x_T: torch.Tensor, cache_NS: torch.Tensor, slot_mapping_T: torch.Tensor, scale_NS: torch.Tensor | None
) -> None:
    """As the op."""
    is_written_T = slot_mapping_T >= 0
    slots, rows = slot_mapping_T[is_written_T], x_T[is_written_T]
    if scale_NS is not None:
        rows, scales = quantize(rows, cache_NS.dtype)
        scale_NS.flatten(0, 1)[slots] = scales
    if cache_NS.dtype == torch.float8_e4m3fn:  # torch cannot scatter it everywhere; its bytes it can
        rows, cache_NS = rows.view(torch.uint8), cache_NS.view(torch.uint8)
    cache_NS.flatten(0, 1)[slots] = rows.to(cache_NS.dtype)
