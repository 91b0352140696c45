"""Bring a map in line with the rules by few moves: room per layer, pins, replicas on different nodes.

Axes: L layers, E logical experts, R ranks, P places, N nodes.
"""

from dataclasses import dataclass

import numpy as np

from moeserve_placement.arrays import BoolArray, FloatArray, IntArray, count_replicas
from moeserve_placement.cluster import Cluster
from moeserve_placement.constraints import fair_share, replicas_on_nodes
from moeserve_placement.placement import PlacementError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Layer:
    """One layer under repair; `expert_P` and `fixed_P` are changed in place."""

    expert_P: IntArray
    tokens_P: FloatArray
    fixed_P: BoolArray
    num_experts: int
    cluster: Cluster

    def places(self, rank: int) -> IntArray:
        return self.cluster.places(rank)

    def num_replicas_P(self) -> IntArray:
        """Replicas of the expert on each place."""
        num_replicas: IntArray = count_replicas(self.expert_P[None], self.num_experts)[0][self.expert_P]
        return num_replicas

    def swap(self, place: int, other: int) -> None:
        self.expert_P[[place, other]] = self.expert_P[[other, place]]

    def put_pin(self, expert: int, rank: int) -> bool:
        """Make way for the expert on its rank; False where the rank is full of pins."""
        places = self.places(rank)
        places = places[~self.fixed_P[places]]
        empty = self.expert_P[places] < 0
        redundant = places[empty | (self.num_replicas_P()[places] > 1)]
        if redundant.size:
            used = np.where(self.expert_P[redundant] < 0, -1.0, self.tokens_P[redundant])
            place = int(redundant[used.argmin()])
            self.expert_P[place] = expert
            self.fixed_P[place] = True
            return True
        for source in np.flatnonzero((self.expert_P == expert) & ~self.fixed_P):
            there = self.expert_P[self.places(int(self.cluster.rank_of_place_P[source]))]
            movable = places[~np.isin(self.expert_P[places], there)]
            if movable.size:
                place = int(movable[np.abs(self.tokens_P[movable] - self.tokens_P[source]).argmin()])
                self.swap(place, int(source))
                self.fixed_P[place] = True
                return True
        return False

    def move_off_node(self, place: int) -> None:
        """Swap the replica to another node, tokens as near as can be; leaves it where nothing fits."""
        expert, rank_P = int(self.expert_P[place]), self.cluster.rank_of_place_P
        node_P = self.cluster.node_R[rank_P]
        on_node_EN = replicas_on_nodes(self.expert_P[None], self.num_experts, self.cluster)[0]
        fair_E = fair_share(on_node_EN.sum(axis=1), self.cluster.num_nodes)
        is_empty_P = self.expert_P < 0
        has_room_P = on_node_EN[expert, node_P] < fair_E[expert]
        may_come_P = is_empty_P | (on_node_EN[self.expert_P, node_P[place]] < fair_E[self.expert_P])
        not_here_P = is_empty_P | ~np.isin(self.expert_P, self.expert_P[self.places(int(rank_P[place]))])
        lacks_R = np.ones(self.cluster.num_ranks, dtype=bool)
        lacks_R[rank_P[self.expert_P == expert]] = False
        fits_P = has_room_P & may_come_P & not_here_P & lacks_R[rank_P] & ~self.fixed_P & (node_P != node_P[place])
        fits = np.flatnonzero(fits_P)
        if fits.size:
            self.swap(place, int(fits[np.abs(self.tokens_P[fits] - self.tokens_P[place]).argmin()]))


def fit_room(table_LP: IntArray, tokens_LP: FloatArray, room_LR: IntArray, cluster: Cluster) -> IntArray:
    """The map with no rank above its room: the places of redundant replicas with the fewest tokens become empty.

    A rank that holds too many experts without other replicas hands those with the fewest tokens to ranks with room.
    """
    table_LP = table_LP.copy()
    used_LR = np.add.reduceat((table_LP >= 0).astype(np.int64), cluster.place_Rs[:, 0], axis=1)
    over_LR = used_LR > room_LR
    for layer, rank in np.argwhere(over_LR):
        row = table_LP[layer]
        places = cluster.places(int(rank))
        for place in places[np.argsort(tokens_LP[layer, places], kind="stable")]:
            if (row[places] >= 0).sum() <= room_LR[layer, rank]:
                break
            if row[place] >= 0 and (row == row[place]).sum() > 1:
                row[place] = -1
    for layer in np.flatnonzero(over_LR.any(axis=1)):
        _hand_over(table_LP[layer], tokens_LP[layer], room_LR[layer], cluster)
    return table_LP


def _hand_over(row_P: IntArray, tokens_P: FloatArray, room_R: IntArray, cluster: Cluster) -> None:
    """Move experts, in `row_P` itself, from ranks above their room to the ranks with most room left."""
    # Where all room is taken, redundant replicas elsewhere make some; there are any, for the room holds every expert.
    while (row_P >= 0).sum() > room_R.sum():
        num_replicas = np.bincount(row_P[row_P >= 0])
        redundant = np.flatnonzero((row_P >= 0) & (num_replicas[row_P] > 1))
        row_P[redundant[tokens_P[redundant].argmin()]] = -1
    used_R = np.add.reduceat((row_P >= 0).astype(np.int64), cluster.place_Rs[:, 0])
    for rank in np.flatnonzero(used_R > room_R):
        places = cluster.places(int(rank))
        held = places[row_P[places] >= 0]
        for place in held[np.argsort(tokens_P[held], kind="stable")][: used_R[rank] - room_R[rank]]:
            other = int((room_R - used_R).argmax())
            there = cluster.places(other)
            row_P[there[row_P[there] < 0][0]], row_P[place] = row_P[place], -1
            used_R[other] += 1
        used_R[rank] = room_R[rank]


def put_pins(
    table_LP: IntArray,
    tokens_LP: FloatArray,
    pins: tuple[IntArray, IntArray, IntArray],
    num_experts: int,
    cluster: Cluster,
) -> tuple[IntArray, BoolArray]:
    """The map with every pinned replica in place, and the places that must not change for it.

    pins: layer, expert and rank of each. An unmet pin takes an empty place or that of the least used redundant replica
    of its rank; where there is none, it changes places with the expert whose tokens are nearest. Raises PlacementError
    where neither can be.
    """
    table_LP = table_LP.copy()
    fixed_LP = np.zeros(table_LP.shape, dtype=bool)
    unmet = []
    for layer, expert, rank in zip(*pins, strict=True):
        held = np.flatnonzero((table_LP[layer] == expert) & (cluster.rank_of_place_P == rank))
        fixed_LP[layer, held] = True
        if not held.size:
            unmet.append((int(layer), int(expert), int(rank)))
    for layer, expert, rank in unmet:
        under_repair = _Layer(
            expert_P=table_LP[layer],
            tokens_P=tokens_LP[layer],
            fixed_P=fixed_LP[layer],
            num_experts=num_experts,
            cluster=cluster,
        )
        if not under_repair.put_pin(expert, rank):
            raise PlacementError(f"layer {layer}: expert {expert} cannot be pinned to rank {rank}: it is full of pins")
    return table_LP, fixed_LP


def spread(
    table_LP: IntArray, tokens_LP: FloatArray, fixed_LP: BoolArray, num_experts: int, cluster: Cluster
) -> IntArray:
    """Swap replicas away from nodes that hold more of an expert than their fair share; leaves what cannot be helped."""
    table_LP = table_LP.copy()
    on_node_LEN = replicas_on_nodes(table_LP, num_experts, cluster)[:, :num_experts]
    over_LEN = on_node_LEN - fair_share(on_node_LEN.sum(axis=2), cluster.num_nodes)[..., None]
    node_P = cluster.node_R[cluster.rank_of_place_P]
    for layer, expert, node in np.argwhere(over_LEN > 0):
        under_repair = _Layer(
            expert_P=table_LP[layer],
            tokens_P=tokens_LP[layer],
            fixed_P=fixed_LP[layer],
            num_experts=num_experts,
            cluster=cluster,
        )
        here = np.flatnonzero((table_LP[layer] == expert) & (node_P == node) & ~fixed_LP[layer])
        for place in here[np.argsort(tokens_LP[layer, here], kind="stable")][: over_LEN[layer, expert, node]]:
            under_repair.move_off_node(int(place))
    return table_LP
