"""The device of a rank, and what is told of native kernels that cannot be had."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moeserve.worker.device import build_native_kernels, load_native_kernels, resolve_device
from moeserve_kernels.native import builder

CPU = torch.device("cpu")


@pytest.fixture
def _no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(builder, "is_loaded", lambda: False)


def test_a_name_is_a_device_of_this_rank() -> None:
    assert resolve_device("cpu", local_rank=3) == CPU
    assert resolve_device("cuda", local_rank=3) == torch.device("cuda", 3)
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.usefixtures("_no_compiler")
@pytest.mark.parametrize("get", [build_native_kernels, load_native_kernels])
def test_why_there_are_no_kernels_is_one_line(get: Callable[[torch.device], str | None]) -> None:
    reason = get(CPU)
    assert reason == (
        "no native CPU kernels, plain torch computes instead: the C++ compiler /nowhere/c++ cannot be run: "
        "[Errno 2] No such file or directory: '/nowhere/c++'"
    )


@pytest.mark.usefixtures("_no_compiler")
@pytest.mark.parametrize("get", [build_native_kernels, load_native_kernels])
def test_a_gpu_needs_none(get: Callable[[torch.device], str | None]) -> None:
    assert get(torch.device("cuda", 0)) is None


def test_kernels_that_are_loaded_are_loaded_once() -> None:
    if not builder.is_loaded():
        pytest.skip("no native kernels")
    assert load_native_kernels(CPU) is None
    assert load_native_kernels(CPU, may_build=False) is None
