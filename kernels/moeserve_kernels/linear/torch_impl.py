"""Linear layer in plain torch, at full speed on CPUs without half-precision instructions too."""

import torch
from torch.nn import functional

from moeserve_kernels.linear.quantize import dequantize_weight

_CPU_MULTIPLIES_HALVES = torch.backends.cpu.get_cpu_capability() not in {"DEFAULT", "NO AVX", "AVX2"}


def linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None = None, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """As the op, weight [out, in]. Where the CPU has no half-precision instructions, a matrix product of halves runs
    ten times slower than one of floats, so halves are widened first and only the result is rounded. A single row is
    bound by reading the weight, and stays as it is.
    """
    if scale is not None:
        weight = dequantize_weight(weight, scale, x.dtype)
    narrow = x.dtype in (torch.bfloat16, torch.float16) and x.device.type == "cpu" and not _CPU_MULTIPLIES_HALVES
    if not narrow or x.numel() == x.shape[-1]:
        return functional.linear(x, weight, bias)
    return functional.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)
