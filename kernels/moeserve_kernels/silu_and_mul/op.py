"""silu(gate) * up of a merged gate-up projection."""

import torch
from torch.nn import functional


def silu_and_mul(x_T2F: torch.Tensor) -> torch.Tensor:
    """[T, 2 F] to [T, F]: the gate is the first half of a row, up the second."""
    assert x_T2F.shape[-1] % 2 == 0, f"a merged gate-up row has an even width, got {x_T2F.shape[-1]}"
    gate_TF, up_TF = x_T2F.chunk(2, dim=-1)
    return functional.silu(gate_TF) * up_TF
