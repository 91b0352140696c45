"""Launch configurations of the Triton kernels: data beside each op, read by GPU family and shape class.

`<op>/tuned.json` maps a family to its classes, a class to the tile sizes, warps and pipeline stages of one launch. A
family that a file does not name is served by its nearest relative. The configurations in the repository were chosen by
what the compiler says of them (registers, spills, shared memory, tensor core instructions): none has been timed on a
GPU. `benchmarks/tune_kernels.py` replaces them by measured ones.
"""

import json
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files

import torch

Config = Mapping[str, int]
"""Keyword arguments of one kernel launch."""
Tuning = Mapping[str, Config]
"""Shape class of one op to its configuration, for one family."""

_SMALL_SHARED_MEMORY = "sm_86"
"""Shared memory of 99 KiB: consumer GPUs from Ampere to Blackwell, whatever their tensor cores."""


def family(capability: tuple[int, int]) -> str:
    """The name under which GPUs of this compute capability are tuned."""
    major, minor = capability
    if (major, minor) in ((8, 6), (8, 9)) or major == 12:
        return _SMALL_SHARED_MEMORY
    return f"sm_{major}0"


def nearest_family(wanted: str, known: Iterable[str]) -> str:
    """The newest known family that is not newer than the wanted one, else the oldest."""
    by_age = sorted(known, key=_age)
    assert by_age, "a table of no families"
    return [by_age[0], *(name for name in by_age if _age(name) <= _age(wanted))][-1]


def load_tuning(op: str, wanted_family: str) -> Tuning:
    """The configurations of an op for a family or its nearest relative."""
    table: dict[str, dict[str, dict[str, int]]] = json.loads(
        files("moeserve_kernels").joinpath(op, "tuned.json").read_text()
    )
    return table[nearest_family(wanted_family, table)]


def tuning_for(op: str, device: torch.device) -> Tuning:
    """The configurations of an op for the GPU that holds a tensor; off a GPU (interpreter) of the oldest family."""
    return _tuning_of_gpu(op, device.index) if device.type == "cuda" else _tuning_of_family(op, "sm_80")


@cache
def _tuning_of_gpu(op: str, index: int | None) -> Tuning:
    return _tuning_of_family(op, family(torch.cuda.get_device_capability(index)))


@cache
def _tuning_of_family(op: str, wanted_family: str) -> Tuning:
    return load_tuning(op, wanted_family)


def _age(name: str) -> int:
    return int(name.removeprefix("sm_"))
