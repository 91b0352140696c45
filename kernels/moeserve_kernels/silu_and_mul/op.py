"""silu(gate) * up of a merged gate-up projection."""

import torch

from moeserve_kernels.backend import Backend, choose_backend
from moeserve_kernels.native import is_loaded
from moeserve_kernels.silu_and_mul import torch_impl


def silu_and_mul(x_T2F: torch.Tensor, *, backend: Backend | None = None) -> torch.Tensor:
    """[T, 2 F] to [T, F]: the gate is the first half of a row, up the second."""
    assert x_T2F.shape[-1] % 2 == 0, f"a merged gate-up row has an even width, got {x_T2F.shape[-1]}"
    chosen = choose_backend(x_T2F.device, backend, has_native=is_loaded())
    if chosen == "cpu":
        return torch.ops.moeserve.silu_and_mul.default(x_T2F)
    if chosen == "triton":
        from moeserve_kernels.silu_and_mul import triton as triton_impl

        return triton_impl.silu_and_mul(x_T2F)
    return torch_impl.silu_and_mul(x_T2F)
