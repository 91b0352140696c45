"""The backends that tests run on, and where Triton kernels run: on a GPU if there is one, else in its interpreter."""

import secrets
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch

import moeserve_kernels
from moeserve_kernels import native
from moeserve_kernels.backend import Backend


@pytest.fixture(scope="module", params=["cpu", "torch"])
def backend(request: pytest.FixtureRequest) -> Backend:
    """Each backend that serves on a CPU."""
    if request.param == "cpu" and not native.is_loaded():
        pytest.skip("no native kernels")
    backend: Backend = request.param
    return backend


@pytest.fixture
def generator() -> torch.Generator:
    """Other numbers in every run; what a failed test prints tells the seed."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Tensors that nobody wrote hold NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def triton_device() -> Iterator[torch.device]:
    """The device of a test's tensors; while the fixture lives, kernels launched on it run."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        yield torch.device("cuda")
        return
    with pytest.MonkeyPatch.context() as patch:
        _interpret(patch)
        yield torch.device("cpu")


def _interpret(patch: pytest.MonkeyPatch) -> None:
    """Put interpreted functions in the place of all compiled ones, Triton's own library included.

    Triton decides at decoration, by an environment variable, for the whole process: too early and too much for a
    session that compiles kernels too, and whose other tests may have imported Triton long before.
    """
    import triton
    import triton.experimental.gluon
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    for folder in Path(moeserve_kernels.__path__[0]).iterdir():
        if (folder / "triton.py").exists():
            import_module(f"moeserve_kernels.{folder.name}.triton")
    interpreted: dict[int, InterpretedFunction] = {}
    owners = [
        module for name, module in sys.modules.items() if name.startswith(("triton.language", "moeserve_kernels"))
    ]
    for owner in (*owners, triton.language.tensor):
        for name, member in list(vars(owner).items()):
            if isinstance(member, JITFunction):
                function = interpreted.setdefault(id(member), InterpretedFunction(member.fn))
                patch.setattr(owner, name, function)
