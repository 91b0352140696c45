"""Random expert loads and clusters, as hypothesis strategies: flat, skewed, tied, idle and one-sided ones."""

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from moeserve_placement.arrays import FloatArray
from moeserve_placement.cluster import Cluster

PATIENT = settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
"""For properties that solve something: a busy machine is not a failure."""


@st.composite
def expert_loads(draw: st.DrawFn, *, num_layers: int, num_experts: int) -> FloatArray:
    """Tokens [L, E] of one kind for all layers."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (num_layers, num_experts)
    kind = draw(st.sampled_from(["flat", "skewed", "very skewed", "ties", "idle", "one", "none"]))
    loads = {
        "flat": np.full(shape, 100.0),
        "skewed": rng.exponential(100.0, shape),
        "very skewed": 100.0 * rng.exponential(1.0, shape) ** 3,
        "ties": rng.integers(1, 4, shape) * 100.0,
        "idle": rng.exponential(100.0, shape) * (rng.random(shape) < 0.5),
        "one": np.where(np.arange(num_experts) == 0, 1e6, rng.exponential(1.0, shape)),
        "none": np.zeros(shape),
    }
    return loads[kind]


@st.composite
def loads_and_clusters(
    draw: st.DrawFn, *, max_experts: int = 24, max_ranks: int = 6, equal: bool = False
) -> tuple[FloatArray, Cluster]:
    """Loads and a cluster with room for the experts: any sizes, capacities and nodes, or `equal` ranks on one node."""
    num_ranks = draw(st.integers(1, max_ranks))
    num_experts = draw(st.integers(num_ranks, max_experts))
    least = -(-num_experts // num_ranks)
    size = st.integers(least, min(num_experts, least + 3))
    sizes = (draw(size),) * num_ranks if equal else tuple(draw(size) for _ in range(num_ranks))
    cluster = Cluster(
        num_physical_by_rank=sizes,
        node_of_rank=(0,) * num_ranks if equal else tuple(sorted(draw(st.integers(0, 2)) for _ in range(num_ranks))),
        capacity_by_rank=(1.0,) * num_ranks
        if equal
        else tuple(draw(st.sampled_from([0.5, 1.0, 2.0])) for _ in range(num_ranks)),
    )
    return draw(expert_loads(num_layers=draw(st.integers(1, 3)), num_experts=num_experts)), cluster
