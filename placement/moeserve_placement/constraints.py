"""What a placement must keep to, besides being one: pinned replicas, replicas on different nodes, expert groups.

Axes: L layers, E logical experts, P places; M pins, one a layer, expert and rank.
"""

from dataclasses import dataclass

import numpy as np

from moeserve_placement.arrays import IntArray, flat_experts
from moeserve_placement.cluster import Cluster
from moeserve_placement.placement import PlacementError


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """One replica of an expert must lie on a rank; others may lie anywhere."""

    logical_expert_id: int
    rank: int
    layer: int | None = None
    """MoE layer; None is every layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """Hard rules of a plan. Raises PlacementError where two of them cannot both hold."""

    pins: tuple[Pin, ...] = ()
    spread_over_nodes: bool = False
    """No node gets a second replica of an expert before every node has a first, and so on."""
    group_of_expert: tuple[int, ...] | None = None
    """For group-limited routing: all replicas of all experts of a group lie on one node."""

    def __post_init__(self) -> None:
        if self.spread_over_nodes and self.group_of_expert is not None:
            raise PlacementError("spread_over_nodes and group_of_expert exclude each other: a group keeps to one node")

    def check(self, *, num_layers: int, num_experts: int, cluster: Cluster) -> None:
        """Raise PlacementError where a rule names what is not there, or a rank gets more pins than it has places."""
        for pin in self.pins:
            for what, value, end in (
                ("logical_expert_id", pin.logical_expert_id, num_experts),
                ("rank", pin.rank, cluster.num_ranks),
                ("layer", 0 if pin.layer is None else pin.layer, num_layers),
            ):
                if not 0 <= value < end:
                    raise PlacementError(f"a pin's {what} must be in [0, {end}), got {value}")
        layer_M, _, rank_M = self.pin_arrays(num_layers)
        pinned_LR = np.zeros((num_layers, cluster.num_ranks), dtype=np.int64)
        np.add.at(pinned_LR, (layer_M, rank_M), 1)
        over_LR = pinned_LR > np.asarray(cluster.num_physical_by_rank)
        if over_LR.any():
            layer, rank = np.argwhere(over_LR)[0]
            raise PlacementError(
                f"layer {layer}: {pinned_LR[layer, rank]} experts are pinned to rank {rank}, which holds "
                f"{cluster.num_physical_by_rank[rank]}"
            )
        if self.group_of_expert is not None and len(self.group_of_expert) != num_experts:
            raise PlacementError(
                f"group_of_expert must name a group for each of {num_experts} experts, got {len(self.group_of_expert)}"
            )

    def pin_arrays(self, num_layers: int) -> tuple[IntArray, IntArray, IntArray]:
        """Layer, expert and rank of every pin, each once."""
        rows = {
            (layer, pin.logical_expert_id, pin.rank)
            for pin in self.pins
            for layer in (range(num_layers) if pin.layer is None else (pin.layer,))
        }
        columns = np.array(sorted(rows), dtype=np.int64).reshape(-1, 3)
        return columns[:, 0], columns[:, 1], columns[:, 2]


def replicas_on_nodes(table_LP: IntArray, num_experts: int, cluster: Cluster) -> IntArray:
    """Replicas of each expert on each node [L, E + 1, N]; the last expert counts empty places."""
    num_layers, num_nodes = table_LP.shape[0], cluster.num_nodes
    flat = flat_experts(table_LP, num_experts) * num_nodes + cluster.node_R[cluster.rank_of_place_P]
    count = np.bincount(flat.ravel(), minlength=num_layers * (num_experts + 1) * num_nodes)
    return count.reshape(num_layers, num_experts + 1, num_nodes)


def fair_share(num_replicas: IntArray, num_nodes: int) -> IntArray:
    """The most replicas of an expert one node may hold when they are spread."""
    share: IntArray = -(-num_replicas // num_nodes)
    return share


def num_crowded(table_LP: IntArray, num_experts: int, cluster: Cluster) -> IntArray:
    """Replicas [L] that lie on a node beyond its fair share of their expert."""
    on_node_LEN = replicas_on_nodes(table_LP, num_experts, cluster)[:, :num_experts]
    over_LEN = on_node_LEN - fair_share(on_node_LEN.sum(axis=2), cluster.num_nodes)[..., None]
    crowded: IntArray = np.maximum(over_LEN, 0).sum(axis=(1, 2))
    return crowded
