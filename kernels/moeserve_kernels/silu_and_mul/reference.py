"""Oracle of silu_and_mul: one number at a time, in Python floats."""

import math

import torch


def silu_and_mul_reference(x_T2F: torch.Tensor) -> torch.Tensor:
    """As `silu_and_mul`, float64."""
    width = x_T2F.shape[1] // 2
    rows = [
        [gate / (1.0 + math.exp(-gate)) * up for gate, up in zip(row[:width], row[width:], strict=True)]
        for row in x_T2F.tolist()
    ]
    return torch.tensor(rows, dtype=torch.float64).reshape(-1, width)
