"""`moeserve placement` against a running server: what is printed, and what is ordered."""

import json
import time
from pathlib import Path

import pytest

from moeserve.testing.served_engine import wait_until
from moeserve.testing.served_placement import SKEWED_LE, ServedPlacement, serve_placement
from moeserve.testing.tokenizer_files import write_tokenizer
from moeserve_launch.cli import main
from moeserve_placement.load import read_trace

KEY = ("--admin-key", "admin-key")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return folder


def test_an_operator_goes_through_a_migration(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def say(server: ServedPlacement, *words: str) -> str:
        assert main(["placement", *words, server.running.url, *KEY]) == 0
        return capsys.readouterr().out

    with serve_placement(folder, placement={"policy": "frozen"}) as server:
        assert "observing, frozen" in say(server, "show")
        server.serve(SKEWED_LE, 4)
        assert "worst" in say(server, "load", "--phase", "decode", "--window", "10")
        plan = say(server, "plan")
        assert "worth it: gains" in plan
        plan_id = plan.split()[1].rstrip(":")
        assert f"moeserve placement apply {plan_id} {server.running.url}" in plan
        assert "epoch" in say(server, "apply", plan_id)
        wait_until(lambda: server.show()["state"] == "settling")
        shown = say(server, "show")
        assert "settling, frozen: applied by hand" in shown
        assert "epoch 1: 16 experts on 20 places of 4 ranks, 3 MoE layers" in shown
        say(server, "rollback")
        wait_until(lambda: server.show()["map"]["epoch"] == 2)
        assert json.loads(say(server, "thaw", "--json"))["frozen"] is False
        assert "frozen" in say(server, "freeze")
        assert "| layer |" in say(server, "advise")


def test_an_operator_pins_experts_and_reads_what_was_decided(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def say(server: ServedPlacement, *words: str) -> str:
        assert main(["placement", *words, server.running.url, *KEY]) == 0
        return capsys.readouterr().out

    with serve_placement(folder) as server:
        assert say(server, "pins") == "no pins\n"
        assert say(server, "decisions") == "nothing was decided yet\n"
        said = say(server, "pins", "--pin", "15:0:3", "--pin", "2:0")
        assert said == "expert 15 on rank 0 in layer 3\nexpert 2 on rank 0 in every MoE layer\n"
        server.serve(SKEWED_LE)
        wait_until(lambda: server.show()["map"]["epoch"] == 1)
        assert 15 in server.ranks.held.table_LP[1, :5]
        assert json.loads(say(server, "pins", "--json")) == server.show()["pins"]
        server.serve(SKEWED_LE, 4)
        lines = say(server, "decisions").splitlines()
        assert len(lines) == len(server.decisions())
        assert "epoch 0  migrate: pins, spread or groups demand it; " in lines[0]
        assert say(server, "decisions", "--limit", "2").splitlines() == lines[-2:]
        assert say(server, "pins", "--clear") == "no pins\n"
        assert server.show()["pins"] == []


@pytest.mark.parametrize("pin", ["7", "7:", "7:x", "7:0:1:2", "-7:0"])
def test_pins_that_cannot_be_read_are_refused(pin: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["placement", "pins", f"--pin={pin}"])
    assert caught.value.code == 2
    assert "EXPERT:RANK:LAYER" in capsys.readouterr().err


@pytest.mark.parametrize("ending", ["npz", "jsonl"])
def test_what_a_server_has_seen_is_replayed_without_it(
    ending: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    map_file, loads = tmp_path / "map.json", tmp_path / f"loads.{ending}"
    with serve_placement(folder, placement={"policy": "frozen"}) as server:
        server.serve(SKEWED_LE, 10)
        url = server.running.url
        assert main(["placement", "export", url, *KEY, "--map", str(map_file), "--loads", str(loads)]) == 0
        assert f"{loads}: 10 load windows" in capsys.readouterr().out
        assert main(["placement", "export", url, *KEY]) == 0
        assert json.loads(capsys.readouterr().out) == json.loads(map_file.read_text())
        seen = server.http.get("/v1/placement/load", params={"window": 1e6}).json()
    trace = read_trace(loads)
    assert (trace.top_k, trace.moe_layer_ids) == (2, (1, 3, 5))
    total_LE = sum(window.expert_load_LE for window in trace.windows)
    assert total_LE.tolist() == [layer["expert_load"] for layer in seen["layers"]]
    assert abs(trace.windows[-1].end_s - time.time()) < 3600.0
    replay = ["placement", "advise", str(loads), "--placement-file", str(map_file), "--set", "num_windows=2"]
    assert main(replay) == 0
    assert "| layer |" in capsys.readouterr().out


def test_files_that_cannot_be_written_are_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["placement", "export", "http://127.0.0.1:1", "--loads", "loads.csv"]) == 1
    assert "--loads must end in .npz or .jsonl, got loads.csv" in capsys.readouterr().err
    with serve_placement(folder) as server:
        nowhere = str(tmp_path / "nowhere" / "map.json")
        assert main(["placement", "export", server.running.url, *KEY, "--map", nowhere]) == 1
        assert f"{nowhere}: No such file" in capsys.readouterr().err


def test_refusals_are_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serve_placement(folder) as server:
        url = server.running.url
        for words, said in (
            (("apply", "7", url, *KEY), "409 plan 7 is not the newest"),
            (("freeze", url), "401 missing admin key"),
            (("load", url), "409 no load has been seen yet"),
            (("export", url, "--loads", "x.npz"), "409 no load has been seen yet"),
            (("pins", url, *KEY, "--pin", "99:0"), "400 pins[0].logical_expert_id"),
            (("show", "http://127.0.0.1:1"), "no server at http://127.0.0.1:1"),
        ):
            assert main(["placement", *words]) == 1
            assert said in capsys.readouterr().err
