"""Oracle of linear: float64."""

import torch


def linear_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T + b in float64, weight [out, in]."""
    out = x.double() @ weight.double().T
    return out if bias is None else out + bias.double()


def quantize_reference(row: list[float]) -> tuple[list[int], float]:
    """int8 values and scale of one output channel."""
    largest = max((abs(value) for value in row), default=0.0)
    scale = largest / 127 if largest > 0.0 else 1.0
    return [round(value / scale) for value in row], scale
