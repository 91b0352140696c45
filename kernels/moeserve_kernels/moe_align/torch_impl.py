"""Stable sort of routed rows by expert in plain torch."""

import torch


def moe_align(expert_ids_R: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As the op."""
    keys_R = torch.where(expert_ids_R < 0, num_experts, expert_ids_R)
    counts_E = torch.bincount(keys_R, minlength=num_experts + 1)[:num_experts]
    return torch.argsort(keys_R, stable=True), counts_E
