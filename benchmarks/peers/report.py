"""The report of a run: Markdown for readers, a record for programs."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.harness.load import Load
from benchmarks.harness.machine import Machine
from benchmarks.harness.measurement import Results
from benchmarks.harness.tables import Cell, table
from benchmarks.peers.overhead import Overhead
from benchmarks.peers.plan import Comparison
from benchmarks.peers.runner import Record
from benchmarks.peers.system import Variant
from benchmarks.peers.targets import Verdict

_HOW = """\
Rates are tokens per second: output tokens, or prompt tokens for `prefill`; medians over the rounds, with the lowest and
the highest in brackets. A ratio is the median over the rounds of the ratio within a round. All systems get the same
token ids from the same load generator: closed-loop clients, one streamed request each, greedy, 128 tokens in and 64
out, or 2,048 in and 1 out for `prefill`; the usage that a server reports is checked. Prompts differ from round to
round, so prefix caches have nothing to give. Servers of a comparison are all started, and all but one are paused. A
server on one core has that core for all its processes; the load generator then has the other. transformers computes
each load as one batch and streams nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Everything that a report tells."""

    command: str
    date: str
    machine: Machine
    checkpoint: str
    versions: Mapping[str, str]
    comparisons: Sequence[Comparison]
    record: Record
    verdicts: Sequence[Verdict] = ()
    overhead: Overhead | None = None

    @property
    def results(self) -> Results:
        loads = [load for comparison in self.comparisons for load in comparison.loads]
        return Results(self.record.measurements, loads)


def as_json(run: Run) -> dict[str, Any]:
    results = run.results
    return {
        "command": run.command,
        "date": run.date,
        "machine": asdict(run.machine),
        "checkpoint": run.checkpoint,
        "versions": dict(run.versions),
        "medians": [
            {"comparison": comparison.name, "system": variant.name, "load": load.name, "tokens_per_s": rate}
            for comparison in run.comparisons
            for variant in comparison.variants
            for load in comparison.loads
            if (rate := results.rate(variant.name, load.name)) is not None
        ],
        "targets": [asdict(verdict) | {"verdict": verdict.word} for verdict in run.verdicts],
        "overhead": asdict(run.overhead) if run.overhead else None,
        "ready_s": run.record.ready_s,
        "failures": run.record.failures,
        "measurements": [asdict(row) for row in run.record.measurements],
    }


def as_markdown(run: Run) -> str:
    lines = ["# moeserve beside other systems, on CPU", "", f"`{run.command}`, {run.date}.", ""]
    lines += [f"Machine: {run.machine.text}.", "", f"Checkpoint: {run.checkpoint}.", ""]
    lines += [f"Versions: {'; '.join(run.versions.values())}.", ""]
    if run.verdicts:
        lines += ["## Targets", "", *_targets(run.verdicts), ""]
    if run.record.failures:
        lines += ["## Without figures", ""]
        lines += [f"- {name}: {reason}" for name, reason in run.record.failures.items()]
        lines += [""]
    for comparison in run.comparisons:
        lines += [f"## {comparison.name}", "", *_rates(run, comparison), ""]
        lines += [*_latencies(run, comparison), ""]
    if run.overhead:
        lines += ["## Outside the model", "", run.overhead.text, ""]
    return "\n".join([*lines, "## How it is measured", "", _HOW, ""])


def _targets(verdicts: Sequence[Verdict]) -> list[str]:
    rows: list[list[Cell]] = [
        [
            verdict.target,
            verdict.found,
            f"{'≥' if verdict.at_least else '≤'} {verdict.limit:g}",
            verdict.word,
            verdict.note,
        ]
        for verdict in verdicts
    ]
    return table(("target", "found", "limit", "", "best peer"), rows)


def _rates(run: Run, comparison: Comparison) -> list[str]:
    """Rates of every system, and how far ours is ahead of it."""
    header = ["tokens/s"]
    for load in comparison.loads:
        header += [load.name, "ours is"]
    rows = [_rate_row(run.results, comparison, variant) for variant in comparison.variants]
    return table(header, rows)


def _rate_row(results: Results, comparison: Comparison, variant: Variant) -> list[Cell]:
    row: list[Cell] = [variant.name]
    for load in comparison.loads:
        ratio = results.ratio(comparison.ours.name, variant.name, load.name)
        row += [
            _spread([*results.rates(variant.name, load.name).values()]),
            f"{ratio:.2f} x" if ratio is not None and variant != comparison.ours else None,
        ]
    return row


def _spread(rates: Sequence[float]) -> str | None:
    """Median, and the lowest and highest of several."""
    if not rates:
        return None
    limits = f" [{min(rates):.1f}, {max(rates):.1f}]" if len(rates) > 1 else ""
    return f"{statistics.median(rates):.1f}{limits}"


def _latencies(run: Run, comparison: Comparison) -> list[str]:
    header = ["latency, ms: TTFT p50 / ITL p50 / ITL p99", *(load.name for load in comparison.loads), "ready, s"]
    rows: list[list[Cell]] = [
        [
            variant.name,
            *(_latency(run.results, variant, load) for load in comparison.loads),
            run.record.ready_s.get(variant.name),
        ]
        for variant in comparison.variants
    ]
    return table(header, rows)


def _latency(results: Results, variant: Variant, load: Load) -> str | None:
    latencies = results.latencies_ms(variant.name, load.name)
    return " / ".join("-" if value is None else f"{value:.0f}" for value in latencies) if any(latencies) else None
