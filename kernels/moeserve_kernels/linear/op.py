"""Linear layer, weight [out, in]."""

import torch
from torch.nn import functional

_CPU_MULTIPLIES_HALVES = torch.backends.cpu.get_cpu_capability() not in {"DEFAULT", "NO AVX", "AVX2"}


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """[..., D] times [F, D] (plus [F]) to [..., F], all of one dtype.

    Where the CPU has no half-precision instructions, a matrix product of halves runs ten times slower than one of
    floats, so halves are widened first and only the result is rounded. A single row is bound by reading the weight, and
    stays as it is.
    """
    narrow = x.dtype in (torch.bfloat16, torch.float16) and x.device.type == "cpu" and not _CPU_MULTIPLIES_HALVES
    if not narrow or x.numel() == x.shape[-1]:
        return functional.linear(x, weight, bias)
    return functional.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)
