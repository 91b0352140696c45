"""Oracle of linear: float64."""

import torch


def linear_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As `linear`, in float64."""
    out = x.double() @ weight.double().T
    return out if bias is None else out + bias.double()
