"""The replicas a packing has yet to place, most loaded first, those of one expert together.

Axes: L layers, E logical experts, Q positions in a layer's queue.
"""

import numpy as np

from moeserve_placement.arrays import FloatArray, IntArray, run_index


class WaitingReplicas:
    """A queue for each layer; all of them are served at once."""

    def __init__(self, left_LE: IntArray, share_LE: FloatArray, *, one_expert_at_a_time: bool) -> None:
        """left_LE: replicas to place. share_LE: load of each replica."""
        num_layers = left_LE.shape[0]
        self._one_expert = one_expert_at_a_time
        self._layer_L = np.arange(num_layers)
        self._length_L = left_LE.sum(axis=1)
        self._next_L = np.zeros(num_layers, dtype=np.int64)
        order_LE = np.argsort(np.where(left_LE > 0, -share_LE, np.inf), axis=1, kind="stable")
        count_LE = np.take_along_axis(left_LE, order_LE, axis=1)
        end_LE = np.cumsum(count_LE, axis=1)
        layer, position = np.repeat(self._layer_L, self._length_L), run_index(self._length_L)
        # One position more than replicas, so that a queue that has run out still has a next.
        shape = (num_layers, int(self._length_L.max(initial=0)) + 1)
        self._expert_LQ = np.zeros(shape, dtype=np.int64)
        self._expert_LQ[layer, position] = np.repeat(order_LE.ravel(), count_LE.ravel())
        self._end_LQ = np.zeros(shape, dtype=np.int64)
        self._end_LQ[layer, position] = np.repeat(end_LE.ravel(), count_LE.ravel())
        last_end_LQ = np.zeros(shape, dtype=np.int64)
        np.put_along_axis(last_end_LQ, end_LE, end_LE, axis=1)
        self._last_end_LQ = np.maximum.accumulate(last_end_LQ, axis=1)

    @property
    def num_left(self) -> int:
        return int((self._length_L - self._next_L).sum())

    def take(self, num_open_L: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """Layer, index into the open ranks, and expert of the next replicas: as many whole experts as fit.

        An expert with more replicas than there are open ranks loses those over.
        """
        until_L = np.minimum(self._next_L + num_open_L, self._length_L)
        end_L = np.maximum(self._end_LQ[self._layer_L, self._next_L], self._next_L)
        if not self._one_expert:
            end_L = np.maximum(end_L, self._last_end_LQ[self._layer_L, until_L])
        num_taken_L = np.minimum(end_L - self._next_L, num_open_L)
        layer, index = np.repeat(self._layer_L, num_taken_L), run_index(num_taken_L)
        expert = self._expert_LQ[layer, self._next_L[layer] + index]
        self._next_L = end_L
        return layer, index, expert
