"""The highest rate at which a share of all requests meets its targets: which rate to try next, and how sure we are.

Everything here is decided from the trials so far, without a clock or a server. First the rate doubles (or halves)
until it is enclosed by one that passes and one that fails, then the gap is halved on a logarithmic scale until it is
small, then both ends are tried again; should an end change sides by that, the search goes on from there.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from moeserve.loadgen.crossing import crossing_interval

_WIDE = 1.5
"""An interval from one rate to so many times it leaves much open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One load at one rate."""

    rate: float
    is_good: tuple[bool, ...]
    """For each request, in order of arrival."""
    goodput_rps: float

    @property
    def attainment(self) -> float:
        return sum(self.is_good) / len(self.is_good)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSettings:
    attainment: float = 0.95
    tolerance: float = 0.05
    """The search ends when the failing rate is at most so much above the passing one, relative to it."""
    repeats: int = 2
    """How often the two rates at the end are tried at least."""
    max_trials: int = 24
    min_rate: float = 0.0
    """No lower one is tried, but for the first: so few requests would come that they tell nothing."""

    def __post_init__(self) -> None:
        if not 0.0 < self.attainment < 1.0:
            raise ValueError(f"attainment must be between 0 and 1, got {self.attainment}")
        if not self.tolerance > 0.0:
            raise ValueError(f"tolerance must be above 0, got {self.tolerance}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxGoodput:
    """What a search found."""

    rate: float | None
    """The highest rate that passed; None where none did."""
    goodput_rps: float | None
    """Measured at that rate: mean over its trials."""
    low: float
    """With `high`: 95 % confidence interval of the rate at which attainment crosses the wanted share.

    It covers the rates between which the search ended at least: between them nothing was measured.
    """
    high: float
    trials: tuple[Trial, ...]

    @property
    def text(self) -> str:
        if self.rate is None:
            return f"no rate passed; the lowest tried was {min(trial.rate for trial in self.trials):.3g} requests/s"
        text = (
            f"max goodput {self.goodput_rps:.3g} requests/s, at a rate of {self.rate:.3g} requests/s "
            f"(95 % interval {self.low:.3g} to {self.high:.3g})"
        )
        return text if self.high <= self.low * _WIDE else f"{text}; longer trials would narrow it"


class GoodputSearch:
    """Ask for the next rate, add its trial, until there is none."""

    def __init__(self, settings: SearchSettings, *, start_rate: float) -> None:
        if not start_rate > 0.0:
            raise ValueError(f"rate must be above 0 requests/s, got {start_rate}")
        self._settings = settings
        self._start_rate = start_rate
        self._trials: list[Trial] = []

    def add(self, trial: Trial) -> None:
        self._trials.append(trial)

    def next_rate(self) -> float | None:
        """None when the search is at its end."""
        settings = self._settings
        if not self._trials:
            return self._start_rate
        if len(self._trials) >= settings.max_trials:
            return None
        passing, failing = self._enclosure()
        if failing is None:
            assert passing is not None
            return passing * 2.0
        if passing is None:
            return failing / 2.0 if failing / 2.0 >= settings.min_rate else None
        if failing > passing * (1.0 + settings.tolerance):
            return math.sqrt(passing * failing)
        for rate in (passing, failing):
            if len(self._at(rate)) < settings.repeats:
                return rate
        return None

    def result(self) -> MaxGoodput:
        """Of the trials so far; there must be one."""
        passing, failing = self._enclosure()
        estimate = min(trial.rate for trial in self._trials) if passing is None else passing
        pairs = [(trial.rate, trial.is_good) for trial in self._trials]
        low, high = crossing_interval(pairs, self._settings.attainment, estimate=estimate)
        at_rate = [] if passing is None else self._at(passing)
        return MaxGoodput(
            rate=passing,
            goodput_rps=sum(trial.goodput_rps for trial in at_rate) / len(at_rate) if at_rate else None,
            low=min(low, high, passing or low),
            high=max(low, high, failing or high),
            trials=tuple(self._trials),
        )

    def _enclosure(self) -> tuple[float | None, float | None]:
        """The lowest rate that fails, and the highest below it that passes."""
        rates = sorted({trial.rate for trial in self._trials})
        passing = None
        for rate in rates:
            if _attainment(self._at(rate)) < self._settings.attainment:
                return passing, rate
            passing = rate
        return passing, None

    def _at(self, rate: float) -> list[Trial]:
        return [trial for trial in self._trials if trial.rate == rate]


def _attainment(trials: Sequence[Trial]) -> float:
    return sum(sum(trial.is_good) for trial in trials) / sum(len(trial.is_good) for trial in trials)
