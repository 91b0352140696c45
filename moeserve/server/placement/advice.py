"""What following the load would bring, from the windows the server has seen.

Replays take seconds to minutes, so they run in a process of their own: serving does not share an interpreter with them.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from moeserve.config import PlacementConfig
from moeserve.server.placement.loads import trace_of
from moeserve.server.placement.settings import controller_settings, plan_settings
from moeserve.server.placement.view import Known
from moeserve_placement.advisor import Advice, advise
from moeserve_placement.controller import ControlError
from moeserve_placement.controller.evidence import Interval
from moeserve_placement.scenario import Scenario

ADVICE_WINDOWS = 120
"""Advice replays windows several times over; older ones are left out."""
_NICENESS = 10


def advise_apart(intervals: Sequence[Interval], known: Known, config: PlacementConfig, *, model: str) -> Advice:
    """Advice for the map in force; blocks. Raises ControlError where there are too few windows or ranks."""
    life = known.life
    if life.num_ranks < 2:
        raise ControlError("there is one rank: experts have nowhere to move to")
    if len(intervals) < 2:
        raise ControlError(f"advice needs at least 2 load windows, there are {len(intervals)}")
    trace = trace_of(intervals, life.shape, model=model)
    scenario = Scenario(
        start=known.placement,
        cluster=life.cluster,
        plan_settings=plan_settings(life.shape, frozen=False, pins=()),
        controller=controller_settings(config, can_move=True),
    )
    # Not forked: the server has threads.
    context = get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=os.nice, initargs=(_NICENESS,)) as apart:
        return apart.submit(advise, trace, scenario).result()
