"""Stable sort of routed rows by expert."""

import torch


def moe_align(expert_ids_R: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (order_R, counts_E), int64: `expert_ids_R[order_R]` is sorted, `counts_E` are the rows of each expert.

    Rows of one expert keep their order. Rows with id -1 belong to nobody here: they come last and are not counted.
    """
    assert expert_ids_R.ndim == 1
    keys_R = torch.where(expert_ids_R < 0, num_experts, expert_ids_R)
    counts_E = torch.bincount(keys_R, minlength=num_experts + 1)[:num_experts]
    return torch.argsort(keys_R, stable=True), counts_E
