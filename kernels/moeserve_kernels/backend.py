"""Which implementation of an op runs: chosen by device, or named by the caller.

triton: GPUs (and the interpreter, in tests). cpu: native code, once `moeserve_kernels.native` has loaded it into the
process. torch: plain torch, for every device; serves where no compiler is.
"""

from typing import Literal

import torch

Backend = Literal["triton", "cpu", "torch"]


def choose_backend(device: torch.device, asked: Backend | None, *, has_native: bool) -> Backend:
    """The caller's choice, else the fastest one that can run on `device`."""
    if asked is not None:
        return asked
    if device.type == "cuda":
        return "triton"
    return "cpu" if has_native else "torch"
