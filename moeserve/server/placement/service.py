"""The frontend's control of expert placement: hears the ranks, lets the controller decide, answers operators.

One task (`run`) does everything that changes the controller, one thing after the other; readers look at `view`, which
it renews. An error in here ends online placement, not the server: the map in force stays, and `view` says why.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry

from moeserve.config import Config
from moeserve.engine.placement_messages import FromMigrator, LoadReport, MigratorReady
from moeserve.observability.placement_metrics import PlacementMetrics
from moeserve.server.placement.changes import RankSender
from moeserve.server.placement.live import LivePlacement
from moeserve.server.placement.lives import Lives
from moeserve.server.placement.loads import LoadHistory
from moeserve.server.placement.sample import SampleReader
from moeserve.server.placement.view import PlacementView
from moeserve_placement import Pin, PlacementError, Policy
from moeserve_placement.controller import ControlError, Proposal
from moeserve_placement.controller.evidence import Interval, merge_intervals

logger = logging.getLogger(__name__)

T = TypeVar("T")
TICK_S = 0.25


@dataclass(frozen=True, slots=True)
class _Heard:
    rank: int
    message: FromMigrator


@dataclass(frozen=True, slots=True)
class _Order:
    """What an operator asked for, and who waits for the answer."""

    carry_out: Callable[[LivePlacement], Awaitable[Any]]
    answer: asyncio.Future[Any]


class PlacementService:
    """Lives in one event loop; `clock` gives seconds."""

    def __init__(self, config: Config, registry: CollectorRegistry, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.unix_offset_s = time.time() - clock()
        """Added to the clock's times: seconds since 1970."""
        self._inbox: asyncio.Queue[_Heard | _Order | None] = asyncio.Queue()
        """None: there is a window to look at."""
        self._unseen: list[Interval] = []
        """Windows that the controller has yet to look at."""
        self._num_windows_seen = 0
        self.read_sample = SampleReader(
            lambda: self.view, lambda: self.history, num_windows=2 * config.placement.num_windows
        )
        self._lives = Lives(config, PlacementMetrics(registry, self.read_sample), clock)
        self.view = self._look()

    @property
    def history(self) -> LoadHistory | None:
        """Loads of the newest windows; None before the ranks have come."""
        return self._lives.history

    def receive(self, rank: int, message: FromMigrator) -> None:
        """Take a message of a rank's migrator; never waits."""
        if isinstance(message, LoadReport):
            # Counted at once: while a plan is made windows must not grow stale in the queue.
            self._add_window(self._lives.add_report(message))
        elif message.rank == rank and self._lives.knows(rank):
            self._inbox.put_nowait(_Heard(rank, message))
        else:
            logger.error("dropped a message of rank %d, which claims to be rank %d", rank, message.rank)

    async def run(self, sender: RankSender) -> None:
        """Until cancelled."""
        while True:
            try:
                event = await asyncio.wait_for(self._inbox.get(), TICK_S)
            except TimeoutError:
                event = None
            try:
                await self._handle(event, sender)
                await self._go_on()
            except Exception as error:  # noqa: BLE001 - the server goes on without; the log and `view` tell
                self._stop(error)
            self.view = self._look()

    async def plan(self, policy: Policy = "incremental") -> Proposal:
        """Dry run. Raises ControlError where nothing can be said now."""

        async def plan(live: LivePlacement) -> Proposal:
            self.view = self._look(is_planning=True)
            return await live.plan(policy)

        return await self._order(plan)

    async def apply(self, plan_id: int) -> None:
        """Order a plan that `plan` proposed. Raises ControlError where it cannot be."""

        async def apply(live: LivePlacement) -> None:
            live.apply(plan_id)

        await self._order(apply)

    async def rollback(self) -> None:
        """Go back to the map before the last migration. Raises ControlError where it cannot be."""

        async def rollback(live: LivePlacement) -> None:
            live.rollback()

        await self._order(rollback)

    async def set_frozen(self, frozen: bool) -> None:
        """Start nothing by itself, or follow the load again; later lives of the ranks keep to it."""

        async def set_frozen(live: LivePlacement) -> None:
            live.set_frozen(frozen)
            self._lives.frozen = frozen

        await self._order(set_frozen)

    async def set_pins(self, pins: Sequence[Pin]) -> None:
        """Replace the pins; later lives of the ranks keep to them. Raises PlacementError where they cannot hold."""

        async def set_pins(live: LivePlacement) -> None:
            live.set_pins(pins)
            self._lives.pins = tuple(pins)

        await self._order(set_pins)

    async def _order(self, carry_out: Callable[[LivePlacement], Awaitable[T]]) -> T:
        """What an operator wants done, in its turn; raises what comes of it."""
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._inbox.put_nowait(_Order(carry_out, answer))
        return await answer

    async def _handle(self, event: _Heard | _Order | None, sender: RankSender) -> None:
        match event:
            case _Order():
                await self._carry_out(event)
            case _Heard(message=MigratorReady() as ready):
                self._unseen.clear()
                self._lives.register(ready, sender)
            case _Heard(rank=rank, message=message) if self._lives.live is not None:
                assert not isinstance(message, LoadReport | MigratorReady)
                self._lives.live.hear(rank, message)

    async def _carry_out(self, order: _Order) -> None:
        live = self._lives.live
        if live is None:
            error = ControlError(f"placement is {self._lives.state}: {self._lives.reason}")
            _answer(order.answer, error=error)
            return
        try:
            result = await order.carry_out(live)
        except (ControlError, PlacementError) as error:
            _answer(order.answer, error=error)
        except Exception as error:
            _answer(order.answer, error=error)
            raise
        else:
            self.view = self._look()
            _answer(order.answer, result)

    async def _go_on(self) -> None:
        """What time brings: deadlines, and windows to look at."""
        self._add_window(self._lives.tick())
        live = self._lives.live
        if live is None:
            self._unseen.clear()
            return
        live.tick()
        if self._unseen:
            # Those that came while a plan was made are one window: the controller never falls behind.
            unseen, self._unseen = self._unseen, []
            self.view = self._look(is_planning=True)
            await live.observe(merge_intervals(unseen))
            self._num_windows_seen += len(unseen)

    def _add_window(self, interval: Interval | None) -> None:
        if interval is not None:
            self._unseen.append(interval)
            self._inbox.put_nowait(None)

    def _stop(self, error: Exception) -> None:
        logger.error("online placement has stopped; the map in force stays", exc_info=error)
        self._unseen.clear()
        self._lives.end("stopped", f"{type(error).__name__}: {error}")

    def _look(self, *, is_planning: bool = False) -> PlacementView:
        lives = self._lives
        live = lives.live
        if live is None:
            return PlacementView(
                state=lives.state,
                reason=lives.reason,
                frozen=lives.frozen,
                pins=lives.pins,
                is_planning=False,
                failures=lives.failures,
                num_windows_seen=self._num_windows_seen,
                known=lives.known,
            )
        now_s = self._clock()
        status, change = live.controller.status(now_s), live.changes.current
        return PlacementView(
            state=status.state,
            reason=status.last_reason,
            frozen=status.frozen,
            pins=lives.pins,
            is_planning=is_planning,
            failures=lives.failures,
            num_windows_seen=self._num_windows_seen,
            known=lives.known,
            status=status,
            decisions=live.controller.decisions,
            change=None if change is None else change.to_dict(now_s),
        )


def _answer(answer: asyncio.Future[Any], result: Any = None, *, error: Exception | None = None) -> None:
    """Nobody may be waiting any more."""
    if answer.done():
        return
    if error is None:
        answer.set_result(result)
    else:
        answer.set_exception(error)
