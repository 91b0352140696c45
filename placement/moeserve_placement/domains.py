"""Expert groups: each group goes to one node, and each node is then planned on its own.

Axes: L layers, E logical experts, G groups, N nodes, P places.
"""

from dataclasses import dataclass, replace

import numpy as np

from moeserve_placement.arrays import FloatArray, IntArray, with_column
from moeserve_placement.cluster import Cluster
from moeserve_placement.constraints import replicas_on_nodes
from moeserve_placement.placement import PlacementError
from moeserve_placement.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Domain:
    """The ranks of one node, and the experts each layer keeps there, numbered anew from 0."""

    cluster: Cluster
    ranks: IntArray
    places: IntArray
    expert_LE: IntArray
    """Logical expert of each local number; -1 past the last of a layer with fewer."""

    def problem(self, whole: Problem) -> Problem:
        """The part of the whole problem that lies on this node."""
        number_LE = self._number(whole.num_layers, whole.num_experts)
        rank_number = np.full(whole.cluster.num_ranks, -1)
        rank_number[self.ranks] = np.arange(self.ranks.size)
        layer, expert, rank = whole.pins
        here = rank_number[rank] >= 0
        return replace(
            whole,
            load_LE=np.take_along_axis(with_column(whole.load_LE, 0.0), self.expert_LE, axis=1),
            present_LE=self.expert_LE >= 0,
            room_LR=whole.room_LR[:, self.ranks],
            pin_layer_M=layer[here],
            pin_expert_M=number_LE[layer[here], expert[here]],
            pin_rank_M=rank_number[rank[here]],
            objective=replace(whole.objective, cluster=self.cluster),
        )

    def local_table(self, table_LP: IntArray, num_experts: int) -> IntArray:
        """The places of the domain in local numbers."""
        return np.take_along_axis(self._number(len(table_LP), num_experts), table_LP[:, self.places], axis=1)

    def logical_table(self, local_LP: IntArray) -> IntArray:
        """A local table in logical experts."""
        return np.take_along_axis(with_column(self.expert_LE, -1), local_LP, axis=1)

    def _number(self, num_layers: int, num_experts: int) -> IntArray:
        """Local number of each expert, -1 where it lies elsewhere; one more column for empty places."""
        number = np.full((num_layers, num_experts + 1), -1)
        layer, local = np.nonzero(self.expert_LE >= 0)
        number[layer, self.expert_LE[layer, local]] = local
        return number


def node_of_groups(
    load_LE: FloatArray, group_E: IntArray, cluster: Cluster, pins: tuple[IntArray, IntArray, IntArray]
) -> IntArray:
    """Node [L, G] of each group: the heaviest first, onto the node least loaded for its speed that has room for it.

    A group with a pinned expert goes to the node of its pin. Raises PlacementError where the groups do not fit.
    """
    num_layers, num_groups = len(load_LE), int(group_E.max()) + 1
    size_G = np.bincount(group_E, minlength=num_groups)
    node_P = cluster.node_R[cluster.rank_of_place_P]
    room_LN = np.tile(np.bincount(node_P, minlength=cluster.num_nodes), (num_layers, 1))
    speed_N = np.bincount(cluster.node_R, cluster.capacity_R, cluster.num_nodes)
    load_LG = load_LE @ np.eye(num_groups)[group_E]
    pinned_LG = _pinned_node(num_layers, num_groups, group_E, cluster, pins)
    node_LG = np.full((num_layers, num_groups), -1)
    filled_LN = np.zeros((num_layers, cluster.num_nodes))
    # Pinned groups first, then large ones: what is left can go anywhere it fits.
    order_LG = np.lexsort((-load_LG, np.broadcast_to(-size_G, load_LG.shape), pinned_LG < 0), axis=1)
    rows = np.arange(num_layers)
    for group_L in order_LG.T:
        fits_LN = room_LN >= size_G[group_L][:, None]
        pinned_L = pinned_LG[rows, group_L]
        fits_LN &= (pinned_L[:, None] < 0) | (np.arange(cluster.num_nodes) == pinned_L[:, None])
        if not fits_LN.any(axis=1).all():
            layer = int(np.flatnonzero(~fits_LN.any(axis=1))[0])
            group = int(group_L[layer])
            raise PlacementError(f"layer {layer}: no node has {size_G[group]} places left for group {group}")
        node_L = np.where(fits_LN, filled_LN / speed_N, np.inf).argmin(axis=1)
        node_LG[rows, group_L] = node_L
        filled_LN[rows, node_L] += load_LG[rows, group_L]
        room_LN[rows, node_L] -= size_G[group_L]
    return node_LG


def nodes_in_force(table_LP: IntArray, group_E: IntArray, cluster: Cluster) -> IntArray:
    """Node [L, G] of each group under a map; -1 where the group's replicas lie on several."""
    num_experts, num_groups = group_E.size, int(group_E.max()) + 1
    on_node_LEN = replicas_on_nodes(table_LP, num_experts, cluster)[:, :num_experts] > 0
    on_node_LGN = np.zeros((len(table_LP), num_groups, cluster.num_nodes), dtype=bool)
    for expert, group in enumerate(group_E):
        on_node_LGN[:, group] |= on_node_LEN[:, expert]
    return np.where(on_node_LGN.sum(axis=2) == 1, on_node_LGN.argmax(axis=2), -1)


def split_by_node(node_LG: IntArray, group_E: IntArray, cluster: Cluster) -> list[Domain]:
    """One domain for each node that has ranks."""
    node_LE = node_LG[:, group_E]
    domains = []
    for node in range(cluster.num_nodes):
        ranks = np.flatnonzero(cluster.node_R == node)
        if not ranks.size:
            continue
        here_LE = node_LE == node
        width = int(here_LE.sum(axis=1).max())
        order_LE = np.argsort(~here_LE, axis=1, kind="stable")[:, :width]
        domains.append(
            Domain(
                cluster=Cluster(
                    num_physical_by_rank=tuple(cluster.num_physical_by_rank[rank] for rank in ranks),
                    node_of_rank=(0,) * ranks.size,
                    capacity_by_rank=tuple(cluster.capacity_by_rank[rank] for rank in ranks),
                ),
                ranks=ranks,
                places=np.flatnonzero(np.isin(cluster.rank_of_place_P, ranks)),
                expert_LE=np.where(np.take_along_axis(here_LE, order_LE, axis=1), order_LE, -1),
            )
        )
    return domains


def _pinned_node(
    num_layers: int, num_groups: int, group_E: IntArray, cluster: Cluster, pins: tuple[IntArray, IntArray, IntArray]
) -> IntArray:
    pinned_LG = np.full((num_layers, num_groups), -1)
    for layer, expert, rank in zip(*pins, strict=True):
        group, node = group_E[expert], cluster.node_R[rank]
        if pinned_LG[layer, group] not in (-1, node):
            raise PlacementError(f"layer {layer}: experts of group {group} are pinned to two nodes")
        pinned_LG[layer, group] = node
    return pinned_LG
