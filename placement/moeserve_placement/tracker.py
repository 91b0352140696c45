"""Loads as they come in: recent windows and a moving average, prefill and decode apart.

Axes: L MoE layers, E logical experts.
"""

import math
from collections import deque

from moeserve_placement.arrays import FloatArray
from moeserve_placement.load import LoadError, LoadWindow, Phase, merge_windows


class LoadTracker:
    """Keeps what planning looks at. Times are the windows' own; there is no clock here.

    Windows of one phase come in order of time. Raises LoadError for limits that keep nothing.
    """

    def __init__(self, *, keep_s: float, half_life_s: float) -> None:
        """keep_s: how far back windows are kept. half_life_s: age at which a window counts half in the average."""
        if keep_s <= 0 or half_life_s <= 0:
            raise LoadError(f"keep_s and half_life_s must be above 0, got {keep_s} and {half_life_s}")
        self._keep_s = keep_s
        self._half_life_s = half_life_s
        self._windows: dict[Phase, deque[LoadWindow]] = {}
        self._averages: dict[Phase, _Average] = {}

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Phases seen so far."""
        return tuple(self._windows)

    def observe(self, window: LoadWindow) -> None:
        """Take a window in. Raises LoadError where it ends before the last one of its phase."""
        windows = self._windows.setdefault(window.phase, deque())
        if windows and window.end_s < windows[-1].end_s:
            raise LoadError(f"a window must not end before the last one, got {window.end_s} after {windows[-1].end_s}")
        windows.append(window)
        while windows[0].end_s < window.end_s - self._keep_s:
            windows.popleft()
        self._averages[window.phase] = _Average.after(self._averages.get(window.phase), window, self._half_life_s)

    def recent(self, phase: Phase, *, seconds: float = math.inf, tokens: float = math.inf) -> LoadWindow | None:
        """The newest windows of a phase as one: as few as reach back so many seconds, or hold so many tokens.

        None where nothing of the phase is kept.
        """
        taken: list[LoadWindow] = []
        num_tokens = 0
        for window in reversed(self._windows.get(phase, ())):
            taken.append(window)
            num_tokens += window.num_tokens
            if taken[0].end_s - window.start_s >= seconds or num_tokens >= tokens:
                break
        return merge_windows(taken[::-1]) if taken else None

    def average_LE(self, phase: Phase) -> FloatArray | None:
        """Routed tokens per second [L, E], older windows counting less; None where nothing of the phase was seen."""
        average = self._averages.get(phase)
        return None if average is None else average.rate_LE()


class _Average:
    """Exponentially weighted sums of tokens and of seconds: their quotient is a rate, however uneven the windows."""

    def __init__(self, tokens_LE: FloatArray, seconds: float, end_s: float) -> None:
        self.tokens_LE = tokens_LE
        self.seconds = seconds
        self.end_s = end_s

    @staticmethod
    def after(before: "_Average | None", window: LoadWindow, half_life_s: float) -> "_Average":
        if before is None:
            return _Average(window.expert_load_LE.copy(), window.duration_s, window.end_s)
        kept = 0.5 ** ((window.end_s - before.end_s) / half_life_s)
        return _Average(
            before.tokens_LE * kept + window.expert_load_LE, before.seconds * kept + window.duration_s, window.end_s
        )

    def rate_LE(self) -> FloatArray:
        return self.tokens_LE / max(self.seconds, 1e-9)
