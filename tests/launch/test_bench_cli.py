"""`moeserve bench serve` against a served fake engine, and the words it refuses."""

import argparse
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from moeserve.config import ConfigError
from moeserve.engine.outputs import SchedulerOutput
from moeserve.testing.served_engine import RunningFrontend, serve_fake_engine
from moeserve.testing.tokenizer_files import write_tokenizer
from moeserve.tokenizer import load_tokenizer
from moeserve_launch.bench_cli import add_bench_commands
from moeserve_launch.bench_plan import ClosedPlan, OpenPlan, SearchPlan, make_plan, parse_class, parse_lengths
from moeserve_launch.cli import main

KEY = "a-secret-key"
ENOUGH = ("--vocab-size", "100", "--prompt-tokens", "2:40", "--output-tokens", "5")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[RunningFrontend]:
    settings = {"model": {"model": "demo"}, "server": {"api_key": KEY}}
    with serve_fake_engine(folder, settings, vocab_size=load_tokenizer(folder).vocab_size) as running:
        yield running


def _bench(served: RunningFrontend, *words: str) -> int:
    return main(["bench", "serve", "--url", served.url, "--api-key", KEY, *words])


def test_a_closed_loop_from_words_to_files(
    served: RunningFrontend, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record, report = tmp_path / "run.json", tmp_path / "run.html"
    words = ("--clients", "3", "--num-requests", "7", "--json", str(record), "--report", str(report))
    assert _bench(served, *words, *ENOUGH) == 0
    shown = capsys.readouterr().out
    assert "7 requests in" in shown
    assert KEY not in record.read_text() + report.read_text() + shown
    saved = json.loads(record.read_text())
    assert saved["settings"]["model"] == "demo"
    assert len(saved["requests"]) == 7
    assert all(len(request["token_times_s"]) == 5 for request in saved["requests"])
    assert all(2 <= request["prompt_tokens"] <= 40 for request in saved["requests"])
    assert "7 requests in" in report.read_text()


def test_an_open_loop_with_classes_as_json_on_standard_output(
    served: RunningFrontend, capsys: pytest.CaptureFixture[str]
) -> None:
    classes = ("--class", "interactive,share=1,ttft=30,tpot=30", "--class", "batch,share=1,e2e=0.000001")
    assert _bench(served, "--rate", "200", "--duration", "0.2", "--json", "-", *classes, *ENOUGH) == 0
    output = capsys.readouterr()
    saved = json.loads(output.out)
    groups = {(group["traffic_class"], group["bucket"]): group for group in saved["summary"]["groups"]}
    assert groups["interactive", "all"]["attainment"] == 1.0
    assert groups["batch", "all"]["attainment"] == 0.0
    assert "interactive" in output.err


def test_a_trace_is_replayed(served: RunningFrontend, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 100 * i, "input_length": 1024, "output_length": 50, "hash_ids": [0, i]} for i in range(6)]
    trace.write_text("\n".join(json.dumps(row) for row in rows))
    scale = ("--length-scale", "0.1", "--time-scale", "10", "--vocab-size", "100")
    assert _bench(served, "--trace", str(trace), "--json", "-", "--duration", "1", *scale) == 0
    saved = json.loads(capsys.readouterr().out)
    assert [request["prompt_tokens"] for request in saved["requests"]] == [102] * 6
    assert [len(request["token_times_s"]) for request in saved["requests"]] == [5] * 6
    assert saved["summary"]["seconds"] >= 1.0


def test_a_search_tells_its_trials_and_its_end(served: RunningFrontend, capsys: pytest.CaptureFixture[str]) -> None:
    """A target that nobody meets: it goes down to where twenty requests come, and the report is of the lowest rate."""
    words = ("--find-max-goodput", "--rate", "800", "--duration", "0.1", "--class", "batch,e2e=0.000001")
    assert _bench(served, *words, "--json", "-", *ENOUGH) == 0
    output = capsys.readouterr()
    assert [line.split()[0] for line in output.err.splitlines() if "met their targets" in line] == ["800", "400", "200"]
    assert "no rate passed; the lowest tried was 200" in output.err
    saved = json.loads(output.out)
    assert saved["max_goodput"]["rate"] is None
    assert [trial["rate"] for trial in saved["max_goodput"]["trials"]] == [800.0, 400.0, 200.0]
    assert len(saved["requests"]) == len(saved["max_goodput"]["trials"][-1]["is_good"])


def test_an_interrupt_ends_a_profile_with_its_report(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    num_steps = 0

    def on_step(output: SchedulerOutput) -> None:
        nonlocal num_steps
        num_steps += bool(output.num_scheduled_tokens)
        if num_steps == 60:
            os.kill(os.getpid(), signal.SIGINT)

    settings = {"model": {"model": "demo"}}
    vocab_size = load_tokenizer(folder).vocab_size
    with serve_fake_engine(folder, settings, vocab_size=vocab_size, max_model_len=2048, on_step=on_step) as running:
        words = ("--profile", "demo-domains", "--clients", "2", "--prompt-tokens", "20", "--output-tokens", "8")
        assert main(["bench", "serve", "--url", running.url, *words, "--json", "-"]) == 0
    saved = json.loads(capsys.readouterr().out)
    assert 2 <= len(saved["requests"]) < 60
    assert all(request["error"] is None for request in saved["requests"])


def test_a_mistake_shows_with_the_first_request(served: RunningFrontend, capsys: pytest.CaptureFixture[str]) -> None:
    assert _bench(served, "--rate", "1", "--prompt-tokens", "100000", "--vocab-size", "100") == 1
    assert "the first request failed: 400" in capsys.readouterr().err
    assert main(["bench", "serve", "--url", served.url, "--api-key", "wrong", "--rate", "1"]) == 1
    assert "401" in capsys.readouterr().err


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--url", "http://127.0.0.1:1", "--rate", "1"]) == 1
    assert "no server at" in capsys.readouterr().err


def _arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_bench_commands(parser)
    return parser.parse_args(["serve", *words])


def test_plans() -> None:
    closed = make_plan(_arguments("--clients", "4"))
    assert isinstance(closed, ClosedPlan)
    assert (closed.num_clients, closed.num_requests) == (4, 40)
    drawn = [closed.next_request(0.0) for _ in range(41)]
    assert None not in drawn[:40]
    assert drawn[40] is None
    assert len({request.prompt for request in drawn if request is not None}) == 40

    timed = make_plan(_arguments("--clients", "4", "--duration", "9"))
    assert isinstance(timed, ClosedPlan)
    assert (timed.num_requests, timed.duration_s) == (None, 9.0)
    many = [request for request in (timed.next_request(0.0) for _ in range(600)) if request is not None]
    assert len({request.prompt for request in many}) == 600

    profile = make_plan(_arguments("--profile", "demo-domains", "--domain-seconds", "5"))
    assert isinstance(profile, ClosedPlan)
    requests = [profile.next_request(now_s) for now_s in (0.0, 6.0, 11.0)]
    assert [request and request.prompt[0].domain for request in requests] == ["prose", "code", "dutch"]

    search = make_plan(_arguments("--find-max-goodput", "--attainment", "0.9"))
    assert isinstance(search, SearchPlan)
    assert (search.start_rate, search.duration_s, search.settings.attainment) == (1.0, 30.0, 0.9)

    cut = make_plan(_arguments("--rate", "50", "--num-requests", "3"))
    assert isinstance(cut, OpenPlan)
    assert len(cut.requests) == 3
    assert cut.duration_s == cut.requests[-1].arrival_s


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ((), "say what to send"),
        (("--rate", "0"), "rate must be above 0"),
        (("--clients", "0"), "--clients must be 1 or more, got 0"),
        (("--clients", "1", "--rate", "1"), "--clients is a closed loop"),
        (("--profile", "demo-domains", "--rate", "1"), "--profile is a closed loop"),
        (("--profile", "demo-domains", "--num-requests", "1"), "--profile ends after"),
        (("--profile", "demo-domains", "--domain-seconds", "0"), "seconds a domain must be above 0"),
        (("--rate", "1", "--time-scale", "2"), "--time-scale is for a --trace"),
        (("--rate", "1", "--duration", "-1"), "--duration must be above 0"),
        (("--rate", "1", "--burstiness", "0"), "burstiness must be above 0"),
        (("--rate", "1", "--prompt-tokens", "9:1"), "lengths must be|--prompt-tokens must be"),
        (("--rate", "1", "--output-tokens", "x"), "--output-tokens must be N or LOW:HIGH"),
        (("--trace", "nowhere.csv"), "nowhere.csv: No such file"),
        (("--find-max-goodput", "--attainment", "2"), "attainment must be between 0 and 1"),
    ],
)
def test_words_that_make_no_plan(words: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make_plan(_arguments(*words))


def test_classes_and_lengths_of_words() -> None:
    parsed = parse_class("interactive,share=0.25,ttft=0.5,tpot=0.05,tenant=acme")
    assert (parsed.name, parsed.share, parsed.ttft_s, parsed.tpot_s, parsed.e2e_s) == (
        "interactive",
        0.25,
        0.5,
        0.05,
        None,
    )
    assert parsed.tenant == "acme"
    assert parsed.is_told
    assert (parse_lengths("--x", "7").low, parse_lengths("--x", "7").high) == (7, 7)
    for text, reason in (("a,ttft=fast", "ttft of --class must be a number"), ("a,speed=1", "--class takes"),
                         ("", "must have a name"), ("a,ttft=0", "must be a number above 0")):  # fmt: skip
        with pytest.raises(ValueError, match=reason):
            parse_class(text)


def test_a_body_that_is_no_object(served: RunningFrontend, capsys: pytest.CaptureFixture[str]) -> None:
    for body in ("[1]", "{"):
        assert _bench(served, "--rate", "1", "--extra-body", body) == 1
        assert "--extra-body must be" in capsys.readouterr().err
    assert issubclass(ConfigError, ValueError)
