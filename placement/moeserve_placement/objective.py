"""What a map is judged by: the highest cost over capacity of any rank, under the best split allowed.

Axes: L layers, E logical experts, P places, R ranks.
"""

from dataclasses import dataclass

import numpy as np

from moeserve_placement.arrays import FloatArray, IntArray
from moeserve_placement.cluster import Cluster
from moeserve_placement.cost import CostModel, by_rank
from moeserve_placement.settings import PlanSettings
from moeserve_placement.split import ROUGH, Effort, balanced_tokens, even_tokens

COST_ROUNDS = 2
"""Times the cost of reading weights is taken from the split before, then the tokens are split around it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    cluster: Cluster
    cost: CostModel
    weighted_split: bool
    spread_over_nodes: bool = False

    @staticmethod
    def of(cluster: Cluster, settings: PlanSettings) -> "Objective":
        """What plans with these settings are judged by."""
        return Objective(
            cluster=cluster,
            cost=settings.cost,
            weighted_split=settings.split == "weighted",
            spread_over_nodes=settings.constraints.spread_over_nodes,
        )

    def tokens(
        self,
        table_LP: IntArray,
        load_LE: FloatArray,
        start_LP: FloatArray | None = None,
        *,
        effort: Effort = ROUGH,
    ) -> FloatArray:
        """Tokens on each place under the best split; start_LP: tokens to start from."""
        if not self.weighted_split:
            return even_tokens(table_LP, load_LE)
        tokens_LP = balanced_tokens(table_LP, load_LE, self.cluster, start_LP=start_LP, effort=effort)
        for _ in range(COST_ROUNDS if self.cost.activation_tokens else 0):
            read_LR = by_rank(self.cost.activations(tokens_LP), self.cluster)
            again_LP = balanced_tokens(
                table_LP, load_LE, self.cluster, offset_LR=read_LR, start_LP=tokens_LP, effort=effort
            )
            tokens_LP = self.lower(again_LP, tokens_LP)
        return tokens_LP

    def lower(self, first_LP: FloatArray, second_LP: FloatArray) -> FloatArray:
        """For each layer the tokens whose highest rank is lower; the second where neither is."""
        first_is_lower_L = self.level_LR(first_LP).max(axis=1) < self.level_LR(second_LP).max(axis=1)
        return np.where(first_is_lower_L[:, None], first_LP, second_LP)

    def level_LR(self, tokens_LP: FloatArray) -> FloatArray:
        """Cost over capacity of each rank."""
        return by_rank(self.cost.of_places(tokens_LP), self.cluster) / self.cluster.capacity_R
