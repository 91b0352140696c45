"""Placement in one life of the ranks: the controller's decisions, and the changes that carry them out."""

import asyncio
from collections.abc import Callable, Sequence

from moeserve.engine.placement_messages import ChangeCommitted, ChangeFailed, ChangeStaged
from moeserve.server.placement.changes import ChangeQueue
from moeserve_placement import Pin, Policy
from moeserve_placement.controller import Command, Measurements, PlacementController, Proposal
from moeserve_placement.controller.evidence import Interval


class LivePlacement:
    """Whoever calls it waits for one call to end before the next: planning runs in a thread, on the same state.

    A thread is enough: planning for 58 layers of 256 experts on 32 ranks takes a tenth of a second, and delays the
    event loop no more than a process of its own would (docs/placement.md has the figures).
    """

    def __init__(self, controller: PlacementController, changes: ChangeQueue, clock: Callable[[], float]) -> None:
        self.controller = controller
        self.changes = changes
        self._clock = clock

    async def observe(self, interval: Interval) -> None:
        """Take in a window; the plan that may follow is made in a thread."""
        now_s = self._clock()
        self._obey(await asyncio.to_thread(self.controller.observe, interval.windows, interval.steps, now_s))

    def hear(self, rank: int, message: ChangeStaged | ChangeFailed | ChangeCommitted) -> None:
        """What a rank says of a change."""
        now_s, controller = self._clock(), self.controller
        match message:
            case ChangeStaged():
                epoch = self.changes.staged(rank, message.change_id, message.num_bytes, now_s)
                measured = Measurements(num_bytes=message.num_bytes, copy_s=message.copy_s, lost_s=message.lost_s)
                commands = [] if epoch is None else controller.ack(rank, epoch, "prepare", now_s, measured)
            case ChangeCommitted():
                epoch = self.changes.committed(rank, message.change_id, now_s)
                measured = Measurements(lost_s=message.pause_s)
                commands = [] if epoch is None else controller.ack(rank, epoch, "commit", now_s, measured)
            case ChangeFailed():
                epoch = self.changes.failed(message.change_id, message.reason, now_s)
                commands = [] if epoch is None else controller.fail(rank, message.reason, now_s, epoch=epoch)
        self._obey(commands)

    def tick(self) -> float:
        """Let deadlines pass; returns the time. Before an order: none is taken while a migration is under way."""
        now_s = self._clock()
        self.changes.tick(now_s)
        self._obey(self.controller.tick(now_s))
        return now_s

    async def plan(self, policy: Policy) -> Proposal:
        """Raises ControlError where nothing can be said now."""
        return await asyncio.to_thread(self.controller.dry_run, self.tick(), policy)

    def apply(self, plan_id: int) -> None:
        """Raises ControlError where the plan is stale, moves nothing or is over budget."""
        self._obey(self.controller.apply(plan_id, self.tick()))

    def rollback(self) -> None:
        """Raises ControlError where there is nothing to go back to."""
        self._obey(self.controller.rollback(self.tick()))

    def set_frozen(self, frozen: bool) -> None:
        """Frozen: nothing is started but what an operator asks for, and copies under way are dropped."""
        now_s = self.tick()
        self._obey(self.controller.freeze(now_s) if frozen else self.controller.thaw(now_s))

    def set_pins(self, pins: Sequence[Pin]) -> None:
        """Raises PlacementError where they cannot hold."""
        self._obey(self.controller.set_pins(pins, self.tick()))

    def _obey(self, commands: list[Command]) -> None:
        """Carry out commands, and those that follow where a rank cannot be reached."""
        while True:
            now_s = self._clock()
            in_flight = self.controller.state in ("preparing", "committing")
            lost = self.changes.obey(commands, self.controller.placement, in_flight=in_flight, now_s=now_s)
            if not lost:
                return
            commands = [
                command for rank in sorted(lost) for command in self.controller.fail(rank, "rank unreachable", now_s)
            ]
