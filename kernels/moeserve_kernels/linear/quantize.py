"""Weight-only quantization: int8 weights with one float32 scale for each output channel."""

from typing import Literal

import torch

Quantization = Literal["int8"]
"""How weights are kept in memory; products are of the inputs' type and summed in float32."""

_LARGEST = 127


def quantize_weight(weight_FD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(int8 [F, D], scale float32 [F]): about `int8 * scale`, rounded to nearest; a row of zeros has scale 1."""
    wide_FD = weight_FD.float()
    largest_F = wide_FD.abs().amax(dim=1) if wide_FD.shape[1] > 0 else wide_FD.new_zeros(len(wide_FD))
    scale_F = torch.where(largest_F > 0.0, largest_F / _LARGEST, 1.0)
    return (wide_FD / scale_F.unsqueeze(1)).round_().to(torch.int8), scale_F


def dequantize_weight(weight_FD: torch.Tensor, scale_F: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weight that int8 values and scales stand for."""
    return (weight_FD.float() * scale_F.unsqueeze(1)).to(dtype)
