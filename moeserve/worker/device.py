"""Where a rank computes: its device, and the native kernels of a CPU.

The kernels are compiled on the first start on a machine and then loaded in a moment. Where they cannot be had the same
ops run in plain torch: a server that starts is worth more than a fast one that does not, so the reason is only told.
"""

from collections.abc import Callable
from functools import partial
from typing import NoReturn

import torch
from tqdm import tqdm

from moeserve_kernels import native


def resolve_device(name: str, *, local_rank: int = 0) -> torch.device:
    """The device of `model.device`: auto is cuda where there is one, else cpu."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name, local_rank) if name == "cuda" else torch.device(name)


def build_native_kernels(device: torch.device) -> str | None:
    """Compile what processes that compute on `device` will load, with a bar; returns why not where that fails."""
    return _reason_of_failure(native.build) if device.type == "cpu" else None


def load_native_kernels(device: torch.device, *, may_build: bool = True) -> str | None:
    """Have this process compute on `device` with native kernels; else returns why not.

    may_build: compile them first where nobody did. Several processes of a host may do so at once: one compiles, the
    others wait for it.
    """
    return _reason_of_failure(partial(native.load, may_build=may_build)) if device.type == "cpu" else None


def _reason_of_failure(get: Callable[..., object]) -> str | None:
    bars: list[tqdm[NoReturn]] = []

    def on_progress(done: int, total: int) -> None:
        if not bars:
            bars.append(tqdm(total=total, desc="Building native kernels (once, under 90 s)", unit="file"))
        bars[0].update(done - bars[0].n)

    try:
        get(on_progress=on_progress)
    except native.NativeUnavailable as reason:
        return f"no native CPU kernels, plain torch computes instead: {reason}"
    finally:
        for bar in bars:
            bar.close()
    return None
