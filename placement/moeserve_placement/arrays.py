"""Array types, and how maps are counted: small things that every part of the planner shares.

A map is a physical-to-logical table [L, P] in which -1 is an empty place. Flat over its layers, an expert is
layer x (E + 1) + expert, and an empty place is expert E of its layer.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


def flat_experts(table_LP: IntArray, num_experts: int) -> IntArray:
    """Flat index [L, P] of the expert on each place."""
    row_L1 = np.arange(table_LP.shape[0])[:, None] * (num_experts + 1)
    flat: IntArray = table_LP + row_L1
    if table_LP.min(initial=0) < 0:
        flat[table_LP < 0] += num_experts + 1
    return flat


def count_replicas(table_LP: IntArray, num_experts: int) -> IntArray:
    """Replicas of each expert [L, E + 1]; the last column counts empty places."""
    width = num_experts + 1
    count = np.bincount(flat_experts(table_LP, num_experts).ravel(), minlength=len(table_LP) * width)
    return count.reshape(-1, width)


def sum_flat(index: IntArray, values: npt.NDArray[Any], size: int) -> FloatArray:
    """Values added up by a flat index, as float64."""
    return np.bincount(index.ravel(), values.ravel(), size).astype(np.float64, copy=False)


def with_column(table: npt.NDArray[Any], value: Any) -> npt.NDArray[Any]:
    """One more column at the end, for what index -1 or the place past the last should find there."""
    return np.concatenate([table, np.full((len(table), 1), value, dtype=table.dtype)], axis=1)


def divide(numerator: FloatArray, denominator: FloatArray, default: float) -> FloatArray:
    """The quotient, or the default where the denominator is not above 0."""
    shape = np.broadcast_shapes(numerator.shape, denominator.shape)
    quotient: FloatArray = np.divide(numerator, denominator, out=np.full(shape, default), where=denominator > 0)
    return quotient


def run_index(length: IntArray) -> IntArray:
    """0 .. n - 1 for each n of `length`, one run after the other."""
    index: IntArray = np.arange(int(length.sum())) - np.repeat(np.cumsum(length) - length, length)
    return index
