"""RMS norm: x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv 1910.07467)."""

from typing import overload

import torch


@overload
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: None = None) -> torch.Tensor: ...
@overload
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]: ...
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """norm(x), or (norm(x + residual), x + residual). Computed in float32, returned in x's dtype.

    x: [..., D]; weight: [D]; residual: like x.
    """
    assert weight.shape == x.shape[-1:], f"weight {tuple(weight.shape)} does not fit x {tuple(x.shape)}"
    if residual is None:
        return _norm(x, weight, eps)
    assert residual.shape == x.shape
    total = x + residual
    return _norm(total, weight, eps), total


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)
