"""The noise floor: how balanced a perfect placement looks when only so many assignments were counted.

If every one of R ranks is equally likely to get each of N = n R routed assignments, the counts are multinomial and the
largest of them is above the mean by chance alone. The floor is E[n / max]. A layer whose measured balancedness is at
its floor has nothing to gain from a move, however low the figure looks.

The distribution of the largest count follows from R independent Poisson(n) counts given their sum (Levin, "A
representation for multinomial cumulative distribution functions", Ann. Statist. 9(5), 1981):

    P(max <= m) = P(X <= m)^R  P(W = N) / P(Poisson(N) = N),   W the sum of R Poisson(n) counts cut off at m.

P(W = N) is taken from a normal density with the Edgeworth term for skewness, or, for few assignments, exactly.
"""

import math

import numpy as np

from moeserve_placement.arrays import FloatArray, IntArray

EXACT_UP_TO = 128
"""Assignments of all ranks together up to which P(W = N) is summed exactly."""
MANY = 1e6
"""Assignments a rank above which 1 / floor - 1 only shrinks with the square root of their number."""

BISECTIONS = 50


def noise_floor(assignments_per_rank: float, num_ranks: int) -> float:
    """Expected mean / max of the rank loads of a perfect placement, in (0, 1].

    assignments_per_rank: routed (token, expert) pairs of one layer in the window or step, over the ranks. 1.0 where
    there is one rank, or nothing was routed. Raises ValueError for a negative number or no rank.
    """
    if assignments_per_rank < 0 or num_ranks < 1:
        raise ValueError(
            f"assignments_per_rank must be at least 0 and num_ranks at least 1, got {assignments_per_rank} and "
            f"{num_ranks}"
        )
    if num_ranks == 1 or assignments_per_rank == 0.0:
        return 1.0
    if assignments_per_rank > MANY:
        excess = 1.0 / noise_floor(MANY, num_ranks) - 1.0
        return 1.0 / (1.0 + excess * math.sqrt(MANY / assignments_per_rank))
    num_total = max(1, round(assignments_per_rank * num_ranks))
    most_M, at_most_M = _largest_count(num_total, num_ranks)
    probability_M = np.diff(at_most_M, prepend=0.0)
    # Rounded-off tail: what is missing from 1 belongs to the largest counts.
    probability_M[-1] += 1.0 - at_most_M[-1]
    return float((probability_M / most_M).sum() * num_total / num_ranks)


def noise_ceiling(assignments_per_rank: float, num_ranks: int, false_alarm: float) -> float:
    """Max / mean of the rank loads that a perfect placement exceeds with at most this probability, at least 1.

    Chernoff's bound for a Poisson count, P(X >= n (1 + x)) <= exp(-n ((1 + x) log(1 + x) - x)), holds for the binomial
    count of one rank too; over the ranks the probabilities add up. 1.0 where there is one rank, or nothing was routed.
    """
    assert 0.0 < false_alarm < 1.0
    if num_ranks == 1 or assignments_per_rank == 0.0:
        return 1.0
    wanted = math.log(num_ranks / false_alarm) / assignments_per_rank
    # (1 + x) log(1 + x) - x is at least x^2 / (2 + 2 x / 3), which is solved for x.
    low, high = 0.0, wanted / 3.0 + math.sqrt((wanted / 3.0) ** 2 + 2.0 * wanted)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2.0
        low, high = (middle, high) if (1.0 + middle) * math.log1p(middle) - middle < wanted else (low, middle)
    return 1.0 + high


def _largest_count(num_total: int, num_ranks: int) -> tuple[IntArray, FloatArray]:
    """Counts m from the mean up, and P(max <= m) for each."""
    mean = num_total / num_ranks
    deviation = math.sqrt(mean)
    top = math.ceil(mean + deviation * (math.sqrt(2.0 * math.log(num_ranks)) + 8.0) + 12.0)
    bottom = max(0, math.floor(mean - 12.0 * deviation - 12.0))
    count_C = np.arange(bottom, top + 1)
    # Poisson probabilities relative to the lowest count; the window holds all but a vanishing share of them.
    log_C = np.concatenate([[0.0], np.cumsum(np.log(mean) - np.log(count_C[1:]))])
    density_C = np.exp(log_C - log_C.max())
    density_C /= density_C.sum()
    first = math.ceil(mean) - bottom
    most_M = count_C[first:]
    if num_total <= EXACT_UP_TO:
        sum_M = np.array([_sum_exactly(density_C[: m - bottom + 1], bottom, num_ranks, num_total) for m in most_M])
    else:
        sum_M = _sum_by_edgeworth(count_C.astype(np.float64), density_C, first, num_ranks, mean)
    # Stirling's series for log N!.
    log_poisson = -0.5 * math.log(2.0 * math.pi * num_total) - 1.0 / (12.0 * num_total) + 1.0 / (360.0 * num_total**3)
    at_most_M = np.minimum(sum_M * math.exp(-log_poisson), 1.0)
    return most_M, np.maximum.accumulate(at_most_M)


def _sum_exactly(density_C: FloatArray, bottom: int, num_ranks: int, num_total: int) -> float:
    """P(every count <= m and their sum is N), by repeated squaring of the cut-off density."""
    square = np.concatenate([np.zeros(bottom), density_C])[: num_total + 1]
    power = np.ones(1)
    exponent = num_ranks
    while exponent:
        if exponent & 1:
            power = np.convolve(power, square)[: num_total + 1]
        square = np.convolve(square, square)[: num_total + 1]
        exponent >>= 1
    return float(power[num_total]) if power.size > num_total else 0.0


def _sum_by_edgeworth(
    count_C: FloatArray, density_C: FloatArray, first: int, num_ranks: int, mean: float
) -> FloatArray:
    """The same for every m from `first` on, from mean, variance and skewness of the cut-off counts."""
    below_M = np.cumsum(density_C)[first:]
    # Centred counts keep the third moment exact for large means.
    centred_C = count_C - mean
    moments = [np.cumsum(centred_C**power * density_C)[first:] / below_M for power in (1, 2, 3)]
    mean_M = moments[0]
    variance_M = np.maximum(moments[1] - mean_M**2, 1e-12)
    third_M = moments[2] - 3.0 * mean_M * moments[1] + 2.0 * mean_M**3
    deviation_M = np.sqrt(num_ranks * variance_M)
    z_M = -num_ranks * mean_M / deviation_M
    skew_M = third_M / variance_M**1.5 / math.sqrt(num_ranks)
    edgeworth_M = np.maximum(1.0 + skew_M * (z_M**3 - 3.0 * z_M) / 6.0, 0.0)
    log_M = num_ranks * np.log(below_M) - z_M**2 / 2.0 - np.log(deviation_M * math.sqrt(2.0 * math.pi))
    probability_M: FloatArray = np.exp(log_M) * edgeworth_M
    return probability_M
