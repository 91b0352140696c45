"""Rotate pairs of a head's dimensions by angles of the token's position (arXiv 2104.09864)."""

import torch

from moeserve_kernels.backend import Backend, choose_backend
from moeserve_kernels.native import is_loaded
from moeserve_kernels.rotary import torch_impl


def rotary(
    x_THD: torch.Tensor,
    cos_TR: torch.Tensor,
    sin_TR: torch.Tensor,
    interleaved: bool,
    *,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Rotate the first 2 R dimensions of every head; the rest passes through. Returns a new tensor of x's dtype.

    x_THD may be a view of some of the heads of a merged projection. cos_TR, sin_TR: float32. interleaved: pair i is
    (2 i, 2 i + 1); otherwise it is (i, i + R). Computed in float32.
    """
    num_pairs = cos_TR.shape[-1]
    assert sin_TR.shape == cos_TR.shape == (x_THD.shape[0], num_pairs)
    assert 2 * num_pairs <= x_THD.shape[-1], f"{num_pairs} pairs do not fit heads of {x_THD.shape[-1]} dimensions"
    chosen = choose_backend(x_THD.device, backend, has_native=is_loaded())
    if chosen == "cpu":
        return torch.ops.moeserve.rotary.default(x_THD, cos_TR, sin_TR, interleaved)
    if chosen == "triton":
        from moeserve_kernels.rotary import triton as triton_impl

        return triton_impl.rotary(x_THD, cos_TR, sin_TR, interleaved)
    return torch_impl.rotary(x_THD, cos_TR, sin_TR, interleaved)
