"""Decision records: what the controller saw, what it did or left, why, and what came of it.

Plain values: `to_dict` gives JSON types only.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from moeserve_placement.load import Phase

Action = Literal["none", "split", "migrate", "roll back"]
Cause = Literal["gain", "rules", "operator", "no gain"]
"""Why a migration was started: its predicted gain, rules the map broke, by hand, or to undo one without gain."""
OutcomeState = Literal["under way", "settling", "kept", "no gain", "rolled back", "aborted", "unmeasured", "done"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseLoad:
    """One phase's part of a load, under the map and split in force."""

    num_tokens: int
    balancedness: float
    """Mean over the layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSummary:
    """The load a decision looked at. Balancedness is mean over max of the rank loads of a layer."""

    duration_s: float
    num_steps: int
    num_tokens: int
    step_s_per_token: float | None
    assignments_per_rank: float
    """Routed pairs of a layer, over the ranks: what the floor depends on."""
    phases: Mapping[Phase, PhaseLoad]
    balancedness_mean: float
    balancedness_worst: float
    resplit_mean: float
    """With the map in force and the best split."""
    resplit_worst: float
    worst_layer: int
    floor: float
    """Expected balancedness of a perfect placement at so many assignments."""
    trigger: float
    """Balancedness below which it is not chance."""
    num_layers_below: int
    """Layers below the trigger that the best split does not help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a migration is expected to bring and to cost."""

    num_moves: int
    num_layers: int
    num_bytes: int
    copy_s: float
    cost_s: float
    """Step time lost to copies and commit."""
    gain_share: float
    """Share of step time saved, on windows the plan was not made on."""
    gain_s: float
    """Step time saved over the horizon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a migration."""

    state: OutcomeState
    time_s: float
    reason: str = ""
    realised_share: float | None = None
    """Share of step time saved against the map before, on the windows after the commit."""
    step_s_per_token: float | None = None
    """As measured on these windows; other traffic changes it too, so nothing is decided by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """To act or not to act."""

    number: int
    time_s: float
    epoch: int
    """Placement in force."""
    phase: Phase
    """Of the load looked at."""
    action: Action
    reason: str
    cause: Cause | None = None
    plan_id: int | None = None
    load: LoadSummary | None = None
    prediction: Prediction | None = None
    outcome: Outcome | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class DecisionLog:
    """The newest records, oldest first, and how many there have been."""

    def __init__(self, max_decisions: int) -> None:
        self._kept: deque[Decision] = deque(maxlen=max_decisions)
        self._num_made = 0

    def __iter__(self) -> Iterator[Decision]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def next_number(self) -> int:
        return self._num_made

    @property
    def last_reason(self) -> str:
        """Of the newest record; empty where there is none."""
        return self._kept[-1].reason if self._kept else ""

    def add(self, decision: Decision) -> None:
        assert decision.number == self._num_made
        self._kept.append(decision)
        self._num_made += 1

    def close(self, number: int, outcome: Outcome) -> None:
        """Replace a record by the same with its outcome; does nothing where it is no longer kept."""
        index = self._index(number)
        if index is not None:
            self._kept[index] = replace(self._kept[index], outcome=outcome)

    def roll_back(self, number: int, now_s: float) -> None:
        """Say of a migration that it was undone; what was measured of it stays."""
        index = self._index(number)
        if index is not None:
            outcome = self._kept[index].outcome
            assert outcome is not None
            self._kept[index] = replace(self._kept[index], outcome=replace(outcome, state="rolled back", time_s=now_s))

    def _index(self, number: int) -> int | None:
        index = number - self._num_made + len(self._kept)
        return index if index >= 0 else None
