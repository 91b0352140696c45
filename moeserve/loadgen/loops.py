"""Two ways to send: when the plan says so, whatever the server does (open loop), or as fast as it answers (closed)."""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from moeserve.loadgen.outcomes import Outcome
from moeserve.loadgen.sender import PreparedRequest, Sender
from moeserve.loadgen.traffic import PlannedRequest

OnOutcome: TypeAlias = Callable[[Outcome], None]
NextRequest: TypeAlias = Callable[[float], PlannedRequest | None]
"""Takes the seconds since the start of the load; None ends it."""

_PAUSE_AFTER_FAILURE_S = 0.2
"""A client of a closed loop would send without end to a server that refuses at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """A load that came to its end."""

    outcomes: tuple[Outcome, ...]
    seconds: float
    """From the start to the end of the last request, or of the time for which it was planned."""


async def run_open_loop(
    sender: Sender,
    plan: Sequence[PlannedRequest],
    *,
    duration_s: float,
    on_outcome: OnOutcome,
    stop: asyncio.Event,
    cuts_off: bool = False,
) -> LoadResult:
    """Send each request of the plan, which is in order, at its time of arrival.

    duration_s: for which the plan was made; its end may be without arrivals, and counts. stop: no further request is
    sent when it is set. cuts_off: when all are sent, end those that can no longer meet their targets; they are failures
    either way, and whoever looks for a rate need not wait for them.
    """
    # All written down before: to write long prompts in between would delay the clocks of others.
    requests = [sender.prepare(planned) for planned in plan]
    start_s = time.perf_counter()
    outcomes: list[Outcome | None] = []
    latest_end_s = start_s

    async def send(request: PreparedRequest, index: int, due_s: float) -> None:
        outcomes[index] = outcome = await sender.send(request, start_s=start_s, due_s=due_s)
        on_outcome(outcome)

    async with asyncio.TaskGroup() as group:
        tasks: list[asyncio.Task[None]] = []
        for index, request in enumerate(requests):
            planned = request.planned
            due_s = start_s + planned.arrival_s
            if await _is_set_within(stop, due_s - time.perf_counter()):
                break
            outcomes.append(None)
            tasks.append(group.create_task(send(request, index, due_s)))
            latest_end_s = max(latest_end_s, due_s + planned.traffic_class.latest_end_s(planned.output_tokens))
        if cuts_off and tasks and math.isfinite(latest_end_s):
            await asyncio.wait(tasks, timeout=max(0.0, latest_end_s - time.perf_counter()))
            for task in tasks:
                task.cancel()
    whole = tuple(outcome or Outcome.cut_off(planned) for outcome, planned in zip(outcomes, plan, strict=False))
    seconds = time.perf_counter() - start_s
    return LoadResult(outcomes=whole, seconds=seconds if stop.is_set() else max(seconds, duration_s))


async def run_closed_loop(
    sender: Sender,
    next_request: NextRequest,
    *,
    num_clients: int,
    duration_s: float,
    on_outcome: OnOutcome,
    stop: asyncio.Event,
) -> LoadResult:
    """Every client sends its next request when its last one has ended, until there is none or the time is over."""
    start_s = time.perf_counter()
    outcomes: list[Outcome] = []

    async def client() -> None:
        while not stop.is_set() and time.perf_counter() - start_s < duration_s:
            planned = next_request(time.perf_counter() - start_s)
            if planned is None:
                return
            outcome = await sender.send(sender.prepare(planned), start_s=start_s, due_s=None)
            outcomes.append(outcome)
            on_outcome(outcome)
            if outcome.is_failed:
                await _is_set_within(stop, _PAUSE_AFTER_FAILURE_S)

    async with asyncio.TaskGroup() as group:
        for _ in range(num_clients):
            group.create_task(client())
    return LoadResult(outcomes=tuple(outcomes), seconds=time.perf_counter() - start_s)


async def _is_set_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait so long, or until the event is set; tasks get their turn in any case."""
    if seconds <= 0.0:
        await asyncio.sleep(0)
        return event.is_set()
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
