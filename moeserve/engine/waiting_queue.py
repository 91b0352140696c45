"""Requests that wait for a seat and memory, in the order of (priority, arrival)."""

from heapq import heapify, heappop, heappush

from moeserve.engine.request import Request, RequestStatus


class WaitingQueue:
    """A heap that also forgets requests from its middle.

    A preempted request comes back with its old arrival number, so it stands before all that were never admitted.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Request]] = []  # orders are unique: requests are never compared
        self._num_forgotten = 0

    def __len__(self) -> int:
        return len(self._heap) - self._num_forgotten

    def push(self, request: Request) -> None:
        assert request.status is RequestStatus.WAITING
        heappush(self._heap, (request.order, request))

    def first(self) -> Request:
        while self._heap[0][1].status is RequestStatus.FINISHED:
            heappop(self._heap)
            self._num_forgotten -= 1
        return self._heap[0][1]

    def pop(self) -> Request:
        request = self.first()
        heappop(self._heap)
        return request

    def forget(self, request: Request) -> None:
        """Count out a waiting request that has just finished; entries go when they come up or are too many."""
        assert request.status is RequestStatus.FINISHED
        self._num_forgotten += 1
        if self._num_forgotten > len(self):
            self._heap = [entry for entry in self._heap if entry[1].status is RequestStatus.WAITING]
            heapify(self._heap)
            self._num_forgotten = 0
