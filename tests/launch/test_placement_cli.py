"""`moeserve placement simulate | advise`: what they print and write, and how mistakes are named."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from moeserve_launch.cli import main
from moeserve_placement import ExpertPlacement
from moeserve_placement.load import LoadTrace, write_trace
from moeserve_placement.synthetic import dirichlet_popularity, drifting_trace

NUM_LAYERS, NUM_EXPERTS = 2, 16


@pytest.fixture
def trace_file(tmp_path: Path) -> str:
    """A short trace, as a file."""
    popularity_LE = dirichlet_popularity(
        np.random.default_rng(0), num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS, concentration=1.0
    )
    trace = drifting_trace(popularity_LE, num_windows=20, tokens_per_window=5000, top_k=2, drift=0.02, seed=0)
    path = tmp_path / "loads.npz"
    write_trace(path, trace)
    return str(path)


def test_simulate_compares_policies_at_every_size(
    trace_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = tmp_path / "found.json"
    words = ["placement", "simulate", trace_file, "--ranks", "4", "8", "--nodes", "2", "--json", str(found)]
    assert main([*words, "--policy", "frozen", "incremental", "--expert-bytes", "2M"]) == 0
    records = json.loads(found.read_text())
    assert [(record["policy"], record["num_ranks"]) for record in records] == [
        ("frozen", 4), ("incremental", 4), ("frozen", 8), ("incremental", 8),
    ]  # fmt: skip
    assert [record["num_physical_experts"] for record in records] == [20, 20, 24, 24]
    assert records[1]["num_bytes"] == records[1]["num_moves"] * 2 * 2**20 > 0
    assert records[1]["balancedness_mean"] > records[0]["balancedness_mean"]
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 2 + 4
    assert f"| {records[1]['balancedness_mean']:.4f} |" in rows[3]


def test_advise_says_what_following_the_load_brings(
    trace_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = tmp_path / "advice.json"
    assert main(["placement", "advise", trace_file, "--ranks", "4", "--json", str(found)]) == 0
    (advice,) = json.loads(found.read_text())
    assert advice["saved_share"] > 0.05
    printed = capsys.readouterr().out
    assert f"saves {advice['saved_share']:.2%} of step time" in printed
    assert "| enough |" in printed


def test_a_saved_placement_and_settings_are_where_it_starts(
    trace_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = ExpertPlacement.identity(
        num_layers=NUM_LAYERS, num_logical_experts=NUM_EXPERTS, num_ranks=3, num_redundant_experts=2
    )
    start.save(tmp_path / "start.json")
    words = ["placement", "simulate", trace_file, "--placement-file", str(tmp_path / "start.json")]
    words += ["--policy", "incremental", "--json", str(tmp_path / "found.json")]
    assert main([*words, "--max-incoming", "1"]) == 0
    (record,) = json.loads((tmp_path / "found.json").read_text())
    assert (record["num_ranks"], record["num_physical_experts"]) == (3, 18)
    assert 0 < max(record["moves"]) <= NUM_LAYERS * 3
    assert main([*words, "--set", "least_gain=0.9"]) == 0
    (record,) = json.loads((tmp_path / "found.json").read_text())
    assert record["num_moves"] == 0
    capsys.readouterr()


def test_routing_counts_by_domain_take_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "counts.json"
    counts = {"code": [[8, 0, 0, 0]], "law": [[0, 0, 0, 8]]}
    path.write_text(json.dumps({"model": "tiny", "num_experts": 4, "top_k": 1, "layers": [7], "counts": counts}))
    words = ["placement", "simulate", str(path), "--ranks", "2", "--places-per-rank", "2", "--policy", "frozen"]
    assert main([*words, "--json", str(tmp_path / "found.json")]) == 0
    (record,) = json.loads((tmp_path / "found.json").read_text())
    assert set(record["balancedness"]) == {0.5}
    assert "| frozen | 2 | 4 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("ending", "begins"), [("html", b"<!doctype html>"), ("png", b"\x89PNG"), ("svg", b"<?xml version")]
)
def test_plots(trace_file: str, tmp_path: Path, ending: str, begins: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / f"plot.{ending}"
    assert main(["placement", "simulate", trace_file, "--ranks", "4", "--policy", "frozen", "--plot", str(path)]) == 0
    drawn = path.read_bytes()
    assert drawn.startswith(begins)
    if ending == "html":
        assert b"<svg" in drawn
        assert capsys.readouterr().out.strip().encode() in drawn


def test_without_matplotlib_a_plot_is_refused_before_anything_is_replayed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["placement", "simulate", "no-such-trace.npz", "--plot", "p.svg"]) == 1
    assert "needs matplotlib: pip install 'moeserve[dev]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--plot", "p.bmp"], "--plot must end in .html, .png, .svg, got p.bmp"),
        (["--plot", "/no/such/folder/p.svg"], "--plot /no/such/folder/p.svg: No such file"),
        (["--policy", "greedy"], "policy must be one of incremental"),
        (["--set", "speed=9"], r"--set takes a setting of the controller (num_windows"),
        (["--set", "num_windows=1.5"], "num_windows must be a number, got '1.5'"),
        (["--set", "num_windows=0"], "num_windows and max_decisions must be at least 1"),
        (["--ranks", "4", "--places-per-rank", "3"], "12 physical experts are too few for 16"),
        (["--max-incoming", "0"], "max_incoming_per_layer_rank must be at least 1"),
        (["--replan-windows", "0"], "replan_windows must be at least 1, got 0"),
        (["--placement-file", "gone.json"], "placement file gone.json: No such file"),
        (["--json", "/no/such/folder/f.json"], "/no/such/folder/f.json: No such file"),
    ],
)
def test_mistakes_are_named_in_one_line(
    trace_file: str, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["placement", "simulate", trace_file, "--ranks", "4", "--policy", "frozen", *words]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_traces_that_hold_nothing_or_are_none_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty.jsonl"
    write_trace(empty, LoadTrace(model="m", top_k=1, moe_layer_ids=(0,), windows=()))
    assert main(["placement", "advise", str(empty)]) == 1
    assert "empty.jsonl holds no windows" in capsys.readouterr().err
    assert main(["placement", "advise", str(tmp_path / "gone.npz")]) == 1
    assert "gone.npz: No such file" in capsys.readouterr().err
