"""A fresh packing: replicas as a tree that joins all ranks, then every other expert onto the least loaded rank.

With a free choice of split, an expert with replicas on several ranks lets load flow between them. Replicas are laid out
so that the replicated experts are the edges of a tree over all ranks, the hottest nearest the root, where most has to
flow: then any imbalance can flow to where there is room, and the packing stays balanced when loads drift. A rank is
once a child and at most twice a parent, so no rank fills up with hot experts.

Axes: L layers, E logical experts, R ranks, P places, J positions in an order of experts, B ranks of a batch.
"""

from dataclasses import dataclass

import numpy as np

from moeserve_placement.arrays import BoolArray, FloatArray, IntArray, run_index
from moeserve_placement.cluster import Cluster
from moeserve_placement.waiting import WaitingReplicas

MAX_CHILDREN = 2
"""Edges down from a rank in the tree."""
BATCHES = 4
"""Experts are placed on this part of the ranks at a time, the least loaded ones."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackingInput:
    """What is to be packed: the replicas of each expert, the room for them, and what is already decided."""

    load_LE: FloatArray
    count_LE: IntArray
    """Replicas of each expert; 0 for an expert that is not of this layer."""
    room_LR: IntArray
    """Places of each rank that may be used; sums to count_LE's sum."""
    cluster: Cluster
    pin_layer_M: IntArray
    pin_expert_M: IntArray
    pin_rank_M: IntArray
    """Replicas that must lie on a rank, one an index."""
    spread_over_nodes: bool = False


def pack(given: PackingInput) -> IntArray:
    """Physical-to-logical table [L, P]; -1 on places beyond the room. No rank gets two replicas of an expert.

    A replica that finds no rank to lie on (possible with very unequal ranks) gives its place to the hottest expert per
    replica that the rank lacks.
    """
    filling = _Filling(given)
    pinned_LE = np.zeros_like(given.count_LE)
    np.add.at(pinned_LE, (given.pin_layer_M, given.pin_expert_M), 1)
    filling.put(given.pin_layer_M, given.pin_rank_M, given.pin_expert_M)
    in_tree_LE = _plant_tree(filling, (given.count_LE > 1) & (pinned_LE == 0))
    left_LE = np.where(in_tree_LE, 0, given.count_LE - pinned_LE)
    _place_beside_pins(filling, np.where(pinned_LE > 0, left_LE, 0))
    _place_rest(filling, np.where(pinned_LE > 0, 0, left_LE))
    _fill_gaps(filling)
    return filling.table_LP


class _Filling:
    """The table as it fills up, with the load and the room left on each rank."""

    def __init__(self, given: PackingInput) -> None:
        cluster = given.cluster
        num_layers = given.load_LE.shape[0]
        self.given = given
        self.share_LE = given.load_LE / np.maximum(given.count_LE, 1)
        self.table_LP = np.full((num_layers, cluster.num_physical_experts), -1, dtype=np.int64)
        self.load_LR = np.zeros((num_layers, cluster.num_ranks))
        self.used_LR = np.zeros((num_layers, cluster.num_ranks), dtype=np.int64)
        self.first_place_R = cluster.place_Rs[:, 0]

    def level_LR(self) -> FloatArray:
        """Load over capacity, infinite where a rank is full."""
        level: FloatArray = np.where(self.used_LR < self.given.room_LR, self.load_LR, np.inf)
        return level / self.given.cluster.capacity_R

    def put_apart(self, layer: IntArray, rank: IntArray, expert: IntArray) -> None:
        """One replica each, no rank of a layer twice."""
        self.table_LP[layer, self.first_place_R[rank] + self.used_LR[layer, rank]] = expert
        self.used_LR[layer, rank] += 1
        self.load_LR[layer, rank] += self.share_LE[layer, expert]

    def put(self, layer: IntArray, rank: IntArray, expert: IntArray) -> None:
        """One replica each; a rank may come up several times."""
        flat = layer * self.load_LR.shape[1] + rank
        order = np.argsort(flat, kind="stable")
        flat, layer, rank, expert = flat[order], layer[order], rank[order], expert[order]
        count = np.bincount(flat, minlength=self.used_LR.size)
        nth = run_index(count[count > 0])
        self.table_LP[layer, self.first_place_R[rank] + self.used_LR[layer, rank] + nth] = expert
        self.used_LR += count.reshape(self.used_LR.shape)
        tokens = self.share_LE[layer, expert]
        self.load_LR += np.bincount(flat, tokens, self.load_LR.size).reshape(self.load_LR.shape)


def _plant_tree(filling: _Filling, replicated_LE: BoolArray) -> BoolArray:
    """Lay the hottest replicated experts as edges of the tree; returns which experts are laid."""
    given = filling.given
    child_N, parent_N = _tree(given, given.room_LR - filling.used_LR)
    laid_LE = np.zeros_like(replicated_LE)
    num_wanted = int(replicated_LE.sum(axis=1).max(initial=0))
    if not num_wanted or not child_N.size:
        return laid_LE
    order_LJ = np.argsort(np.where(replicated_LE, -given.load_LE, np.inf), axis=1, kind="stable")[:, :num_wanted]
    # n replicas join n ranks: one on the parent of their first edge, one on each child of n - 1 edges.
    edges_LJ = np.take_along_axis(np.where(replicated_LE, given.count_LE - 1, 0), order_LJ, axis=1)
    end_LJ = np.cumsum(edges_LJ, axis=1)
    layer, position = np.nonzero((edges_LJ > 0) & (end_LJ <= child_N.size))
    num_edges = edges_LJ[layer, position]
    first = end_LJ[layer, position] - num_edges
    expert = order_LJ[layer, position]
    edge = run_index(num_edges) + np.repeat(first, num_edges)
    filling.put(
        np.concatenate([layer, np.repeat(layer, num_edges)]),
        np.concatenate([parent_N[first], child_N[edge]]),
        np.concatenate([expert, np.repeat(expert, num_edges)]),
    )
    laid_LE[layer, expert] = True
    return laid_LE


def _tree(given: PackingInput, free_LR: IntArray) -> tuple[IntArray, IntArray]:
    """Child and parent rank of each edge, nearest the root first; the same for all layers."""
    cluster = given.cluster
    room_R = free_LR.min(axis=0, initial=cluster.num_physical_experts)
    best_first_R = _nodes_in_turn(np.lexsort((-room_R, -cluster.capacity_R))[None], cluster)[0]
    ordered = [int(rank) for rank in best_first_R if room_R[rank] > 0]
    children: list[int] = []
    parents: list[int] = []
    offers = ordered[:1] * min(MAX_CHILDREN, int(room_R[ordered[0]])) if ordered else []
    for edge, child in enumerate(ordered[1:]):
        if edge == len(offers):
            break
        if given.spread_over_nodes:
            _bring_forward_other_node(offers, edge, child, cluster)
        parents.append(offers[edge])
        children.append(child)
        offers += [child] * min(MAX_CHILDREN, int(room_R[child]) - 1)
    return np.asarray(children, dtype=np.int64), np.asarray(parents, dtype=np.int64)


def _bring_forward_other_node(offers: list[int], first: int, child: int, cluster: Cluster) -> None:
    for index in range(first, len(offers)):
        if cluster.node_of_rank[offers[index]] != cluster.node_of_rank[child]:
            offers.insert(first, offers.pop(index))
            return


def _nodes_in_turn(order_LR: IntArray, cluster: Cluster) -> IntArray:
    """The order with every node's first rank before any node's second."""
    node_LR = cluster.node_R[order_LR]
    turn_LR = np.zeros_like(order_LR)
    for node in range(cluster.num_nodes):
        here_LR = node_LR == node
        turn_LR = np.where(here_LR, np.cumsum(here_LR, axis=1), turn_LR)
    return np.take_along_axis(order_LR, np.argsort(turn_LR, axis=1, kind="stable"), axis=1)


def _place_beside_pins(filling: _Filling, left_LE: IntArray) -> None:
    """The free replicas of experts that also have pinned ones; there are few of either."""
    given = filling.given
    for layer, expert in np.argwhere(left_LE > 0):
        level_R = filling.level_LR()[layer]
        level_R[given.pin_rank_M[(given.pin_layer_M == layer) & (given.pin_expert_M == expert)]] = np.inf
        rank = np.argsort(level_R, kind="stable")[: left_LE[layer, expert]]
        rank = rank[np.isfinite(level_R[rank])]
        filling.put_apart(np.full_like(rank, layer), rank, np.full_like(rank, expert))


def _place_rest(filling: _Filling, left_LE: IntArray) -> None:
    """Most loaded replicas first onto the least loaded ranks with room, a batch of ranks at a time.

    All replicas of an expert go into one batch, so they lie on different ranks.
    """
    given = filling.given
    num_layers, num_ranks = filling.load_LR.shape
    waiting = WaitingReplicas(left_LE, filling.share_LE, one_expert_at_a_time=given.spread_over_nodes)
    batch = min(num_ranks, max(1, num_ranks // BATCHES, int(left_LE.max(initial=0))))
    if given.spread_over_nodes:
        batch = num_ranks
    row_L1 = np.arange(num_layers)[:, None]
    while waiting.num_left:
        level_LR = filling.level_LR()
        rank_LB = np.argpartition(level_LR, batch - 1, axis=1)[:, :batch]
        level_LB = level_LR[row_L1, rank_LB]
        rank_LB = rank_LB[row_L1, np.argsort(level_LB, axis=1, kind="stable")]
        if given.spread_over_nodes:
            rank_LB = _open_nodes_in_turn(rank_LB, level_LR, given.cluster)
        layer, index, expert = waiting.take(np.isfinite(level_LB).sum(axis=1))
        filling.put_apart(layer, rank_LB[layer, index], expert)


def _open_nodes_in_turn(rank_LR: IntArray, level_LR: FloatArray, cluster: Cluster) -> IntArray:
    """Nodes take turns, and full ranks stay last."""
    turned_LR = _nodes_in_turn(rank_LR, cluster)
    full_LR = ~np.isfinite(np.take_along_axis(level_LR, turned_LR, axis=1))
    return np.take_along_axis(turned_LR, np.argsort(full_LR, axis=1, kind="stable"), axis=1)


def _fill_gaps(filling: _Filling) -> None:
    for layer, rank in np.argwhere(filling.used_LR < filling.given.room_LR):
        start = int(filling.first_place_R[rank])
        for place in range(start + int(filling.used_LR[layer, rank]), start + int(filling.given.room_LR[layer, rank])):
            row = filling.table_LP[layer]
            num_replicas = np.bincount(row[row >= 0], minlength=filling.share_LE.shape[1])
            lacks = num_replicas > 0
            lacks[row[start:place]] = False
            heat = np.where(lacks, filling.given.load_LE[layer] / np.maximum(num_replicas, 1), -1.0)
            row[place] = heat.argmax()
