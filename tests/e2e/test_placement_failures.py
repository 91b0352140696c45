"""A rank dies in the middle of a migration: streams go on to the token, the old map serves, and plans can be made."""

import json
from typing import Any

import httpx
import pytest

from moeserve.testing.served_engine import wait_until
from moeserve.testing.server import RunningServer, running_server

pytestmark = pytest.mark.e2e

BODY = {"model": "demo", "prompt": "The captain", "max_tokens": 400, "ignore_eos": True, "seed": 11}
PIN = {"layer": None, "logical_expert_id": 15, "rank": 0}
"""Rank 0 fetches it from rank 1, over replicas of experts that rank 1 has as well: nothing comes to rank 1."""


def serve() -> Any:
    return running_server(
        *("demo", "-dp", "2", "--dtype", "float32", "--num-redundant-experts", "auto"),
        # The first copy lasts for longer than the test.
        *("--set", "placement.window_s=0.1", "--set", "placement.copy_bytes_per_s=1"),
    )


def kill_rank_0_when_rank_1_has_staged(server: RunningServer, http: httpx.Client) -> None:
    assert http.put("/v1/placement/pins", json={"pins": [PIN]}).status_code == 200

    def waits_for_rank_0() -> bool:
        change = http.get("/v1/placement").json()["change"]
        return change is not None and change["waiting_for_ranks"] == [0]

    wait_until(waits_for_rank_0)
    (rank_0,) = [process for process in server.ranks() if process.environ()["RANK"] == "0"]
    rank_0.kill()


def test_a_rank_killed_between_staging_and_commit() -> None:
    with serve() as server, httpx.Client(base_url=server.url, timeout=120) as http:
        expected = http.post("/v1/completions", json=BODY).json()["choices"][0]["text"]
        text, num_chunks = "", 0
        with http.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as response:
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                text += json.loads(line[6:])["choices"][0]["text"]
                num_chunks += 1
                if num_chunks == 5:
                    kill_rank_0_when_rank_1_has_staged(server, http)
        assert text == expected
        num_redundant = http.get("/v1/placement").json()["map"]["num_physical_experts"] - 16
        assert f"redundant experts (auto): {num_redundant} in each MoE layer, " in "\n".join(server.lines)
        wait_until(lambda: http.get("/v1/placement").json()["reason"].startswith("held off for "))
        shown = http.get("/v1/placement").json()
        assert (shown["state"], shown["map"]["epoch"], shown["change"]) == ("observing", 0, None)
        assert shown["failures"] == {"ranks started again": 1}
        assert shown["pins"] == [PIN]
        acts = [each for each in http.get("/v1/placement/decisions").json()["decisions"] if each["outcome"]]
        assert [(act["cause"], act["outcome"]["state"], act["outcome"]["reason"]) for act in acts] == [
            ("rules", "aborted", "ranks started again")
        ]
        plan = http.post("/v1/placement/plan").json()
        assert plan["worth"]
        assert {move["logical_expert_id"] for move in plan["moves"]} == {15}
