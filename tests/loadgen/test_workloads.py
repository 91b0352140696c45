"""Lengths, arrivals and traces: distributions against their moments, scaling and prefixes against the rows."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeserve.loadgen.domains import DOMAINS, DomainTraffic, load_domain_texts
from moeserve.loadgen.prompts import TextPrompts, TokenIdPrompts
from moeserve.loadgen.traces import TraceRow, read_trace
from moeserve.loadgen.traffic import PlannedRequest, PromptBlock, TrafficClass
from moeserve.loadgen.workloads import LengthRange, SyntheticWorkload, TraceWorkload

ONE = (TrafficClass(name="standard"),)
TWO = (TrafficClass(name="interactive", share=1.0), TrafficClass(name="batch", share=3.0))


def _synthetic(burstiness: float = 1.0, classes: tuple[TrafficClass, ...] = ONE) -> SyntheticWorkload:
    return SyntheticWorkload(
        classes=classes,
        prompt_tokens=LengthRange(low=1, high=9),
        output_tokens=LengthRange(low=7, high=7),
        burstiness=burstiness,
    )


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_have_the_rate_and_the_spread_of_their_gamma_distribution(burstiness: float) -> None:
    plan = _synthetic(burstiness).at_rate(50.0, duration_s=400.0, seed=1)
    gaps = np.diff([request.arrival_s for request in plan])
    assert (gaps >= 0).all()
    assert plan[-1].arrival_s < 400.0
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_classes_come_by_their_shares_and_lengths_in_their_range() -> None:
    plan = _synthetic(classes=TWO).at_rate(100.0, duration_s=100.0, seed=2)
    share = sum(request.traffic_class.name == "batch" for request in plan) / len(plan)
    assert share == pytest.approx(0.75, abs=0.02)
    assert {request.prompt_tokens for request in plan} == set(range(1, 10))
    assert {request.output_tokens for request in plan} == {7}


def test_a_seed_repeats_itself_and_another_shares_no_prompt() -> None:
    first, again, other = (_synthetic().at_rate(5.0, duration_s=20.0, seed=seed) for seed in (1, 1, 2))
    assert first == again
    seeds = [block.seed for request in (*first, *other) for block in request.prompt]
    assert len(set(seeds)) == len(seeds)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_a_rate_must_be_above_zero(rate: float) -> None:
    with pytest.raises(ValueError, match="rate must be above 0"):
        _synthetic().at_rate(rate, duration_s=1.0, seed=0)


def test_no_arrivals_are_an_error_that_says_why() -> None:
    with pytest.raises(ValueError, match=r"no request arrives in 1 s at 0\.001"):
        _synthetic().at_rate(0.001, duration_s=1.0, seed=0)


AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:18:03.9799600,110,27
"""
MOONCAKE = """{"timestamp": 500, "input_length": 1100, "output_length": 500, "hash_ids": [0, 1, 2]}
{"timestamp": 2500, "input_length": 1030, "output_length": 4, "hash_ids": [0, 1, 5]}

{"timestamp": 4500, "input_length": 3, "output_length": 2}
"""


def test_azure_rows_in_order_of_time(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(AZURE)
    rows = read_trace(path)
    assert [(row.prompt_tokens, row.output_tokens) for row in rows] == [(4808, 10), (3180, 8), (110, 27)]
    assert [row.arrival_s for row in rows] == pytest.approx([0.0, 0.052, 60.0], abs=1e-5)


def test_mooncake_rows_keep_their_hash_ids(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(MOONCAKE)
    rows = read_trace(path)
    assert [row.arrival_s for row in rows] == [0.0, 2.0, 4.0]
    assert [row.hash_ids for row in rows] == [(0, 1, 2), (0, 1, 5), ()]


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("t.txt", "", r"\.csv or \.jsonl"),
        ("t.csv", "", "holds no requests"),
        ("t.csv", "TIMESTAMP,ContextTokens\n2023-11-16 18:17:04.0,7\n", "line 2 must have"),
        ("t.csv", AZURE + "today,1,1\n", "line 5 must have"),
        ("t.jsonl", MOONCAKE + "[1]\n", "line 5 must have"),
        ("t.jsonl", '{"timestamp": 1}\n', "line 1 must have"),
    ],
)
def test_what_is_no_trace(tmp_path: Path, name: str, text: str, reason: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError, match=reason):
        read_trace(path)


def test_a_trace_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.csv: No such file"):
        read_trace(tmp_path / "none.csv")


def _rows(count: int = 101) -> tuple[TraceRow, ...]:
    return tuple(TraceRow(arrival_s=float(i), prompt_tokens=1000 + i, output_tokens=i + 1) for i in range(count))


def test_a_trace_at_a_rate_is_a_stretch_of_the_same_traffic_at_just_that_rate() -> None:
    workload = TraceWorkload(rows=_rows(), classes=ONE)
    plan = workload.at_rate(10.0, duration_s=5.0, seed=0)
    assert [request.arrival_s for request in plan] == pytest.approx([i / 10 for i in range(50)])
    assert [request.output_tokens for request in plan] == list(range(1, 51))


@given(gaps=st.lists(st.floats(0.0, 9.0), min_size=12, max_size=30), seed=st.integers(0, 9))
def test_stretches_have_their_rate_and_keep_the_proportions_of_distances(gaps: list[float], seed: int) -> None:
    arrivals = np.cumsum([0.0, *gaps])
    rows = tuple(
        TraceRow(arrival_s=float(now_s), prompt_tokens=1, output_tokens=i + 1) for i, now_s in enumerate(arrivals)
    )
    plan = TraceWorkload(rows=rows, classes=ONE).at_rate(5.0, duration_s=2.0, seed=seed)
    assert len(plan) == 10
    start = plan[0].output_tokens - 1
    assert [request.output_tokens for request in plan] == list(range(start + 1, start + 11))
    recorded_s = max(arrivals[start + 10] - arrivals[start], 1e-9)
    expected = (arrivals[start : start + 10] - arrivals[start]) * 2.0 / recorded_s
    assert [request.arrival_s for request in plan] == pytest.approx(expected.tolist(), abs=1e-6)


def test_another_seed_takes_another_stretch() -> None:
    workload = TraceWorkload(rows=_rows(), classes=ONE)
    starts = {workload.at_rate(10.0, duration_s=5.0, seed=seed)[0].output_tokens for seed in range(1, 9)}
    assert len(starts) > 3


def test_a_stretch_longer_than_the_trace_is_all_of_it_at_the_rate() -> None:
    plan = TraceWorkload(rows=_rows(), classes=ONE).at_rate(2.0, duration_s=1e6, seed=3)
    assert [request.arrival_s for request in plan] == pytest.approx([i / 2 for i in range(100)])


def test_a_trace_as_recorded_keeps_its_clock() -> None:
    workload = TraceWorkload(rows=_rows(), classes=ONE)
    plan = workload.as_recorded(time_scale=4.0, duration_s=5.0, seed=0)
    assert [request.arrival_s for request in plan] == pytest.approx([i / 4 for i in range(20)])


def test_lengths_are_scaled_and_cut() -> None:
    rows = (TraceRow(arrival_s=0, prompt_tokens=1000, output_tokens=3), TraceRow(arrival_s=1, prompt_tokens=2,
            output_tokens=900))  # fmt: skip
    workload = TraceWorkload(rows=rows, classes=ONE, length_scale=0.1, max_prompt_tokens=64, max_output_tokens=50)
    plan = workload.as_recorded(time_scale=1.0, duration_s=10.0, seed=0)
    assert [(request.prompt_tokens, request.output_tokens) for request in plan] == [(64, 1), (1, 50)]


@given(
    shared=st.integers(0, 4), own=st.integers(1, 4), last=st.integers(1, 512), scale=st.sampled_from([1.0, 0.5, 0.03])
)
def test_equal_leading_hash_ids_become_equal_leading_tokens(shared: int, own: int, last: int, scale: float) -> None:
    first_ids = tuple(range(shared + own))
    second_ids = (*first_ids[:shared], *range(100, 100 + own))
    prompt_tokens = 512 * (shared + own - 1) + last
    rows = tuple(
        TraceRow(arrival_s=i, prompt_tokens=prompt_tokens, output_tokens=1, hash_ids=ids)
        for i, ids in enumerate((first_ids, second_ids))
    )
    workload = TraceWorkload(rows=rows, classes=ONE, length_scale=scale)
    plan = workload.as_recorded(time_scale=1.0, duration_s=9.0, seed=0)
    first, second = (TokenIdPrompts(100_000).make(request.prompt) for request in plan)
    assert len(first) == len(second) == max(1, round(prompt_tokens * scale))
    same = next((i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b), len(first))
    assert same >= min(len(first), shared * round(512 * scale))
    # Beyond the shared blocks only chance is equal.
    assert same <= shared * round(512 * scale) + 2


def test_rows_without_hash_ids_share_nothing() -> None:
    plan = TraceWorkload(rows=_rows(), classes=ONE).as_recorded(time_scale=1.0, duration_s=1e6, seed=0)
    heads = {tuple(TokenIdPrompts(100_000).make(request.prompt)[:4]) for request in plan}
    assert len(heads) == len(plan)


def test_text_prompts_are_of_their_domain_and_of_their_length() -> None:
    prompts = TextPrompts({"a": "abc" * 5, "b": "xyz" * 5}, chars_per_token=4.0)
    for seed in range(8):
        piece = prompts.make([PromptBlock(seed=(seed,), num_tokens=10, domain="a")])
        assert len(piece) == 40
        assert piece in "abc" * 20
    assert len({prompts.make([PromptBlock(seed=(seed,), num_tokens=1)])[0] in "abc" for seed in range(20)}) == 2


def test_domains_take_turns_and_have_their_texts() -> None:
    traffic = DomainTraffic(ONE[0], prompt_tokens=5, output_tokens=3, domain_s=60.0, seed=0)
    requests: list[PlannedRequest] = [traffic.next_request(now_s) for now_s in (0.0, 59.9, 60.0, 125.0, 180.0)]
    assert [request.prompt[0].domain for request in requests] == ["prose", "prose", "code", "dutch", "prose"]
    assert len({request.prompt[0].seed for request in requests}) == 5
    texts = load_domain_texts()
    assert set(texts) == set(DOMAINS)
    assert all(len(text) > 50_000 for text in texts.values())
    assert " het " in texts["dutch"]
    assert "import " in texts["code"]


@pytest.mark.parametrize("values", [{"ttft_s": 0.0}, {"tpot_s": -1.0}, {"share": 0.0}, {"e2e_s": float("inf")}])
def test_targets_must_be_above_zero(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(values))} of class c must be a number above 0"):
        TrafficClass(name="c", **values)


@pytest.mark.parametrize("values", [{"name": "böse"}, {"name": "c", "tenant": "a\r\nb"}])
def test_names_must_fit_into_headers(values: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="printable ASCII"):
        TrafficClass(**values)  # type: ignore[arg-type]


def test_the_server_is_told_classes_it_knows() -> None:
    told = TrafficClass(name="interactive", ttft_s=0.5, tpot_s=0.0125, tenant="acme")
    assert told.headers() == {
        "x-slo-class": "interactive", "x-slo-ttft-ms": "500", "x-slo-tpot-ms": "12.5", "x-tenant": "acme",
    }  # fmt: skip
    assert TrafficClass(name="standard", ttft_s=1.0, is_told=False).headers() == {}
