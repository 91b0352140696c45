"""What a place costs its rank: the tokens it computes, and the expert weights it has to read for them.

Axes: L layers, P places, R ranks.
"""

from dataclasses import dataclass

import numpy as np

from moeserve_placement.arrays import FloatArray, divide
from moeserve_placement.cluster import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Cost of a place in tokens: n + activation_tokens x num_steps x (1 - exp(-n / num_steps)) for n tokens a window.

    A step reads the weights of an expert once if any token of the step goes there. With n tokens spread over the steps
    of the window as a Poisson process, that is so in a share 1 - exp(-n / num_steps) of them. In large prefill steps
    every expert is active and only tokens differ; in decode steps the reads are most of the time.
    Raises ValueError for a negative cost or no steps.
    """

    activation_tokens: float = 0.0
    """How many routed tokens take as long as reading one expert's weights; 0 counts tokens only."""
    num_steps: float = 1.0
    """Steps of the window the loads are from."""

    def __post_init__(self) -> None:
        if self.activation_tokens < 0 or self.num_steps <= 0:
            raise ValueError(
                f"activation_tokens must be at least 0 and num_steps above 0, got {self.activation_tokens} and "
                f"{self.num_steps}"
            )

    def activations(self, tokens_LP: FloatArray) -> FloatArray:
        """Cost of reading the weights of each place, in tokens."""
        active_LP = -np.expm1(-tokens_LP / self.num_steps)
        cost: FloatArray = self.activation_tokens * self.num_steps * active_LP
        return cost

    def of_places(self, tokens_LP: FloatArray) -> FloatArray:
        """Cost of each place, in tokens."""
        return tokens_LP + self.activations(tokens_LP) if self.activation_tokens else tokens_LP


def by_rank(values_LP: FloatArray, cluster: Cluster) -> FloatArray:
    """Sum over the places of each rank [L, R]."""
    sums: FloatArray = np.add.reduceat(values_LP, cluster.place_Rs[:, 0], axis=1)
    return sums


def mean_level(total_L: FloatArray, cluster: Cluster) -> FloatArray:
    """Load over capacity of every rank if the total were spread perfectly [L]."""
    level: FloatArray = total_L / cluster.capacity_R.sum()
    return level


def balancedness(load_LR: FloatArray, cluster: Cluster) -> FloatArray:
    """Mean over max of load / capacity, for each layer [L]; 1 where a layer has no load."""
    highest_L = (load_LR / cluster.capacity_R).max(axis=1)
    mean_L = mean_level(load_LR.sum(axis=1), cluster)
    return divide(mean_L, highest_L, 1.0)
