"""The matrices of all heads in the form that one backend reads fastest."""

from dataclasses import dataclass

import torch

from moeserve_kernels.backend import Backend, choose_backend
from moeserve_kernels.native import is_loaded
from moeserve_kernels.native.blocks import BlockLayout


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedHeads:
    """Weights of `head_linear`; make them with `pack_heads`."""

    backend: Backend
    num_heads: int
    num_inputs: int
    num_outputs: int
    weight: torch.Tensor
    """cpu: [H, blocks, steps, columns, group]; else [H, in, out]."""


def pack_heads(weight_Hoi: torch.Tensor, *, backend: Backend | None = None) -> PackedHeads:
    """Pack [H, out, in] on its device; the tensor is not kept."""
    num_heads, num_outputs, num_inputs = weight_Hoi.shape
    chosen = choose_backend(weight_Hoi.device, backend, has_native=is_loaded())
    if chosen == "cpu":
        layout = BlockLayout.of(weight_Hoi.dtype, weight_Hoi.dtype)
        weight = weight_Hoi.new_empty(num_heads, *layout.shape(num_outputs, num_inputs))
        for head_weight, blocks in zip(weight_Hoi, weight, strict=True):
            layout.pack(head_weight, blocks)
    else:
        weight = weight_Hoi.transpose(1, 2).contiguous()
    return PackedHeads(
        backend=chosen, num_heads=num_heads, num_inputs=num_inputs, num_outputs=num_outputs, weight=weight
    )
