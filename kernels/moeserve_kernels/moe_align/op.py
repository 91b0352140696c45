"""Stable sort of routed rows by expert."""

import torch

from moeserve_kernels.backend import Backend, choose_backend
from moeserve_kernels.moe_align import torch_impl
from moeserve_kernels.native import is_loaded


def moe_align(
    expert_ids_R: torch.Tensor, num_experts: int, *, backend: Backend | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (order_R, counts_E), int64: `expert_ids_R[order_R]` is sorted, `counts_E` are the rows of each expert.

    Rows of one expert keep their order. Rows with id -1 belong to nobody here: they come last and are not counted.
    """
    assert expert_ids_R.ndim == 1
    chosen = choose_backend(expert_ids_R.device, backend, has_native=is_loaded())
    if chosen == "torch":
        return torch_impl.moe_align(expert_ids_R, num_experts)
    if chosen == "triton":
        from moeserve_kernels.moe_align import triton as triton_impl

        return triton_impl.moe_align(expert_ids_R, num_experts)
    order_R, counts_E = torch.ops.moeserve.moe_align.default(expert_ids_R, num_experts)
    return order_R, counts_E
