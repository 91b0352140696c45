"""At which rate attainment crosses a wanted share, as an interval from trials that are few and noisy.

Two intervals are intersected, each with half of the allowed error. Both use trials from half to twice an estimate.

- Attainment falls with the rate, whatever its form: a rate at which it is significantly above the wanted share is below
  the crossing, one at which it is significantly below lies above (Clopper and Pearson). Sharp where the knee is.
- Near the crossing the logit of attainment falls in a straight line with the logarithm of the rate, fitted by weighted
  least squares; half a request is added to the good and to the bad ones of each trial, so that all-good trials have a
  logit too. A rate belongs to the interval when the line there does not differ significantly from the wanted share
  (Fieller's method). Sharp where attainment falls slowly.

Requests of a trial are not independent: one long queue delays many. They count as fewer, by the variance of the means
of blocks of successive requests relative to that of independent ones. For the line, variances are also multiplied by
what the distances of the trials from it show, as trials at one rate differ.
"""

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from scipy.stats import beta
from scipy.stats import t as student_t

_WINDOW = 2.0
_ERROR = 0.05 / 2
"""Of each of the two intervals."""
_GRID_POINTS = 801

Goods: TypeAlias = tuple[bool, ...]
"""For each request, in order of arrival, whether it was good."""


def crossing_interval(trials: Sequence[tuple[float, Goods]], wanted: float, *, estimate: float) -> tuple[float, float]:
    """Lowest and highest rate at which attainment may cross `wanted`, with 95 % confidence.

    trials: rate, and the requests of a load at that rate. Within half to twice the estimate: an end there says that
    the trials do not tell.
    """
    near = [(rate, goods) for rate, goods in trials if estimate / _WINDOW <= rate <= estimate * _WINDOW]
    inflation = max(1.0, _block_inflation([goods for _, goods in near]))
    low, high = _by_order(near, wanted, inflation)
    line_low, line_high = _by_line(near, wanted, inflation, estimate)
    return (
        max(low, line_low, estimate / _WINDOW),
        min(high, line_high, estimate * _WINDOW),
    )


def _by_order(near: Sequence[tuple[float, Goods]], wanted: float, inflation: float) -> tuple[float, float]:
    """Highest rate that is surely good enough, and lowest that surely is not."""
    low, high = 0.0, math.inf
    for rate in sorted({rate for rate, _ in near}):
        goods = [good for own, each in near if own == rate for good in each]
        num_good = sum(goods) / inflation
        num_bad = len(goods) / inflation - num_good
        if num_good and beta.ppf(_ERROR / 2, num_good, num_bad + 1.0) > wanted:
            low = max(low, rate)
        if num_bad and beta.ppf(1.0 - _ERROR / 2, num_good + 1.0, num_bad) < wanted:
            high = min(high, rate)
    return low, high


def _by_line(
    near: Sequence[tuple[float, Goods]], wanted: float, inflation: float, estimate: float
) -> tuple[float, float]:
    """Rates of the window at which the fitted line may cross."""
    if len({rate for rate, _ in near}) < 2:
        return 0.0, math.inf
    x = np.log([rate / estimate for rate, _ in near])
    good = np.array([sum(goods) for _, goods in near]) + 0.5
    bad = np.array([len(goods) for _, goods in near]) + 1.0 - good
    logit, weight = np.log(good / bad), 1.0 / (1.0 / good + 1.0 / bad)
    design = np.stack([np.ones_like(x), x], axis=1)
    covariance = np.linalg.inv(design.T @ (weight[:, None] * design))
    line = covariance @ design.T @ (weight * logit)
    freedom = max(1, len(near) - 2)
    scatter = float((weight * (logit - design @ line) ** 2).sum()) / freedom
    covariance *= max(scatter, inflation)
    quantile = student_t.ppf(1.0 - _ERROR / 2, freedom)

    grid = np.linspace(-math.log(_WINDOW), math.log(_WINDOW), _GRID_POINTS)
    rows = np.stack([np.ones_like(grid), grid], axis=1)
    distance = np.abs(rows @ line - math.log(wanted / (1.0 - wanted)))
    deviation = np.sqrt(np.einsum("ij,jk,ik->i", rows, covariance, rows))
    possible = grid[distance <= quantile * deviation]
    if not len(possible):  # steeper than the grid is fine
        possible = grid[[int(distance.argmin())]]
    return estimate * math.exp(possible[0]), estimate * math.exp(possible[-1])


def _block_inflation(trials: Sequence[Goods]) -> float:
    """Variance of the means of blocks of requests, times their length, relative to that of independent requests."""
    seen = expected = 0.0
    for goods in trials:
        length = max(1, round(2.0 * math.sqrt(len(goods))))
        num_blocks = len(goods) // length
        share = sum(goods) / len(goods)
        if num_blocks < 2 or share in (0.0, 1.0):
            continue
        means = np.array(goods[: num_blocks * length], dtype=float).reshape(num_blocks, length).mean(axis=1)
        seen += length * float(((means - share) ** 2).sum()) * num_blocks / (num_blocks - 1)
        expected += num_blocks * share * (1.0 - share)
    return seen / expected if expected else 1.0
