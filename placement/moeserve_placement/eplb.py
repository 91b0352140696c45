"""The published EPLB algorithm, for comparison: it plans from the loads alone and splits replicas evenly.

Own implementation of the description in DeepSeek-V3 (arXiv:2412.19437, section 3.4) and of the public EPLB repository's
README: replicas go one by one to the expert with the most load per replica; packs are filled longest first, each item
into the lightest pack with room. The hierarchical policy first packs expert groups onto nodes, replicates within each
node, then packs within the node; the global policy treats the cluster as one node.

As published, two replicas of an expert may land on one rank. `part_twins` makes such a map a valid placement that is
as good under an even split, `merge_twins` one that is no worse under a weighted split.

Axes: L layers, E logical experts, P places, R ranks, G groups, N nodes, X items to pack.
"""

import numpy as np

from moeserve_placement.arrays import BoolArray, FloatArray, IntArray
from moeserve_placement.cluster import Cluster
from moeserve_placement.placement import PlacementError


def eplb_global(load_LE: FloatArray, *, num_physical: int, num_ranks: int) -> IntArray:
    """Physical-to-logical table [L, P]. Raises PlacementError where ranks cannot hold equally many."""
    return eplb_hierarchical(load_LE, num_physical=num_physical, num_ranks=num_ranks, num_nodes=1, num_groups=1)


def eplb_hierarchical(
    load_LE: FloatArray, *, num_physical: int, num_ranks: int, num_nodes: int, num_groups: int
) -> IntArray:
    """Physical-to-logical table [L, P]; groups are equal runs of consecutive experts.

    Raises PlacementError unless groups divide the experts, nodes the groups and the ranks, and ranks the places.
    """
    num_layers, num_experts = load_LE.shape
    for what, number, by, divisor in (
        ("experts", num_experts, "groups", num_groups),
        ("groups", num_groups, "nodes", num_nodes),
        ("ranks", num_ranks, "nodes", num_nodes),
        ("physical experts", num_physical, "ranks", num_ranks),
    ):
        if divisor < 1 or number % divisor:
            raise PlacementError(f"EPLB needs {by} that divide the {number} {what}, got {divisor} {by}")
    group_size, per_node = num_experts // num_groups, num_experts // num_nodes
    group_LG = load_LE.reshape(num_layers, num_groups, group_size).sum(axis=2)
    node_LG = _pack(group_LG, num_nodes)
    order_LG = np.argsort(node_LG, axis=1, kind="stable")
    expert_LE = (order_LG[..., None] * group_size + np.arange(group_size)).reshape(num_layers * num_nodes, per_node)
    local_load = np.repeat(load_LE, num_nodes, axis=0)[np.arange(num_layers * num_nodes)[:, None], expert_LE]
    replica_of, count = _replicate(local_load, num_physical // num_nodes)
    share = np.take_along_axis(local_load / count, replica_of, axis=1)
    rank_of = _pack(share, num_ranks // num_nodes)
    by_rank = np.argsort(rank_of, axis=1, kind="stable")
    table = np.take_along_axis(expert_LE, np.take_along_axis(replica_of, by_rank, axis=1), axis=1)
    return table.reshape(num_layers, num_physical)


def twins(table_LP: IntArray, cluster: Cluster, num_experts: int) -> BoolArray:
    """Places [L, P] that hold a replica whose expert the rank has on an earlier place."""
    key_LP = table_LP + cluster.rank_of_place_P * num_experts
    order_LP = np.argsort(key_LP, axis=1, kind="stable")
    sorted_LP = np.take_along_axis(key_LP, order_LP, axis=1)
    again_LP = np.zeros(table_LP.shape, dtype=bool)
    np.put_along_axis(again_LP, order_LP[:, 1:], sorted_LP[:, 1:] == sorted_LP[:, :-1], axis=1)
    return again_LP


def part_twins(table_LP: IntArray, load_LE: FloatArray, cluster: Cluster) -> IntArray:
    """Every twin changes places with the replica of nearest load on a rank that lacks the twin's expert.

    Where no such swap is left (more replicas than ranks), the twin is overwritten as by `merge_twins`.
    """
    table_LP = table_LP.copy()
    num_experts = load_LE.shape[1]
    rank_P = cluster.rank_of_place_P
    for layer, place in np.argwhere(twins(table_LP, cluster, num_experts)):
        row = table_LP[layer]
        if (row[rank_P == rank_P[place]] == row[place]).sum() == 1:
            # An earlier swap took one of the twins away.
            continue
        share_P = (load_LE[layer] / np.bincount(row, minlength=num_experts))[row]
        lacks_R = np.ones(cluster.num_ranks, dtype=bool)
        lacks_R[rank_P[row == row[place]]] = False
        fits = np.flatnonzero(lacks_R[rank_P] & ~np.isin(row, row[rank_P == rank_P[place]]))
        if fits.size:
            other = fits[np.abs(share_P[fits] - share_P[place]).argmin()]
            row[[place, other]] = row[[other, place]]
        else:
            row[place] = _hottest_lacking(row, load_LE[layer], rank_P == rank_P[place])
    return table_LP


def merge_twins(table_LP: IntArray, load_LE: FloatArray, cluster: Cluster) -> IntArray:
    """Every twin is overwritten by the hottest expert per replica that its rank lacks.

    With a free choice of split nothing is lost: one replica can take what both took.
    """
    table_LP = table_LP.copy()
    rank_P = cluster.rank_of_place_P
    for layer, place in np.argwhere(twins(table_LP, cluster, load_LE.shape[1])):
        table_LP[layer, place] = _hottest_lacking(table_LP[layer], load_LE[layer], rank_P == rank_P[place])
    return table_LP


def _hottest_lacking(row_P: IntArray, load_E: FloatArray, on_rank_P: BoolArray) -> int:
    heat_E = load_E / np.bincount(row_P, minlength=load_E.size)
    heat_E[row_P[on_rank_P]] = -1.0
    return int(heat_E.argmax())


def _replicate(load: FloatArray, num_physical: int) -> tuple[IntArray, IntArray]:
    """Expert of each replica, in order of creation, and replicas of each expert."""
    num_rows, num_experts = load.shape
    rows = np.arange(num_rows)
    replica_of = np.empty((num_rows, num_physical), dtype=np.int64)
    replica_of[:, :num_experts] = np.arange(num_experts)
    count = np.ones((num_rows, num_experts), dtype=np.int64)
    for replica in range(num_experts, num_physical):
        hottest = (load / count).argmax(axis=1)
        replica_of[:, replica] = hottest
        count[rows, hottest] += 1
    return replica_of, count


def _pack(weight_LX: FloatArray, num_packs: int) -> IntArray:
    """Pack of each item: longest first, into the lightest pack that holds fewer than its equal share of items."""
    num_rows, num_items = weight_LX.shape
    rows = np.arange(num_rows)
    pack_of = np.empty((num_rows, num_items), dtype=np.int64)
    filled = np.zeros((num_rows, num_packs))
    room = np.full((num_rows, num_packs), num_items // num_packs)
    order = np.argsort(-weight_LX, axis=1, kind="stable")
    for item in order.T:
        pack = np.where(room > 0, filled, np.inf).argmin(axis=1)
        pack_of[rows, item] = pack
        filled[rows, pack] += weight_LX[rows, item]
        room[rows, pack] -= 1
    return pack_of
