"""From one placement to the next: the expert records to copy, in the order worth doing, and maps that need few.

Axes: L layers, R ranks, P places, s places of a rank, M moves.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from moeserve_placement.arrays import BoolArray, FloatArray, IntArray, with_column
from moeserve_placement.cluster import Cluster
from moeserve_placement.placement import ExpertPlacement


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertMove:
    """Copy one expert record: all tensors of an expert in a layer."""

    layer: int
    logical_expert_id: int
    source_physical_id: int
    """A place that holds the expert under the old placement."""
    destination_physical_id: int
    gain_per_byte: float
    """Tokens that the layer's highest rank loses over the window, for each byte its moves copy."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Moves:
    """The moves of a plan, as columns; iterating gives `ExpertMove`s.

    The layers with most gain per byte come first. Moves of one layer stand together: a prefix that ends between two
    layers leads to a valid placement, one that ends within a layer may not.
    """

    layer_M: IntArray
    logical_M: IntArray
    source_M: IntArray
    destination_M: IntArray
    gain_per_byte_M: FloatArray
    expert_bytes: int

    def __len__(self) -> int:
        return int(self.layer_M.size)

    def __iter__(self) -> Iterator[ExpertMove]:
        for index in range(len(self)):
            yield ExpertMove(
                layer=int(self.layer_M[index]),
                logical_expert_id=int(self.logical_M[index]),
                source_physical_id=int(self.source_M[index]),
                destination_physical_id=int(self.destination_M[index]),
                gain_per_byte=float(self.gain_per_byte_M[index]),
            )

    @property
    def num_bytes(self) -> int:
        return len(self) * self.expert_bytes

    def to_list(self) -> list[dict[str, Any]]:
        """JSON types: an object for each move."""
        return [asdict(move) for move in self]

    def select(self, keep_M: BoolArray) -> "Moves":
        """Some of the moves, in the same order."""
        return Moves(
            layer_M=self.layer_M[keep_M],
            logical_M=self.logical_M[keep_M],
            source_M=self.source_M[keep_M],
            destination_M=self.destination_M[keep_M],
            gain_per_byte_M=self.gain_per_byte_M[keep_M],
            expert_bytes=self.expert_bytes,
        )


def moves_between(
    current: ExpertPlacement,
    target: ExpertPlacement,
    cluster: Cluster,
    *,
    gain_L: FloatArray | None = None,
    expert_bytes: int = 1,
) -> Moves:
    """Every place whose expert changes, with a source: on the same rank, else on the same node, else taken in turn.

    gain_L: tokens that the highest rank of each layer loses by the layer's moves.
    """
    new_LP = (target.physical_to_logical_LP != current.physical_to_logical_LP) & (target.physical_to_logical_LP >= 0)
    layer_M, destination_M = np.nonzero(new_LP)
    logical_M = target.physical_to_logical_LP[layer_M, destination_M]
    replicas_MC = current.logical_to_physical_LEC[layer_M, logical_M]
    rank_MC = cluster.rank_of_place_P[replicas_MC]
    rank_M1 = cluster.rank_of_place_P[destination_M][:, None]
    turn_MC = (np.arange(replicas_MC.shape[1]) - np.arange(layer_M.size)[:, None]) % replicas_MC.shape[1]
    # A later criterion never outweighs an earlier one.
    preference_MC = 4.0 * (rank_MC == rank_M1) + 2.0 * (cluster.node_R[rank_MC] == cluster.node_R[rank_M1])
    preference_MC -= turn_MC / replicas_MC.shape[1]
    preference_MC[replicas_MC < 0] = -np.inf
    source_M = np.take_along_axis(replicas_MC, preference_MC.argmax(axis=1)[:, None], axis=1)[:, 0]
    num_moves_L = np.bincount(layer_M, minlength=current.num_layers)
    gain = np.zeros(current.num_layers) if gain_L is None else gain_L
    worth_L = gain / (np.maximum(num_moves_L, 1) * expert_bytes)
    order_M = np.lexsort((destination_M, layer_M, -worth_L[layer_M]))
    return Moves(
        layer_M=layer_M[order_M],
        logical_M=logical_M[order_M],
        source_M=source_M[order_M],
        destination_M=destination_M[order_M],
        gain_per_byte_M=worth_L[layer_M[order_M]],
        expert_bytes=expert_bytes,
    )


def keep_in_place(
    target_LP: IntArray, tokens_LP: FloatArray, current_LP: IntArray, cluster: Cluster
) -> tuple[IntArray, FloatArray]:
    """The target with the experts of each rank reordered: those the rank holds already stay where they are.

    The target's tokens are reordered with them.
    """
    layer_L11 = np.arange(len(target_LP))[:, None, None]
    target_LRs = with_column(target_LP, -2)[layer_L11, cluster.place_Rs]
    current_LRs = with_column(current_LP, -2)[layer_L11, cluster.place_Rs]
    # An expert is on a rank at most once, and the padding of both stands at the end: each pairs with one place.
    same_LRss = (target_LRs[..., None] == current_LRs[..., None, :]) & (target_LRs[..., None] != -1)
    stays_LRs, comes_LRs = same_LRss.any(axis=2), ~same_LRss.any(axis=3)
    source_LRs = np.where(stays_LRs, same_LRss.argmax(axis=2), 0)
    # As many experts come to a rank as places of it are not kept, so the two orders pair up.
    free_LRs = np.argsort(stays_LRs, axis=2, kind="stable")
    new_LRs = np.argsort(~comes_LRs, axis=2, kind="stable")
    is_new_LRs = np.arange(stays_LRs.shape[2]) < comes_LRs.sum(axis=2)[..., None]
    layer, rank, nth = np.nonzero(is_new_LRs)
    source_LRs[layer, rank, free_LRs[layer, rank, nth]] = new_LRs[layer, rank, nth]
    rank_P = cluster.rank_of_place_P
    offset_P = np.arange(rank_P.size) - cluster.place_Rs[rank_P, 0]
    from_LP = cluster.place_Rs[rank_P, source_LRs[:, rank_P, offset_P]]
    return np.take_along_axis(target_LP, from_LP, axis=1), np.take_along_axis(tokens_LP, from_LP, axis=1)


def relabel_ranks(
    target_LP: IntArray, tokens_LP: FloatArray, current_LP: IntArray, cluster: Cluster, num_experts: int
) -> tuple[IntArray, FloatArray]:
    """The target with its ranks renamed so that each layer keeps as many experts as it can where they lie.

    Only ranks of equal size, capacity and node may take each other's place. The tokens go with the experts.
    """
    # Half a second to import, and most plans never need it.
    from scipy.optimize import linear_sum_assignment

    from_LP = np.tile(np.arange(target_LP.shape[1]), (len(target_LP), 1))
    rows_by_kind: dict[tuple[int, float, int], list[int]] = {}
    for rank in range(cluster.num_ranks):
        kind = (cluster.num_physical_by_rank[rank], cluster.capacity_by_rank[rank], cluster.node_of_rank[rank])
        rows_by_kind.setdefault(kind, []).append(rank)
    for (size, _, _), ranks in rows_by_kind.items():
        places_rs = cluster.place_Rs[ranks, :size]
        for layer in range(len(target_LP)):
            holds_now = _holds(current_LP[layer, places_rs], num_experts)
            holds_then = _holds(target_LP[layer, places_rs], num_experts)
            now, then = linear_sum_assignment(holds_now @ holds_then.T, maximize=True)
            from_LP[layer, places_rs[now]] = places_rs[then]
    return np.take_along_axis(target_LP, from_LP, axis=1), np.take_along_axis(tokens_LP, from_LP, axis=1)


def _holds(expert_rs: IntArray, num_experts: int) -> FloatArray:
    """1.0 where a rank holds an expert [ranks, E]; empty places count for none."""
    holds = np.zeros((len(expert_rs), num_experts + 1))
    np.put_along_axis(holds, np.where(expert_rs < 0, num_experts, expert_rs), 1.0, axis=1)
    return holds[:, :num_experts]
