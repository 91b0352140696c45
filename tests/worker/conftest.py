"""A tiny checkpoint that the tests of this room share."""

from pathlib import Path

import pytest

from moeserve.testing.checkpoints import write_tiny_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))
