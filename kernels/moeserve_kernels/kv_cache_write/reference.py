"""Oracle of kv_cache_write: one token at a time, into a copy."""

import torch


def kv_cache_write_reference(x_T: torch.Tensor, cache_NS: torch.Tensor, slot_mapping_T: torch.Tensor) -> torch.Tensor:
    """The cache after the write."""
    out = cache_NS.clone()
    block_size = cache_NS.shape[1]
    for token, slot in enumerate(slot_mapping_T.tolist()):
        if slot >= 0:
            out[slot // block_size, slot % block_size] = x_T[token]
    return out
