"""Fixtures of all tests: one torch thread, and the native kernels where there is a compiler."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread() -> None:
    """Two threads beside another busy process are many times slower than one."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _native_kernels() -> None:
    """Built once for the machine, as a server does; without a compiler torch serves, and what needs them is skipped."""
    from moeserve_kernels import native

    try:
        native.load()
    except native.NativeUnavailable as reason:
        print(f"native kernels: {reason}")
