"""Loads of a large model, drawn at random."""

import numpy as np
import pytest

from moeserve_placement.arrays import FloatArray


@pytest.fixture(scope="session")
def dirichlet_loads() -> FloatArray:
    """58 layers of 256 experts; each layer's shares are uniform over all that sum to one."""
    return np.random.default_rng(0).dirichlet(np.ones(256), 58) * 1e6
