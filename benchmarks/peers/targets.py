"""The targets of a comparison with peers, and whether a run has met them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.harness.measurement import Results
from benchmarks.peers.plan import (
    EIGHT_BITS,
    EIGHT_CLIENTS,
    LOADS,
    MANY_CLIENTS,
    ONE_CLIENT,
    ONE_CORE,
    ONE_RANK,
    PREFILL,
    TWO_CORES,
    TWO_RANKS,
    Comparison,
)

_LEAST_RATIOS = {ONE_CLIENT.name: 1.0, EIGHT_CLIENTS.name: 1.3, MANY_CLIENTS.name: 1.3, PREFILL.name: 1.5}
_LEAST_INT8_RATIO = 1.2
_LEAST_TWO_RANK_RATIO = 1.6
_MOST_READY_S = 15.0
_MOST_OVERHEAD = 0.10


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A target beside what was found; None where the run has no figure for it."""

    target: str
    found: float | None
    limit: float
    at_least: bool
    note: str = ""

    @property
    def word(self) -> str:
        if self.found is None:
            return "not measured"
        holds = self.found >= self.limit if self.at_least else self.found <= self.limit
        return "met" if holds else "MISSED"


def judge(results: Results, ready_s: Mapping[str, float], overhead: float | None) -> list[Verdict]:
    """All targets, in the order of a report."""
    verdicts = [
        _over_best_peer(results, comparison, load.name, _LEAST_RATIOS[load.name])
        for comparison in (ONE_CORE, TWO_CORES)
        for load in LOADS
    ]
    verdicts.append(_over_best_peer(results, EIGHT_BITS, ONE_CLIENT.name, _LEAST_INT8_RATIO))
    verdicts += [
        Verdict(
            target=f"{variant.name} over one rank, {MANY_CLIENTS.name}",
            found=results.ratio(variant.name, ONE_RANK.name, MANY_CLIENTS.name),
            limit=_LEAST_TWO_RANK_RATIO,
            at_least=True,
        )
        for variant in TWO_RANKS
    ]
    verdicts += [_ready(ready_s, name) for name in _our_names()]
    verdicts.append(
        Verdict(
            target=f"scheduler and frontend, share of a step, {MANY_CLIENTS.name}",
            found=overhead,
            limit=_MOST_OVERHEAD,
            at_least=False,
        )
    )
    return verdicts


def best_peer(results: Results, comparison: Comparison, load: str) -> tuple[str, float] | None:
    """The peer against which our ratio is lowest, and that ratio."""
    ratios = {
        variant.name: ratio
        for variant in comparison.variants
        if variant.peer != comparison.ours.peer
        and (ratio := results.ratio(comparison.ours.name, variant.name, load)) is not None
    }
    return min(ratios.items(), key=lambda item: item[1]) if ratios else None


def _over_best_peer(results: Results, comparison: Comparison, load: str, limit: float) -> Verdict:
    best = best_peer(results, comparison, load)
    missing = [variant.name for variant in comparison.variants[1:] if results.rate(variant.name, load) is None and best]
    note = f"{best[0]}" + (f"; without {', '.join(missing)}" if missing else "") if best else ""
    return Verdict(
        target=f"{comparison.name}: {load}, moeserve over the best peer",
        found=best[1] if best else None,
        limit=limit,
        at_least=True,
        note=note,
    )


def _ready(ready_s: Mapping[str, float], name: str) -> Verdict:
    return Verdict(
        target=f"{name}: ready to serve, seconds", found=ready_s.get(name), limit=_MOST_READY_S, at_least=False
    )


def _our_names() -> Sequence[str]:
    return [ONE_CORE.ours.name, TWO_CORES.ours.name, *(variant.name for variant in TWO_RANKS)]
