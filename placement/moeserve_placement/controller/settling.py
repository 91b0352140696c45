"""After a commit: the windows served with the new map, until they say what the migration really gained."""

from dataclasses import dataclass, field

from moeserve_placement.controller.assess import Assessor
from moeserve_placement.controller.decision import Outcome
from moeserve_placement.controller.evidence import Interval, merge_intervals
from moeserve_placement.controller.flight import Flight


@dataclass(slots=True, kw_only=True, eq=False)
class Settling:
    """One committed migration whose gain is being measured."""

    flight: Flight
    since_s: float
    deadline_s: float
    intervals: list[Interval] = field(default_factory=list)

    def add(self, interval: Interval) -> None:
        """Take a window in; one that began before the commit, or had no load, says nothing."""
        if interval.start_s >= self.since_s and interval.load_LE.any():
            self.intervals.append(interval)

    def realised(self, assessor: Assessor, now_s: float) -> tuple[bool, Outcome]:
        """Whether the gain came, and the record of it.

        Both maps are judged by the same windows, each under its best split, so that other traffic than before does not
        count for or against the migration. A gain that is short by no more than chance explains has come.
        """
        interval = merge_intervals(self.intervals)
        before, target = self.flight.before.placement, self.flight.target.placement
        share = float(assessor.saved_share(before, target, interval).sum())
        predicted = self.flight.candidate.prediction.gain_share
        least = assessor.settings.rollback_below * predicted
        came = share + assessor.noise_share(interval) >= least
        compared = f"{share:.2%} of step time gained, {predicted:.2%} predicted"
        return came, Outcome(
            state="kept" if came else "no gain",
            time_s=now_s,
            reason=compared if came else f"{compared}: less than {least:.2%} beyond chance",
            realised_share=share,
            step_s_per_token=interval.step_s_per_token,
        )
