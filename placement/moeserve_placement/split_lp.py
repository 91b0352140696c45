"""The exact best split of one layer's map by linear programming (scipy's HiGHS).

The planner does without it; it is the oracle of the tests, and says what a map could reach at best.

Axes: E logical experts, P places, R ranks.
"""

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_matrix

from moeserve_placement.arrays import FloatArray, IntArray
from moeserve_placement.cluster import Cluster


def best_split(table_P: IntArray, load_E: FloatArray, cluster: Cluster) -> tuple[FloatArray, float]:
    """Tokens on each place, and the highest load / capacity of a rank, at the optimum.

    Minimise z over tokens x >= 0 with sum x = load_e over the places of expert e, and sum x <= z capacity_r over the
    places of rank r.
    """
    used = np.flatnonzero(table_P >= 0)
    num_used, num_ranks = used.size, cluster.num_ranks
    column = np.arange(num_used)
    ranks = coo_matrix(
        (
            np.concatenate([np.ones(num_used), -cluster.capacity_R]),
            (
                np.concatenate([cluster.rank_of_place_P[used], np.arange(num_ranks)]),
                np.concatenate([column, np.full(num_ranks, num_used)]),
            ),
        ),
        shape=(num_ranks, num_used + 1),
    )
    experts = coo_matrix((np.ones(num_used), (table_P[used], column)), shape=(load_E.size, num_used + 1))
    scale = max(float(load_E.sum()), 1e-300)
    cost = np.zeros(num_used + 1)
    cost[-1] = 1.0
    solution = linprog(cost, A_ub=ranks, b_ub=np.zeros(num_ranks), A_eq=experts, b_eq=load_E / scale, method="highs")
    assert solution.status == 0, solution.message
    tokens_P = np.zeros(table_P.size)
    tokens_P[used] = solution.x[:-1] * scale
    return tokens_P, float(solution.x[-1] * scale)
