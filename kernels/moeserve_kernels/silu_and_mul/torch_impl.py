"""silu(gate) * up in plain torch."""

import torch
from torch.nn import functional


def silu_and_mul(x_T2F: torch.Tensor) -> torch.Tensor:
    """As the op."""
    gate_TF, up_TF = x_T2F.chunk(2, dim=-1)
    return functional.silu(gate_TF) * up_TF
