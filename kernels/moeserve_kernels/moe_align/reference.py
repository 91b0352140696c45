"""Oracle of moe_align: one list an expert."""

import torch


def moe_align_reference(expert_ids_R: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `moe_align`."""
    rows_of: dict[int, list[int]] = {expert: [] for expert in [*range(num_experts), -1]}
    for row, expert in enumerate(expert_ids_R.tolist()):
        rows_of[expert].append(row)
    order = [row for rows in rows_of.values() for row in rows]
    counts = [len(rows_of[expert]) for expert in range(num_experts)]
    return torch.tensor(order, dtype=torch.int64), torch.tensor(counts, dtype=torch.int64)
