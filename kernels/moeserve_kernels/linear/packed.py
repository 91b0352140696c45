"""A linear layer's weight in the form that one backend reads fastest."""

from dataclasses import dataclass

import torch

from moeserve_kernels.backend import Backend, choose_backend
from moeserve_kernels.linear.quantize import Quantization, quantize_weight
from moeserve_kernels.native import is_loaded
from moeserve_kernels.native.blocks import BlockLayout


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedLinear:
    """Weight and bias of `linear`; make it with `pack_linear`. Outputs have the dtype of the inputs."""

    backend: Backend
    dtype: torch.dtype
    """Of the inputs."""
    num_inputs: int
    num_outputs: int
    weight: torch.Tensor
    """cpu: [blocks, steps, columns, group]; else [out, in]. Of `dtype`, or int8."""
    scale: torch.Tensor | None
    """float32 of each output (cpu: up to whole blocks), where the weight is int8."""
    bias: torch.Tensor | None
    """cpu: float32, up to whole blocks; else [out] of `dtype`."""


def pack_linear(
    weight_FD: torch.Tensor,
    bias_F: torch.Tensor | None = None,
    *,
    quantization: Quantization | None = None,
    backend: Backend | None = None,
) -> PackedLinear:
    """Pack [out, in] and an optional [out] of the same dtype, on their device. The tensors are not kept by cpu."""
    num_outputs, num_inputs = weight_FD.shape
    assert bias_F is None or bias_F.shape == (num_outputs,)
    chosen = choose_backend(weight_FD.device, backend, has_native=is_loaded())
    dtype, scale_F = weight_FD.dtype, None
    if quantization == "int8":
        weight_FD, scale_F = quantize_weight(weight_FD)
    weight, scale, bias = weight_FD, scale_F, bias_F
    if chosen == "cpu":
        layout = BlockLayout.of(dtype, weight_FD.dtype)
        weight = torch.empty(layout.shape(num_outputs, num_inputs), dtype=weight_FD.dtype)
        layout.pack(weight_FD, weight)
        scale, bias = (None if values is None else layout.pad(values) for values in (scale_F, bias_F))
    return PackedLinear(
        backend=chosen,
        dtype=dtype,
        num_inputs=num_inputs,
        num_outputs=num_outputs,
        weight=weight,
        scale=scale,
        bias=bias,
    )
