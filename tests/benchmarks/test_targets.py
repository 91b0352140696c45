"""Rates, ratios, verdicts and reports from measurements that are made up, against sums done by hand."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.harness.load import Load, LoadTimes
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.measurement import Measurement, Results, measurement
from benchmarks.harness.tables import table
from benchmarks.peers.chart import draw_chart
from benchmarks.peers.overhead import Overhead, share_outside_model
from benchmarks.peers.plan import EIGHT_BITS, LOADS, MANY_CLIENTS, ONE_CLIENT, ONE_CORE, PLAN, PREFILL, TWO_RANKS
from benchmarks.peers.report import Run, as_json, as_markdown
from benchmarks.peers.runner import Record
from benchmarks.peers.system import PeerUnavailableError
from benchmarks.peers.targets import Verdict, judge
from moeserve.loadgen.summary import percentile

OURS, VLLM, LLAMA, TRANSFORMERS = (variant.name for variant in ONE_CORE.variants)


def _row(system: str, load: Load, round_index: int, tokens_per_s: float) -> Measurement:
    rates = {"output_tokens_per_s": tokens_per_s, "prompt_tokens_per_s": 0.0}
    if load.output_tokens == 1:
        rates = {"output_tokens_per_s": 0.0, "prompt_tokens_per_s": tokens_per_s}
    return Measurement(system=system, load=load.name, round_index=round_index, seconds=1.0, **rates)


def _verdict(verdicts: list[Verdict], start: str, end: str = "") -> Verdict:
    (found,) = (one for one in verdicts if one.target.startswith(start) and one.target.endswith(end))
    return found


def test_rates_and_latencies_of_a_load() -> None:
    load = Load(name="two", num_clients=2, prompt_tokens=10, output_tokens=3)
    times = LoadTimes(seconds=2.0, token_times=((0.5, 0.6, 0.9), (0.7, 1.1, 1.6)))
    row = measurement("s", load, 0, times)
    assert (row.output_tokens_per_s, row.prompt_tokens_per_s) == (3.0, 10.0)
    assert row.ttft_p50_s == pytest.approx(0.6)
    assert row.itl_p50_s == pytest.approx(0.3)  # gaps 0.1, 0.3, 0.4, 0.5
    assert row.itl_p99_s == pytest.approx(0.5)


def test_a_system_that_answers_at_once_has_no_latencies() -> None:
    load = Load(name="one", num_clients=1, prompt_tokens=10, output_tokens=3)
    row = measurement("s", load, 0, LoadTimes(seconds=2.0, token_times=((2.0, 2.0, 2.0),)))
    assert (row.ttft_p50_s, row.itl_p50_s, row.itl_p99_s) == (None, None, None)
    only_prefill = replace(load, output_tokens=1)
    assert measurement("s", only_prefill, 0, LoadTimes(seconds=2.0, token_times=((2.0,),))).ttft_p50_s == 2.0


@pytest.mark.parametrize(("share", "expected"), [(0.01, 1), (0.5, 2), (0.75, 3), (0.76, 4), (1.0, 4)])
def test_percentile_is_a_value_that_occurred(share: float, expected: int) -> None:
    assert percentile([1, 2, 3, 4], share) == expected


def test_a_ratio_is_taken_within_rounds() -> None:
    """In the second round the machine was three times slower for both; the third has no figure of theirs."""
    ours = [_row("ours", ONE_CLIENT, index, rate) for index, rate in ((0, 30.0), (1, 10.0), (2, 99.0))]
    theirs = [_row("theirs", ONE_CLIENT, index, rate) for index, rate in ((0, 15.0), (1, 5.0))]
    results = Results([*ours, *theirs], LOADS)
    assert results.ratio("ours", "theirs", ONE_CLIENT.name) == 2.0
    assert results.rate("ours", ONE_CLIENT.name) == 30.0
    assert results.ratio("ours", "nobody", ONE_CLIENT.name) is None
    assert results.ratio("ours", "theirs", MANY_CLIENTS.name) is None


def test_the_best_peer_is_the_one_that_counts() -> None:
    rates = {OURS: 26.0, VLLM: 20.0, LLAMA: 13.0}
    verdicts = judge(Results([_row(name, MANY_CLIENTS, 0, rate) for name, rate in rates.items()], LOADS), {}, None)
    verdict = _verdict(verdicts, f"{ONE_CORE.name}: {MANY_CLIENTS.name}")
    assert (verdict.found, verdict.word) == (1.3, "met")
    assert verdict.note == f"{VLLM}; without {TRANSFORMERS}"


def test_prefill_counts_prompt_tokens() -> None:
    rows = [_row(OURS, PREFILL, 0, 140.0), _row(TRANSFORMERS, PREFILL, 0, 100.0)]
    verdict = _verdict(judge(Results(rows, LOADS), {}, None), f"{ONE_CORE.name}: {PREFILL.name}")
    assert (verdict.found, verdict.limit, verdict.word) == (1.4, 1.5, "MISSED")


def test_every_target_is_judged_and_none_is_met_without_figures() -> None:
    verdicts = judge(Results([], LOADS), {}, None)
    assert {verdict.word for verdict in verdicts} == {"not measured"}
    assert sorted(verdict.limit for verdict in verdicts) == sorted(
        [1.0, 1.3, 1.3, 1.5] * 2 + [1.2] + [1.6] * 2 + [15.0] * 4 + [0.10]
    )
    assert len({verdict.target for verdict in verdicts}) == len(verdicts)


def test_two_ranks_int8_start_and_overhead_have_limits_of_their_own() -> None:
    tp = TWO_RANKS[0].name
    ours, theirs = (variant.name for variant in EIGHT_BITS.variants)
    rows = [_row(OURS, MANY_CLIENTS, 0, 10.0), _row(tp, MANY_CLIENTS, 0, 15.9)]
    rows += [_row(ours, ONE_CLIENT, 0, 12.0), _row(theirs, ONE_CLIENT, 0, 10.0)]
    verdicts = judge(Results(rows, LOADS), {OURS: 15.0, tp: 15.1}, 0.11)
    words = [
        _verdict(verdicts, f"{tp} over one rank").word,
        _verdict(verdicts, EIGHT_BITS.name).word,
        _verdict(verdicts, OURS, "seconds").word,
        _verdict(verdicts, tp, "seconds").word,
        _verdict(verdicts, "scheduler").word,
    ]
    assert words == ["MISSED", "met", "met", "MISSED", "MISSED"]


def test_samples_in_the_engine_loop_but_not_in_the_model() -> None:
    loop = "main (cli.py:5);run (moeserve/engine/replica_loop.py:30)"
    lines = [
        f"{loop};step (core.py:7);execute (moeserve/worker/worker.py:50);matmul 90",
        f"{loop};step (core.py:7);schedule (scheduler.py:9) 7",
        f"{loop};poll 3",
        "loader (threading.py:1) 500",
    ]
    assert share_outside_model(lines) == (100, pytest.approx(0.1))
    with pytest.raises(PeerUnavailableError, match="10 samples of the engine loop"):
        share_outside_model(lines[1:])


def test_tables_align_numbers_right_and_show_what_is_missing() -> None:
    lines = table(("name", "x"), [["a", 1.234], ["bcdef", None], ["c", 12345.6]])
    assert lines == [
        "| name  |      x |",
        "| ----- | -----: |",
        "| a     |   1.23 |",
        "| bcdef |      - |",
        "| c     | 12,346 |",
    ]


def test_the_report_tells_figures_failures_and_verdicts(tmp_path: Path) -> None:
    record = Record(ready_s={OURS: 5.0}, failures={VLLM: "install: exit code 1"})
    record.measurements += [
        _row(name, load, index, 100.0 + index) for name in (OURS, LLAMA) for load in LOADS for index in range(3)
    ]
    run = Run(
        command="python -m benchmarks.peers",
        date="2000-01-01",
        machine=describe_machine(),
        checkpoint="a checkpoint",
        versions={"llama.cpp": "llama.cpp 1"},
        comparisons=PLAN,
        record=record,
        overhead=Overhead(scheduler=0.03, frontend=0.04, num_samples=1000, seconds=9.0),
    )
    run = replace(run, verdicts=judge(run.results, record.ready_s, 0.07))
    text = as_markdown(run)
    assert f"- {VLLM}: install: exit code 1" in text
    assert "101.0 [100.0, 102.0]" in text
    assert "1.00 x" in text
    assert "the scheduler takes 3.0% of a step and the frontend 4.0%" in text
    saved = json.loads(json.dumps(as_json(run)))
    assert {verdict["verdict"] for verdict in saved["targets"]} == {"met", "MISSED", "not measured"}
    assert {(row["system"], row["tokens_per_s"]) for row in saved["medians"]} == {(OURS, 101.0), (LLAMA, 101.0)}
    assert saved["machine"]["commit"]
    draw_chart(run, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
