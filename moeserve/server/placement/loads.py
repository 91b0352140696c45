"""Expert loads as they come from the ranks: the reports of all replicas become windows, and the newest are kept.

Axes: L MoE layers, E logical experts.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np

from moeserve.engine.placement_messages import LoadReport, PlacementShape, unpack_array
from moeserve_placement.arrays import FloatArray
from moeserve_placement.controller.commands import StepStatistics
from moeserve_placement.controller.evidence import Interval
from moeserve_placement.load import LoadTrace, LoadWindow, Phase

MAX_HISTORY_BYTES = 2**26
MAX_HISTORY_WINDOWS = 720


@dataclass(slots=True)
class _Part:
    """What one replica reported since the last window."""

    since_s: float
    reports: list[LoadReport] = field(default_factory=list)


class ReportMerger:
    """One window when every replica has reported, or when those that are late have been waited for long enough.

    Clocks of hosts differ, so a report ends when it arrives, and only its length is taken from it.
    """

    def __init__(self, shape: PlacementShape, *, dp_size: int, patience_s: float) -> None:
        """patience_s: how long the first report of a window waits for the others."""
        self._shape = (shape.num_layers, shape.num_logical_experts)
        self._dp_size = dp_size
        self._patience_s = patience_s
        self._parts: dict[int, _Part] = {}
        self._first_s = 0.0

    def add(self, report: LoadReport, now_s: float) -> Interval | None:
        """A window, where this report completes one. Raises ValueError for another shape or an unknown replica."""
        if not 0 <= report.dp_rank < self._dp_size:
            raise ValueError(f"replica {report.dp_rank} is none of {self._dp_size}")
        num_bytes = 8 * self._shape[0] * self._shape[1]
        if not len(report.prefill_load) == len(report.decode_load) == num_bytes:
            raise ValueError(
                f"replica {report.dp_rank} reports loads of {len(report.prefill_load)} and {len(report.decode_load)} "
                f"bytes, each must have {num_bytes}"
            )
        start_s = now_s - max(report.end_s - report.start_s, 0.0)
        if not self._parts:
            self._first_s = now_s
        self._parts.setdefault(report.dp_rank, _Part(start_s)).reports.append(report)
        return self._merge(now_s) if len(self._parts) == self._dp_size else None

    def tick(self, now_s: float) -> Interval | None:
        """A window without the replicas that are late, where its time has come."""
        is_late = bool(self._parts) and now_s > self._first_s + self._patience_s
        return self._merge(now_s) if is_late else None

    def _merge(self, now_s: float) -> Interval:
        parts, self._parts = list(self._parts.values()), {}
        start_s = min(part.since_s for part in parts)
        reports = [report for part in parts for report in part.reports]
        # Replicas step together, so the one that counted most steps has them all.
        longest = max((part.reports for part in parts), key=lambda each: sum(report.num_steps for report in each))
        num_steps = sum(report.num_steps for report in longest)
        step_s = sum(report.step_s for report in longest)
        measured = [report for report in longest if report.expert_s is not None]
        expert_s = sum(report.expert_s or 0.0 for report in measured)
        measured_s = sum(report.step_s for report in measured)
        num_prefill = sum(report.num_prefill_tokens for report in reports)
        num_decode = sum(report.num_decode_tokens for report in reports)

        def window(phase: Phase, num_tokens: int, loads: Sequence[bytes]) -> LoadWindow:
            # One by one: stacked, the tables of many replicas would keep the event loop for milliseconds.
            load_LE = np.zeros(self._shape)
            for load in loads:
                load_LE += unpack_array(load, "<i8", self._shape[1]).astype(np.float64)
            return LoadWindow(
                expert_load_LE=load_LE,
                start_s=start_s,
                end_s=now_s,
                num_tokens=num_tokens,
                num_steps=num_steps,
                phase=phase,
            )

        return Interval(
            windows=(
                window("prefill", num_prefill, [report.prefill_load for report in reports]),
                window("decode", num_decode, [report.decode_load for report in reports]),
            ),
            steps=StepStatistics(
                num_steps=num_steps,
                num_tokens=num_prefill + num_decode,
                step_s=step_s,
                expert_share=min(expert_s / measured_s, 1.0) if measured_s > 0 else None,
            ),
        )


class LoadHistory:
    """The newest windows, as many as fit; counts are kept in four bytes each."""

    def __init__(self, shape: PlacementShape) -> None:
        self._shape = (shape.num_layers, shape.num_logical_experts)
        num_bytes = 2 * 4 * max(shape.num_layers * shape.num_logical_experts, 1)
        self._intervals: deque[Interval] = deque(
            maxlen=max(1, min(MAX_HISTORY_WINDOWS, MAX_HISTORY_BYTES // num_bytes))
        )
        self.num_added = 0

    def __len__(self) -> int:
        return len(self._intervals)

    def fits(self, shape: PlacementShape) -> bool:
        """Whether loads of that shape belong in here."""
        return self._shape == (shape.num_layers, shape.num_logical_experts)

    def add(self, interval: Interval) -> None:
        self._intervals.append(_with_loads(interval, np.float32))
        self.num_added += 1

    def as_kept(self, *, num_windows: int) -> list[Interval]:
        """As `newest`, without a copy: the tables are of float32."""
        return list(self._intervals)[-num_windows:]

    def newest(self, *, num_windows: int) -> list[Interval]:
        """The newest windows, oldest first."""
        return [_with_loads(interval, np.float64) for interval in self.as_kept(num_windows=num_windows)]

    def covering(self, window_s: float) -> list[Interval]:
        """As many of the newest windows as together cover so many seconds; at least one where there is any."""
        durations_s = accumulate(interval.duration_s for interval in reversed(self._intervals))
        num_short = sum(1 for covered_s in durations_s if covered_s < window_s)
        return self.newest(num_windows=num_short + 1)


def _with_loads(interval: Interval, dtype: type[np.floating]) -> Interval:
    windows = tuple(replace(window, expert_load_LE=window.expert_load_LE.astype(dtype)) for window in interval.windows)
    return replace(interval, windows=windows)


def trace_of(intervals: Sequence[Interval], shape: PlacementShape, *, model: str, offset_s: float = 0.0) -> LoadTrace:
    """The windows as a trace that can be replayed. offset_s: added to their times."""
    return LoadTrace(
        model=model,
        top_k=shape.top_k,
        moe_layer_ids=tuple(shape.moe_layer_ids),
        windows=tuple(
            replace(window, start_s=window.start_s + offset_s, end_s=window.end_s + offset_s)
            for interval in intervals
            for window in interval.windows
        ),
    )


def load_of(intervals: Sequence[Interval], phase: Phase) -> tuple[FloatArray, int]:
    """Routed pairs [L, E] and tokens of one phase, or of both for `mixed`; at least one interval is needed."""
    windows = [window for interval in intervals for window in interval.windows if phase in ("mixed", window.phase)]
    load_LE: FloatArray = np.sum([window.expert_load_LE for window in windows], axis=0, dtype=np.float64)
    return load_LE, sum(window.num_tokens for window in windows)
