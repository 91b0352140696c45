"""RMS norm: x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv 1910.07467)."""

from typing import overload

import torch

from moeserve_kernels.backend import Backend, choose_backend
from moeserve_kernels.native import is_loaded
from moeserve_kernels.rms_norm import torch_impl


@overload
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: None = None, *, backend: Backend | None = None
) -> torch.Tensor: ...
@overload
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor, *, backend: Backend | None = None
) -> tuple[torch.Tensor, torch.Tensor]: ...
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    *,
    backend: Backend | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """norm(x), or (norm(x + residual), x + residual). Computed in float32, returned in x's dtype.

    x: [..., D]; weight: [D]; residual: like x.
    """
    assert weight.shape == x.shape[-1:], f"weight {tuple(weight.shape)} does not fit x {tuple(x.shape)}"
    assert residual is None or residual.shape == x.shape
    chosen = choose_backend(x.device, backend, has_native=is_loaded())
    if chosen == "cpu":
        if residual is None:
            return torch.ops.moeserve.rms_norm.default(x, weight, eps)
        return torch.ops.moeserve.add_rms_norm.default(x, weight, eps, residual)
    if chosen == "triton":
        from moeserve_kernels.rms_norm import triton as triton_impl

        normed, total = triton_impl.rms_norm(x, weight, eps, residual)
        return normed if residual is None else (normed, total)
    return torch_impl.rms_norm(x, weight, eps, residual)
