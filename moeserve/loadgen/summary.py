"""What a load's report says: attainment, goodput and percentiles by class and by length of the prompt."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moeserve.loadgen.loops import LoadResult
from moeserve.loadgen.outcomes import Outcome
from moeserve.loadgen.tables import Cell, table

PERCENTILES = (0.5, 0.9, 0.99, 0.999)
METRICS = ("ttft", "tpot", "itl", "e2e")
ALL = "all"
_FAILURES_SHOWN = 8
_BUCKET_EDGES = {"<=128": 128, "<=512": 512, "<=2k": 2048, "<=8k": 8192, "<=32k": 32768, "more": math.inf}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSummary:
    """The requests of one class (or all) whose prompts have about one length (or any)."""

    traffic_class: str
    bucket: str
    num_requests: int
    num_failed: int
    ttft_attainment: float
    """Share of all requests, failed ones too, that met the target; so are the next two."""
    tpot_attainment: float
    attainment: float
    """Of all targets together."""
    goodput_rps: float
    goodput_tokens_per_s: float
    """Output tokens of good requests."""
    percentiles_s: dict[str, tuple[float, ...]]
    """By metric, in the order of PERCENTILES, of requests that did not fail; empty where there is no value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSummary:
    """All of one load."""

    groups: tuple[GroupSummary, ...]
    """Everything together first, then each class with its buckets."""
    seconds: float
    output_tokens_per_s: float
    """Of all requests, good or not."""
    lag_p99_s: float
    """How late requests were sent; where it is not small, the load generator was too slow for its plan."""
    failures: dict[str, int]
    """How often each error came."""

    @property
    def total(self) -> GroupSummary:
        return self.groups[0]

    def text(self) -> str:
        """For a terminal."""
        groups = self._groups_that_differ()
        lines = [*_attainment_table(groups), "", *_percentile_table(groups), "", self._footer()]
        most = sorted(self.failures.items(), key=lambda item: -item[1])[:_FAILURES_SHOWN]
        lines += [f"{count} failed: {error}" for error, count in most]
        return "\n".join(lines)

    def _groups_that_differ(self) -> list[GroupSummary]:
        """Without a class that is all, and without the only bucket of a class."""
        num_classes = len({group.traffic_class for group in self.groups[1:]})
        buckets = Counter(group.traffic_class for group in self.groups if group.bucket != ALL)
        return [
            self.total,
            *(
                group
                for group in self.groups[1:]
                if (num_classes > 1 if group.bucket == ALL else buckets[group.traffic_class] > 1)
            ),
        ]

    def _footer(self) -> str:
        total = self.total
        text = (
            f"{total.num_requests} requests in {self.seconds:.1f} s, {self.output_tokens_per_s:,.0f} output tokens/s; "
            f"goodput {total.goodput_rps:.2f} requests/s"
        )
        if self.lag_p99_s > 0.01:
            text += f"; the load generator was late by {self.lag_p99_s * 1e3:.0f} ms (P99)"
        return text


def summarize(result: LoadResult) -> LoadSummary:
    """Raises ValueError for a load without requests."""
    if not result.outcomes:
        raise ValueError("no request was sent")
    by_class: dict[str, dict[str, list[Outcome]]] = {}
    failures: dict[str, int] = {}
    for outcome in result.outcomes:
        buckets = by_class.setdefault(outcome.traffic_class.name, {})
        buckets.setdefault(bucket_of(outcome.prompt_tokens), []).append(outcome)
        if outcome.error is not None:
            failures[outcome.error] = failures.get(outcome.error, 0) + 1
    groups = [_summarize_group(ALL, ALL, result.outcomes, result.seconds)]
    for name, buckets in sorted(by_class.items()):
        own = [outcome for bucket in buckets.values() for outcome in bucket]
        groups.append(_summarize_group(name, ALL, own, result.seconds))
        groups += [
            _summarize_group(name, bucket, buckets[bucket], result.seconds)
            for bucket in _BUCKET_EDGES
            if bucket in buckets
        ]
    num_tokens = sum(len(outcome.token_times_s) for outcome in result.outcomes)
    return LoadSummary(
        groups=tuple(groups),
        seconds=result.seconds,
        output_tokens_per_s=num_tokens / result.seconds,
        lag_p99_s=percentile(sorted(outcome.lag_s for outcome in result.outcomes), 0.99),
        failures=failures,
    )


def bucket_of(prompt_tokens: int) -> str:
    return next(name for name, edge in _BUCKET_EDGES.items() if prompt_tokens <= edge)


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed (nearest rank)."""
    assert ordered
    assert 0.0 < share <= 1.0
    return ordered[math.ceil(share * len(ordered)) - 1]


def _summarize_group(traffic_class: str, bucket: str, outcomes: Sequence[Outcome], seconds: float) -> GroupSummary:
    count = len(outcomes)
    good = [outcome for outcome in outcomes if outcome.is_good]
    ended = [outcome for outcome in outcomes if not outcome.is_failed]
    return GroupSummary(
        traffic_class=traffic_class,
        bucket=bucket,
        num_requests=count,
        num_failed=count - len(ended),
        ttft_attainment=sum(outcome.meets_ttft for outcome in outcomes) / count,
        tpot_attainment=sum(outcome.meets_tpot for outcome in outcomes) / count,
        attainment=len(good) / count,
        goodput_rps=len(good) / seconds,
        goodput_tokens_per_s=sum(len(outcome.token_times_s) for outcome in good) / seconds,
        percentiles_s={
            "ttft": _percentiles(outcome.ttft_s for outcome in ended),
            "tpot": _percentiles(outcome.tpot_s for outcome in ended),
            "itl": _percentiles(gap for outcome in ended for gap in outcome.gaps_s),
            "e2e": _percentiles(outcome.e2e_s for outcome in ended),
        },
    )


def _percentiles(values: Iterable[float | None]) -> tuple[float, ...]:
    ordered = sorted(value for value in values if value is not None)
    return tuple(percentile(ordered, share) for share in PERCENTILES) if ordered else ()


def _attainment_table(groups: Sequence[GroupSummary]) -> list[str]:
    rows: list[list[Cell]] = [
        [
            *(group.traffic_class, group.bucket, group.num_requests, group.num_failed),
            *(share * 100 for share in (group.ttft_attainment, group.tpot_attainment, group.attainment)),
            *(group.goodput_rps, group.goodput_tokens_per_s),
        ]
        for group in groups
    ]
    header = ("class", "prompt", "requests", "failed", "TTFT met, %", "TPOT met, %", "all met, %", "goodput, req/s",
              "goodput, tok/s")  # fmt: skip
    return table(header, rows)


def _percentile_table(groups: Sequence[GroupSummary]) -> list[str]:
    rows: list[list[Cell]] = []
    for group in groups:
        for metric in METRICS:
            values = group.percentiles_s[metric] or (None,) * len(PERCENTILES)
            cells: list[Cell] = [None if value is None else value * 1e3 for value in values]
            rows.append([group.traffic_class, group.bucket, metric.upper(), *cells])
    return table(("class", "prompt", "ms", *(f"P{share * 100:g}" for share in PERCENTILES)), rows)
