"""Outcomes and their report, against sums done by hand and numpy."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from moeserve.loadgen.loops import LoadResult
from moeserve.loadgen.outcomes import Outcome
from moeserve.loadgen.report import Report, check_report_path, write_report
from moeserve.loadgen.summary import ALL, LoadSummary, bucket_of, percentile, summarize
from moeserve.loadgen.traffic import TrafficClass

TIGHT = TrafficClass(name="tight", ttft_s=0.5, tpot_s=0.1)
E2E = TrafficClass(name="e2e", e2e_s=2.0)


def _outcome(*times_s: float, traffic_class: TrafficClass = TIGHT, prompt_tokens: int = 10,
             error: str | None = None) -> Outcome:  # fmt: skip
    return Outcome(
        traffic_class=traffic_class,
        sent_s=0.0,
        lag_s=0.0,
        prompt_tokens=prompt_tokens,
        output_tokens_wanted=len(times_s),
        token_times_s=times_s,
        error=error,
    )


def test_ttft_tpot_itl_and_e2e_of_one_request() -> None:
    outcome = _outcome(0.5, 0.6, 0.6, 0.8)
    assert (outcome.ttft_s, outcome.e2e_s) == (0.5, 0.8)
    assert outcome.tpot_s == pytest.approx(0.1)
    assert outcome.gaps_s == pytest.approx((0.1, 0.0, 0.2))


@pytest.mark.parametrize(
    ("outcome", "meets"),
    [
        (_outcome(0.5, 0.6), (True, True, True)),
        (_outcome(0.51, 0.6), (False, True, False)),
        (_outcome(0.4, 0.6), (True, False, False)),
        (_outcome(0.4), (True, True, True)),  # one token has no TPOT
        (_outcome(0.4, 0.45, error="cut short"), (False, False, False)),
        (_outcome(error="refused"), (False, False, False)),
        (_outcome(1.0, 2.0, traffic_class=E2E), (True, True, True)),
        (_outcome(0.1, 2.01, traffic_class=E2E), (True, True, False)),
    ],
)
def test_a_request_is_good_when_it_ended_and_met_all_its_targets(outcome: Outcome, meets: tuple[bool, ...]) -> None:
    assert (outcome.meets_ttft, outcome.meets_tpot, outcome.is_good) == meets


def test_the_latest_end_is_that_of_the_tightest_target() -> None:
    assert TIGHT.latest_end_s(11) == pytest.approx(1.5)
    assert E2E.latest_end_s(11) == 2.0
    assert TrafficClass(name="c", ttft_s=0.5, tpot_s=0.1, e2e_s=1.0).latest_end_s(11) == 1.0
    assert TrafficClass(name="c", ttft_s=0.5).latest_end_s(11) == float("inf")


@pytest.mark.parametrize(
    ("tokens", "bucket"),
    [(1, "<=128"), (128, "<=128"), (129, "<=512"), (2048, "<=2k"), (2049, "<=8k"), (32768, "<=32k"), (32769, "more")],
)
def test_buckets(tokens: int, bucket: str) -> None:
    assert bucket_of(tokens) == bucket


def _summary() -> LoadSummary:
    outcomes = (
        _outcome(0.4, 0.5),
        _outcome(0.4, 0.5, prompt_tokens=300),
        _outcome(0.9, 0.95, 1.0, prompt_tokens=300),
        _outcome(0.1, 0.2, error="the connection broke"),
        _outcome(1.0, 1.5, traffic_class=E2E),
    )
    return summarize(LoadResult(outcomes=outcomes, seconds=4.0))


def test_failed_requests_never_count_as_good() -> None:
    summary = _summary()
    total = summary.total
    assert (total.traffic_class, total.bucket) == (ALL, ALL)
    assert (total.num_requests, total.num_failed) == (5, 1)
    assert (total.ttft_attainment, total.tpot_attainment, total.attainment) == (0.6, 0.8, 0.6)
    assert (total.goodput_rps, total.goodput_tokens_per_s) == (0.75, 1.5)
    assert summary.output_tokens_per_s == pytest.approx(11 / 4)
    assert summary.failures == {"the connection broke": 1}


def test_groups_partition_the_requests() -> None:
    groups = {(group.traffic_class, group.bucket): group for group in _summary().groups}
    assert list(groups) == [
        (ALL, ALL), ("e2e", ALL), ("e2e", "<=128"), ("tight", ALL), ("tight", "<=128"), ("tight", "<=512"),
    ]  # fmt: skip
    for name in ("e2e", "tight"):
        whole = groups[name, ALL]
        parts = [group for (own, bucket), group in groups.items() if own == name and bucket != ALL]
        assert whole.num_requests == sum(part.num_requests for part in parts)
        assert whole.goodput_rps == pytest.approx(sum(part.goodput_rps for part in parts))
    # The percentiles leave failed requests out.
    assert groups["tight", "<=128"].percentiles_s["ttft"] == (0.4,) * 4


def test_percentiles_are_values_that_occurred() -> None:
    values = sorted(np.random.default_rng(0).exponential(size=1001).tolist())
    for share in (0.5, 0.9, 0.99, 0.999, 1.0):
        assert percentile(values, share) == np.quantile(values, share, method="inverted_cdf")


def test_the_text_leaves_out_groups_that_say_nothing_new() -> None:
    one = summarize(LoadResult(outcomes=(_outcome(0.4, 0.5), _outcome(0.4, 0.5)), seconds=1.0)).text()
    assert "tight" not in one
    both = _summary().text()
    assert both.count("| tight ") == 3 * 5  # all and two buckets: a line of attainment and four of percentiles
    assert both.count("| e2e ") == 1 * 5
    assert "1 failed: the connection broke" in both


def test_a_load_without_requests_has_no_summary() -> None:
    with pytest.raises(ValueError, match="no request"):
        summarize(LoadResult(outcomes=(), seconds=1.0))


@pytest.mark.parametrize("ending", [".html", ".png", ".svg"])
def test_reports_are_written(tmp_path: Path, ending: str) -> None:
    good, late, failed = _outcome(0.4, 0.5), _outcome(0.9, 1.0), _outcome(error="<refused>")
    load = LoadResult(outcomes=(good, late, failed, _outcome(0.1, traffic_class=E2E)), seconds=2.0)
    report = Report(settings={"rate": 2.0, "clients": None}, load=load, summary=summarize(load))
    path = tmp_path / f"report{ending}"
    check_report_path(path)
    write_report(report, path)
    assert path.stat().st_size > 1000
    if ending == ".html":
        page = path.read_text()
        assert "&lt;refused&gt;" in page
        assert "rate: 2.0" in page
        assert "<svg" in page
    record = json.loads(json.dumps(report.to_dict()))
    assert [request["is_good"] for request in record["requests"]] == [True, False, False, True]


def test_a_report_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\.html, \.png, \.svg, got r\.pdf"):
        check_report_path(Path("r.pdf"))


def test_without_matplotlib_a_report_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"pip install 'moeserve\[bench\]'"):
        check_report_path(Path("r.png"))
