"""From the times of a load to the numbers of a report: rates, percentiles, medians over rounds."""

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.harness.load import Load, LoadTimes
from moeserve.loadgen.summary import percentile


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One load on one system, once. Latencies are None where a system gives all tokens at its end."""

    system: str
    load: str
    round_index: int
    seconds: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    ttft_p50_s: float | None = None
    itl_p50_s: float | None = None
    itl_p99_s: float | None = None


def measurement(system: str, load: Load, round_index: int, times: LoadTimes) -> Measurement:
    """Numbers of one load; latencies where the tokens of a request came at different times."""
    gaps = sorted(later - earlier for request in times.token_times for earlier, later in itertools.pairwise(request))
    is_streamed = any(gap > 0 for gap in gaps) or load.output_tokens == 1
    return Measurement(
        system=system,
        load=load.name,
        round_index=round_index,
        seconds=times.seconds,
        output_tokens_per_s=load.num_requests * load.output_tokens / times.seconds,
        prompt_tokens_per_s=load.num_requests * load.prompt_tokens / times.seconds,
        ttft_p50_s=statistics.median(request[0] for request in times.token_times) if is_streamed else None,
        itl_p50_s=percentile(gaps, 0.5) if is_streamed and gaps else None,
        itl_p99_s=percentile(gaps, 0.99) if is_streamed and gaps else None,
    )


class Results:
    """All measurements of a run, looked up by system and load."""

    def __init__(self, measurements: Iterable[Measurement], loads: Sequence[Load]) -> None:
        self._rows: dict[tuple[str, str], list[Measurement]] = {}
        self._is_prefill = {load.name: load.output_tokens == 1 for load in loads}
        for row in measurements:
            self._rows.setdefault((row.system, row.load), []).append(row)

    def rounds(self, system: str, load: str) -> list[Measurement]:
        return self._rows.get((system, load), [])

    def rates(self, system: str, load: str) -> dict[int, float]:
        """Tokens per second by round: output tokens, or prompt tokens where the load asks for one output token."""
        return {
            row.round_index: row.prompt_tokens_per_s if self._is_prefill[load] else row.output_tokens_per_s
            for row in self.rounds(system, load)
        }

    def rate(self, system: str, load: str) -> float | None:
        """Median over the rounds; None where the system has no measurement."""
        rates = self.rates(system, load)
        return statistics.median(rates.values()) if rates else None

    def ratio(self, ours: str, theirs: str, load: str) -> float | None:
        """Median over the rounds of the ratio within a round, so that a machine that slows down slows both."""
        our_rates, their_rates = self.rates(ours, load), self.rates(theirs, load)
        both = our_rates.keys() & their_rates.keys()
        return statistics.median(our_rates[i] / their_rates[i] for i in both) if both else None

    def latencies_ms(self, system: str, load: str) -> tuple[float | None, float | None, float | None]:
        """TTFT p50, ITL p50 and ITL p99, medians over the rounds; None where the system does not stream."""
        rows = self.rounds(system, load)
        return (
            _median_ms(row.ttft_p50_s for row in rows),
            _median_ms(row.itl_p50_s for row in rows),
            _median_ms(row.itl_p99_s for row in rows),
        )


def _median_ms(seconds: Iterable[float | None]) -> float | None:
    known = [value for value in seconds if value is not None]
    return statistics.median(known) * 1e3 if known else None
