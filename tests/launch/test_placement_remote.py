"""`moeserve placement` against a running server: what is printed, and what is ordered."""

import json
from pathlib import Path

import pytest

from moeserve.testing.served_engine import wait_until
from moeserve.testing.served_placement import SKEWED_LE, ServedPlacement, serve_placement
from moeserve.testing.tokenizer_files import write_tokenizer
from moeserve_launch.cli import main

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


def test_refusals_are_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serve_placement(folder) as server:
        url = server.running.url
        for words, said in (
            (("apply", "7", url, *KEY), "409 plan 7 is not the newest"),
            (("freeze", url), "401 missing admin key"),
            (("load", url), "409 no load has been seen yet"),
            (("show", "http://127.0.0.1:1"), "no server at http://127.0.0.1:1"),
        ):
            assert main(["placement", *words]) == 1
            assert said in capsys.readouterr().err
