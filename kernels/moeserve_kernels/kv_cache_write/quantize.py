"""Narrow KV caches: int8 or float8 values, and one float32 scale for each token and head."""

import torch

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""What the largest value of a row becomes, by the dtype of the cache."""


def quantize(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(values of `dtype`, scales float32): a row of the last dimension is about `values * scale`; zeros: scale 1."""
    wide = x.float()
    largest = wide.abs().amax(dim=-1)
    scale = torch.where(largest > 0.0, largest / LARGEST[dtype], 1.0)
    narrow = wide / scale.unsqueeze(-1)
    return (narrow.round() if dtype == torch.int8 else narrow).to(dtype), scale
