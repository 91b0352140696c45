"""One torch thread in tests: two threads beside another busy process are many times slower than one."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread() -> None:
    import torch

    torch.set_num_threads(1)
