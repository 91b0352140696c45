"""Replay a load trace over a policy: plan on what has been served, serve the next window, under a virtual clock.

`incremental` runs the controller itself; ranks that copy as fast as they may and never fail answer it. The EPLB
policies plan anew every so many windows. `frozen` changes nothing. Copies cost the same whoever orders them, and a map
serves the windows that begin after its copies are done.

Axes: W windows served, L MoE layers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from moeserve_placement.arrays import FloatArray
from moeserve_placement.controller.commands import StepStatistics
from moeserve_placement.controller.evidence import Interval
from moeserve_placement.cost import by_rank, mean_level
from moeserve_placement.followers import Follower, follower_of
from moeserve_placement.load import LoadError, LoadTrace, LoadWindow
from moeserve_placement.noise_floor import noise_ceiling
from moeserve_placement.scenario import Scenario
from moeserve_placement.settings import Policy
from moeserve_placement.split import tokens_in_force


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Simulation:
    """What a policy made of a trace. The first window is planned on only."""

    policy: Policy
    num_ranks: int
    num_physical_experts: int
    expert_bytes: int
    time_W: FloatArray
    """When each window ended."""
    highest_WL: FloatArray
    """Load over capacity of the most loaded rank."""
    mean_WL: FloatArray
    """The same if the load were spread perfectly."""
    chance_WL: FloatArray
    """Highest / mean that chance alone explains."""
    moves_W: FloatArray
    """Expert records ordered to be copied when the window before ended."""
    num_migrations: int
    num_rollbacks: int
    copy_s: float
    lost_s: float
    """Step time lost to copies and commits, as the settings price them."""

    @property
    def balancedness_WL(self) -> FloatArray:
        return np.divide(self.mean_WL, self.highest_WL, out=np.ones_like(self.mean_WL), where=self.highest_WL > 0)

    @property
    def imbalance_share(self) -> float:
        """Share of the experts' time that goes by waiting for the most loaded rank."""
        total = float(self.highest_WL.sum())
        return 1.0 - float(self.mean_WL.sum()) / total if total else 0.0

    def summary(self) -> dict[str, Any]:
        """The figures as JSON types."""
        balancedness_WL = self.balancedness_WL
        num_moves = int(self.moves_W.sum())
        return {
            "policy": self.policy,
            "num_ranks": self.num_ranks,
            "num_physical_experts": self.num_physical_experts,
            "num_windows": int(self.time_W.size),
            "balancedness_mean": float(balancedness_WL.mean()) if balancedness_WL.size else 1.0,
            "balancedness_worst": float(balancedness_WL.min(initial=1.0)),
            "at_floor_share": float((balancedness_WL * self.chance_WL >= 1.0).mean()) if balancedness_WL.size else 1.0,
            "imbalance_share": self.imbalance_share,
            "num_migrations": self.num_migrations,
            "num_rollbacks": self.num_rollbacks,
            "num_moves": num_moves,
            "num_bytes": num_moves * self.expert_bytes,
            "copy_s": self.copy_s,
            "lost_s": self.lost_s,
        }

    def to_dict(self) -> dict[str, Any]:
        """The figures, and balancedness and moves window by window."""
        return self.summary() | {
            "time_s": self.time_W.tolist(),
            "balancedness": self.balancedness_WL.mean(axis=1).tolist(),
            "moves": self.moves_W.astype(int).tolist(),
        }


def simulate(trace: LoadTrace, scenario: Scenario) -> Simulation:
    """Replay a trace. Raises LoadError where it has under two windows, PlacementError where the shapes do not fit."""
    intervals = list(intervals_of(trace))
    if len(intervals) < 2:
        raise LoadError(f"a replay needs at least 2 windows, got {len(intervals)}")
    follower = follower_of(scenario, intervals[0].start_s)
    served = []
    for last, interval in pairwise(intervals):
        follower.observe(last)
        served.append(_serve(interval, follower, scenario))
    columns = [np.array(column) for column in zip(*served, strict=True)]
    return Simulation(
        policy=scenario.plan_settings.policy,
        num_ranks=scenario.cluster.num_ranks,
        num_physical_experts=scenario.cluster.num_physical_experts,
        expert_bytes=scenario.plan_settings.expert_bytes,
        time_W=columns[0],
        highest_WL=columns[1],
        mean_WL=columns[2],
        chance_WL=columns[3],
        moves_W=columns[4],
        num_migrations=follower.ledger.num_orders - follower.ledger.num_rollbacks,
        num_rollbacks=follower.ledger.num_rollbacks,
        copy_s=follower.ledger.copy_s,
        lost_s=follower.ledger.lost_s,
    )


def intervals_of(trace: LoadTrace) -> Iterator[Interval]:
    """The windows of a trace, those of one time together. A trace has no step times: every second counts as busy."""

    def times(window: LoadWindow) -> tuple[float, float]:
        return window.start_s, window.end_s

    for (start_s, end_s), group in groupby(trace.windows, times):
        windows = tuple(group)
        steps = StepStatistics(
            # A step may hold tokens of several phases.
            num_steps=max(window.num_steps for window in windows),
            num_tokens=sum(window.num_tokens for window in windows),
            step_s=end_s - start_s,
        )
        yield Interval(windows=windows, steps=steps)


def comparison(simulations: Sequence[Simulation]) -> str:
    """A table of policies and sizes, in Markdown."""
    lines = [
        "| policy | ranks | places | balancedness mean | worst | at the floor | time lost to imbalance | migrations "
        "| rolled back | moves | GB copied | s copying | step time lost, s |",
        "|" + " --- |" * 13,
    ]
    for simulation in simulations:
        row = simulation.summary()
        lines.append(
            f"| {row['policy']} | {row['num_ranks']} | {row['num_physical_experts']} | {row['balancedness_mean']:.4f} "
            f"| {row['balancedness_worst']:.4f} | {row['at_floor_share']:.1%} | {row['imbalance_share']:.2%} "
            f"| {row['num_migrations']} | {row['num_rollbacks']} | {row['num_moves']} | {row['num_bytes'] / 1e9:.2f} "
            f"| {row['copy_s']:.2f} | {row['lost_s']:.2f} |"
        )
    return "\n".join(lines)


def _serve(
    interval: Interval, follower: Follower, scenario: Scenario
) -> tuple[float, FloatArray, FloatArray, FloatArray, int]:
    """End, highest, mean and chance of a window served with what is in force, and the moves ordered before it."""
    load_LE, cluster = interval.load_LE, scenario.cluster
    in_force = follower.in_force
    tokens_LP = tokens_in_force(in_force.placement.physical_to_logical_LP, load_LE, in_force.split_LP)
    highest_L = (by_rank(tokens_LP, cluster) / cluster.capacity_R).max(axis=1)
    assignments = float(load_LE.sum(axis=1).mean()) / cluster.num_ranks
    chance = noise_ceiling(assignments, cluster.num_ranks, scenario.controller.false_alarm / len(load_LE))
    return (
        interval.start_s + interval.duration_s,
        highest_L,
        mean_level(load_LE.sum(axis=1), cluster),
        np.full(len(load_LE), chance),
        follower.ledger.take_moves(),
    )
