"""Scatter the rows of a step into the slots of the KV cache."""

import torch


def kv_cache_write(x_T: torch.Tensor, cache_NS: torch.Tensor, slot_mapping_T: torch.Tensor) -> None:
    """`cache[slot // S, slot % S] = x[t]` for every token t, in place; a slot of -1 is not written.

    x_T: [T, ...]; cache_NS: [N, S, ...] with the same trailing shape, contiguous over N and S; slot_mapping_T: int64.
    """
    assert x_T.shape[1:] == cache_NS.shape[2:], f"rows {tuple(x_T.shape)} do not fit cache {tuple(cache_NS.shape)}"
    assert x_T.shape[:1] == slot_mapping_T.shape
    assert x_T.dtype == cache_NS.dtype
    written_T = slot_mapping_T >= 0
    cache_NS.view(-1, *x_T.shape[1:])[slot_mapping_T[written_T]] = x_T[written_T]
