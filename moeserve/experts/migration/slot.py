"""The one change that a rank may have under way, and who may do what to it.

| event                        | empty                | n is copied           | n is staged                            |
|------------------------------|----------------------|-----------------------|----------------------------------------|
| the frontend orders m        | m is copied          | m waits, until its deadline, then fails                        |
| copies of n are done         |                      | n is staged           |                                        |
| n fails, or its time is over |                      | empty                 |                                        |
| the frontend aborts n        | ignored              | empty                 | ignored: another rank may vote for it  |
| the leader withdraws n       | remembered           | empty                 | empty                                  |
| all replicas vote for n      |                      |                       | in force; empty                        |

A leader votes for a change only once it was told that every rank has staged it, and never again after it has
withdrawn it; so a replica whose leader has withdrawn it knows that no other rank can commit it, and a vote of all
replicas finds it staged on every rank. The frontend, which is no party to the vote, can only abort what is not staged.
"Empty" comes last: spare places are given to the next change when the thread that filled them has ended its work.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from moeserve.experts.migration.errors import StagingError
from moeserve.experts.migration.staging import StagedChange


class ChangeSlot:
    """Shared by the thread that steps, the one that hears the frontend and the ones that copy."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._aborted: dict[int, threading.Event] = {}
        """Of the changes that are copied or wait for it."""
        self._is_copying = False
        self._staged: StagedChange | None = None
        self._withdrawn = 0
        """This change and all before it will never be committed."""

    def announce(self, change_id: int) -> threading.Event:
        """A change is ordered; returns the event that tells when it is aborted or withdrawn."""
        with self._condition:
            aborted = self._aborted[change_id] = threading.Event()
            if change_id <= self._withdrawn:
                aborted.set()
            return aborted

    @contextmanager
    def turn(self, change_id: int, deadline: float) -> Iterator[None]:
        """Wait until the slot is empty, then hold it for copying. Raises StagingError."""
        with self._condition:
            aborted = self._aborted[change_id]
            try:
                is_mine = self._condition.wait_for(
                    lambda: aborted.is_set() or not (self._is_copying or self._staged), deadline - time.monotonic()
                )
                if aborted.is_set():
                    raise StagingError("aborted: the change was withdrawn")
                if not is_mine:
                    raise StagingError("too late: the change before it was neither committed nor withdrawn in time")
            except StagingError:
                del self._aborted[change_id]
                raise
            self._is_copying = True
        try:
            yield
        finally:
            with self._condition:
                self._is_copying = False
                self._aborted.pop(change_id, None)
                self._condition.notify_all()

    def put(self, staged: StagedChange) -> None:
        """The copies are done, within the change's turn. Raises StagingError where it was aborted meanwhile."""
        with self._condition:
            if self._aborted.pop(staged.change_id).is_set():
                raise StagingError("aborted: the change was withdrawn")
            self._staged = staged

    def abort(self, change_id: int) -> None:
        """The frontend wants it no more."""
        with self._condition:
            if change_id in self._aborted:
                self._aborted[change_id].set()
                self._condition.notify_all()

    def abort_all(self) -> None:
        """The rank ends."""
        with self._condition:
            for aborted in self._aborted.values():
                aborted.set()
            self._condition.notify_all()

    def withdraw(self, change_id: int) -> None:
        """This replica will never vote for the change again, nor for any before it."""
        with self._condition:
            self._withdrawn = max(self._withdrawn, change_id)
            for other, aborted in self._aborted.items():
                if other <= change_id:
                    aborted.set()
            if self._staged is not None and self._staged.change_id <= change_id:
                self._staged = None
            self._condition.notify_all()

    def is_staged(self, change_id: int) -> bool:
        staged = self._staged
        return staged is not None and staged.change_id == change_id

    def take(self, change_id: int) -> StagedChange:
        """The staged change, which all replicas have voted for; the slot is empty behind it."""
        with self._condition:
            staged, self._staged = self._staged, None
            self._condition.notify_all()
            assert staged is not None, f"change {change_id} is not staged here"
            assert staged.change_id == change_id
            return staged
