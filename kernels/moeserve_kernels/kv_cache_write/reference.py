"""Oracle of kv_cache_write: one token at a time, into copies."""

import torch

from moeserve_kernels.kv_cache_write.quantize import LARGEST


def kv_cache_write_reference(x_T: torch.Tensor, cache_NS: torch.Tensor, slot_mapping_T: torch.Tensor) -> torch.Tensor:
    """The cache after the write."""
    out = cache_NS.clone()
    block_size = cache_NS.shape[1]
    for token, slot in enumerate(slot_mapping_T.tolist()):
        if slot >= 0:
            out[slot // block_size, slot % block_size] = x_T[token]
    return out


def quantize_reference(row: list[float], dtype: torch.dtype) -> tuple[list[float], float]:
    """(values that `dtype` has, scale) of one row: each value is the nearest one to `x / scale`."""
    largest = max(abs(value) for value in row)
    scale = largest / LARGEST[dtype] if largest > 0.0 else 1.0
    grid = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    grid = grid[torch.isfinite(grid)]
    return [float(grid[(grid - value / scale).abs().argmin()]) for value in row], scale
