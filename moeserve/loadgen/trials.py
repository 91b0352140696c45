"""Looks for the highest rate at which a server keeps its targets, by loading it at one rate after the other."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from moeserve.loadgen.goodput_search import GoodputSearch, MaxGoodput, SearchSettings, Trial
from moeserve.loadgen.loops import LoadResult, OnOutcome, run_open_loop
from moeserve.loadgen.sender import Sender
from moeserve.loadgen.traffic import PlannedRequest
from moeserve.loadgen.workloads import Workload

OnTrialStart: TypeAlias = Callable[[float, int], OnOutcome]
"""Takes rate and number of requests; what it returns is called with each outcome."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundGoodput:
    """The end of a search, and the newest load at the rate it found (else at the lowest one)."""

    found: MaxGoodput
    load: LoadResult


async def find_max_goodput(
    sender: Sender,
    workload: Workload,
    settings: SearchSettings,
    *,
    start_rate: float,
    duration_s: float,
    seed: int,
    on_trial_start: OnTrialStart,
    on_trial_end: Callable[[Trial], None],
    stop: asyncio.Event,
) -> FoundGoodput | None:
    """None where it was stopped in its first trial. Every trial is `duration_s` of arrivals, drawn anew.

    Raises ValueError where none come in that time.
    """
    search = GoodputSearch(settings, start_rate=start_rate)
    loads: dict[float, LoadResult] = {}
    while (rate := search.next_rate()) is not None:
        seed += 1
        plan = workload.at_rate(rate, duration_s=duration_s, seed=seed)
        on_outcome = on_trial_start(rate, len(plan))
        load = await run_open_loop(sender, plan, duration_s=duration_s, on_outcome=on_outcome, stop=stop, cuts_off=True)
        if stop.is_set():
            break
        loads[rate] = load
        trial = _trial(rate, plan, load, duration_s)
        search.add(trial)
        on_trial_end(trial)
    if not loads:
        return None
    found = search.result()
    return FoundGoodput(found=found, load=loads[min(loads) if found.rate is None else found.rate])


def _trial(rate: float, plan: list[PlannedRequest], load: LoadResult, duration_s: float) -> Trial:
    assert len(load.outcomes) == len(plan)
    is_good = tuple(outcome.is_good for outcome in load.outcomes)
    # Per second of arrivals: the time in which the last requests end belongs to no arrivals.
    return Trial(rate=rate, is_good=is_good, goodput_rps=sum(is_good) / duration_s)
