"""The newest load windows: those a plan is made on, and as many before them that have to confirm it.

A plan made and judged on the same counts always seems to gain: it fits their noise. Judged on other windows, noise
gains nothing, and neither does a skew that has not lasted.

Axes: L MoE layers, E logical experts.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moeserve_placement.arrays import FloatArray
from moeserve_placement.controller.commands import StepStatistics
from moeserve_placement.load import LoadWindow, Phase, merge_windows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Interval:
    """What was served between two times: loads, one window a phase, and what the steps took."""

    windows: tuple[LoadWindow, ...]
    steps: StepStatistics

    @property
    def load_LE(self) -> FloatArray:
        """Routed tokens of all phases together."""
        total: FloatArray = np.sum([window.expert_load_LE for window in self.windows], axis=0, dtype=np.float64)
        return total

    @property
    def phase(self) -> Phase:
        phases = {window.phase for window in self.windows if window.num_tokens} or {"mixed"}
        return phases.pop() if len(phases) == 1 else "mixed"

    @property
    def start_s(self) -> float:
        return min(window.start_s for window in self.windows)

    @property
    def duration_s(self) -> float:
        return max(window.end_s for window in self.windows) - self.start_s

    @property
    def busy_share(self) -> float:
        """Part of the time that steps took."""
        return min(1.0, self.steps.step_s / self.duration_s) if self.duration_s > 0 else 0.0

    @property
    def step_s_per_token(self) -> float | None:
        return self.steps.step_s / self.steps.num_tokens if self.steps.num_tokens else None


def merge_intervals(intervals: Sequence[Interval]) -> Interval:
    """One interval over all of them; at least one is needed."""
    assert intervals
    by_phase: dict[Phase, list[LoadWindow]] = {}
    for interval in intervals:
        for window in interval.windows:
            by_phase.setdefault(window.phase, []).append(window)
    steps = [interval.steps for interval in intervals]
    measured = [(step.expert_share, step.step_s) for step in steps if step.expert_share is not None]
    measured_s = sum(step_s for _, step_s in measured)
    return Interval(
        windows=tuple(merge_windows(windows) for windows in by_phase.values()),
        steps=StepStatistics(
            num_steps=sum(step.num_steps for step in steps),
            num_tokens=sum(step.num_tokens for step in steps),
            step_s=sum(step.step_s for step in steps),
            expert_share=sum(share * step_s for share, step_s in measured) / measured_s if measured_s else None,
        ),
    )


class Evidence:
    """The last windows of an engine, whatever placement they were served with: loads are of logical experts."""

    def __init__(self, num_windows: int) -> None:
        self._num_windows = num_windows
        self._intervals: deque[Interval] = deque(maxlen=2 * num_windows)

    def add(self, interval: Interval) -> None:
        self._intervals.append(interval)

    @property
    def num_missing(self) -> int:
        """Windows still to come before a plan can be made and confirmed."""
        return 2 * self._num_windows - len(self._intervals)

    def everything(self) -> Interval | None:
        """All windows as one; None before the first."""
        return merge_intervals(self._intervals) if self._intervals else None

    def newest(self) -> Interval | None:
        """The windows to plan on."""
        intervals = list(self._intervals)[-self._num_windows :]
        return merge_intervals(intervals) if intervals else None

    def earlier(self) -> Interval | None:
        """The windows before them; the newest themselves where there are none yet."""
        intervals = list(self._intervals)[: -self._num_windows]
        return merge_intervals(intervals) if intervals else self.newest()
