"""/v1/placement as clients and operators use it."""

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from moeserve.server.placement import loads
from moeserve.testing.fake_migrators import FakeMigrators
from moeserve.testing.served_engine import run_frontend_in_thread, serve_fake_engine, wait_until
from moeserve.testing.served_placement import NUM_RANKS, SKEWED_LE, START, serve_placement
from moeserve.tokenizer import Tokenizer
from moeserve_placement import ExpertPlacement

ORDERS = [
    ("POST", "plan", None),
    ("POST", "apply", {"plan_id": 0}),
    ("POST", "freeze", None),
    ("POST", "thaw", None),
    ("POST", "rollback", None),
    ("PUT", "pins", {"pins": []}),
]


def test_an_operator_plans_applies_and_rolls_back(tokenizer_folder: Path) -> None:
    with serve_placement(tokenizer_folder, placement={"policy": "frozen"}) as server:
        assert server.order("plan").status_code == 409
        server.serve(SKEWED_LE, 4)
        plan = server.order("plan").json()
        assert plan["worth"]
        assert len(plan["moves"]) == plan["prediction"]["num_moves"] > 0
        assert plan["prediction"]["num_bytes"] == len(plan["moves"]) * server.ranks.shape.expert_bytes
        assert {move["layer"] for move in plan["moves"]} <= {1, 3, 5}
        assert server.ranks.held.epoch == 0
        newer = server.order("plan").json()
        stale = server.order("apply", {"plan_id": plan["plan_id"]})
        assert stale.status_code == 409
        assert "plan again" in stale.json()["error"]["message"]
        assert server.order("apply", {"plan_id": newer["plan_id"]}).status_code == 200
        wait_until(lambda: server.ranks.held.epoch == 1)
        server.wait_for_state("settling")
        assert server.order("rollback").status_code == 200
        wait_until(lambda: server.ranks.held.epoch == 2)
        assert (server.ranks.held.table_LP == START.physical_to_logical_LP).all()
        wait_until(lambda: server.show()["map"]["epoch"] == 2)
        back, migrated = server.acts()
        assert (back["action"], back["cause"]) == ("roll back", "operator")
        assert migrated["outcome"]["state"] == "rolled back"
        assert server.order("rollback").status_code == 409


def test_an_operator_orders_the_map_of_another_policy(tokenizer_folder: Path) -> None:
    with serve_placement(tokenizer_folder, placement={"policy": "frozen"}) as server:
        server.serve(SKEWED_LE, 4)
        ours, theirs = server.order("plan").json(), server.order("plan", {"policy": "eplb-global"}).json()
        assert theirs["prediction"]["num_moves"] > ours["prediction"]["num_moves"]
        assert server.order("apply", {"plan_id": theirs["plan_id"]}).status_code == 200
        wait_until(lambda: server.ranks.held.epoch == 1)
        server.wait_for_state("settling")
        again = server.order("plan", {"policy": "eplb-global"}).json()
        assert (again["worth"], again["moves"]) == (False, [])


def test_pins_move_replicas_to_where_they_must_be(tokenizer_folder: Path) -> None:
    with serve_placement(tokenizer_folder) as server:
        pins = [{"logical_expert_id": 15, "rank": 0, "layer": 3}]
        answer = server.http.put("/v1/placement/pins", json={"pins": pins})
        assert answer.json()["pins"] == pins
        server.serve(SKEWED_LE)
        wait_until(lambda: server.ranks.held.epoch == 1)
        assert 15 in server.ranks.held.table_LP[1, :5]
        changed = (server.ranks.held.table_LP != START.physical_to_logical_LP).any(axis=1)
        assert changed.tolist() == [False, True, False]


def test_the_exported_map_starts_a_server(tokenizer_folder: Path, tmp_path: Path) -> None:
    with serve_placement(tokenizer_folder) as server:
        server.serve(SKEWED_LE, 4)
        wait_until(lambda: (server.show()["map"]["epoch"], server.ranks.held.epoch) == (1, 1))
        (tmp_path / "map.json").write_bytes(server.http.get("/v1/placement/export").content)
        loaded = ExpertPlacement.load(tmp_path / "map.json")
        assert loaded.physical_to_logical_LP.tolist() == server.ranks.held.table_LP.tolist()
        assert (loaded.epoch, loaded.num_ranks) == (1, NUM_RANKS)


def test_loads_are_those_that_the_replicas_reported(tokenizer_folder: Path) -> None:
    with serve_placement(tokenizer_folder, dp_size=4, placement={"policy": "frozen"}) as server:
        assert server.http.get("/v1/placement/load").status_code == 409
        load_LE = server.rng.multinomial(3000, SKEWED_LE)
        server.ranks.report(load_LE)
        wait_until(lambda: server.num_seen() == 1)
        both = server.http.get("/v1/placement/load").json()
        assert [layer["expert_load"] for layer in both["layers"]] == (4 * load_LE).tolist()
        assert [layer["layer"] for layer in both["layers"]] == [1, 3, 5]
        parts = [
            server.http.get("/v1/placement/load", params={"phase": phase}).json() for phase in ("prefill", "decode")
        ]
        assert sum(part["num_tokens"] for part in parts) == both["num_tokens"] == 4 * 1500
        assert [layer["expert_load"] for layer in parts[0]["layers"]] == (4 * (load_LE // 3)).tolist()
        rank_LR = np.array([layer["rank_load"] for layer in both["layers"]])
        assert rank_LR.sum(axis=1) == pytest.approx(4 * 3000)
        assert both["layers"][0]["balancedness"] == pytest.approx(rank_LR[0].mean() / rank_LR[0].max())
        assert both["balancedness_worst"] < both["floor"] < 1
        assert server.http.get("/v1/placement/load", params={"phase": "noon"}).status_code == 400
        bad = server.http.get("/v1/placement/load", params={"window": "-1"})
        assert bad.json()["error"]["param"] == "window"


def test_a_trace_holds_the_windows_that_are_kept(tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "MAX_HISTORY_WINDOWS", 3)
    with serve_placement(tokenizer_folder, placement={"policy": "frozen"}) as server:
        assert server.http.get("/v1/placement/load/trace").status_code == 409
        server.serve(SKEWED_LE, 5)
        lines = server.http.get("/v1/placement/load/trace").text.splitlines()
        assert [json.loads(line)["phase"] for line in lines[1:]] == ["prefill", "decode"] * 3
        assert server.http.get("/v1/placement/load/trace", params={"windows": 1}).text.splitlines()[1:] == lines[-2:]
        bad = server.http.get("/v1/placement/load/trace", params={"windows": 0})
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "windows")


def test_a_late_replica_is_not_waited_for(tokenizer_folder: Path) -> None:
    with serve_placement(tokenizer_folder, placement={"window_s": 0.05, "policy": "frozen"}) as server:
        server.ranks.report(server.rng.multinomial(3000, SKEWED_LE), replicas=range(1))
        wait_until(lambda: server.num_seen() == 1)
        assert server.http.get("/v1/placement/load").json()["num_tokens"] == 1500


def test_advice_replays_what_was_seen(tokenizer_folder: Path) -> None:
    with serve_placement(tokenizer_folder, placement={"policy": "frozen"}) as server:
        server.serve(SKEWED_LE)
        assert server.http.get("/v1/placement/advice").status_code == 409
        server.serve(SKEWED_LE, 11)
        advice = server.http.get("/v1/placement/advice").json()
        assert advice["lost_share_followed"] < advice["lost_share_frozen"]
        assert advice["first_moves"] > 0
        assert [layer["layer"] for layer in advice["layers"]] == [1, 3, 5]
        assert "| layer |" in advice["table"]


def answers(http: httpx.Client, authorization: str | None) -> set[int]:
    """Statuses of all orders."""
    headers = {} if authorization is None else {"Authorization": authorization}
    return {
        http.request(method, f"/v1/placement/{path}", json=body, headers=headers).status_code
        for method, path, body in ORDERS
    }


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, {None: 409, "Bearer x": 409}),
        ({"api_key": "user"}, {None: 401, "Bearer x": 401, "Bearer user": 409}),
        ({"admin_key": "admin"}, {None: 401, "Bearer x": 403, "Bearer admin": 409}),
        (
            {"admin_key": "admin", "api_key": "user"},
            {None: 401, "Bearer x": 401, "Bearer user": 403, "Bearer admin": 409},
        ),
    ],
    ids=["no keys", "api key", "admin key", "both"],
)
def test_orders_need_the_admin_key_when_one_is_set(
    tokenizer_folder: Path, keys: dict[str, str], expected: dict[str | None, int]
) -> None:
    """One rank alone is static, so an order that is let through is a conflict."""
    with (
        run_frontend_in_thread(tokenizer_folder, {"server": keys}) as running,
        httpx.Client(base_url=running.url, timeout=30.0) as http,
    ):
        for authorization, status in expected.items():
            assert answers(http, authorization) == {status}
        reader = keys.get("admin_key") or keys.get("api_key")
        headers = {} if reader is None else {"Authorization": f"Bearer {reader}"}
        shown = http.get("/v1/placement", headers=headers).json()
        assert (shown["state"], shown["map"]) == ("static", None)
        assert "one rank" in shown["reason"]


def test_bad_bodies_name_the_field(tokenizer_folder: Path) -> None:
    with serve_placement(tokenizer_folder) as server:

        def refused(path: str, body: Any, method: str = "POST") -> tuple[int, str]:
            answer = server.http.request(method, f"/v1/placement/{path}", json=body)
            return answer.status_code, answer.json()["error"]["param"]

        def pinned(**pin: Any) -> tuple[int, str]:
            return refused("pins", {"pins": [{"logical_expert_id": 1, "rank": 0}, pin]}, "PUT")

        assert refused("plan", {"policy": "frozen"}) == (400, "policy")
        assert refused("apply", {}) == (400, "plan_id")
        assert refused("apply", {"plan_id": "3"}) == (400, "plan_id")
        assert refused("apply", {"plan_id": 3, "force": True}) == (400, "force")
        assert refused("pins", {"pins": 3}, "PUT") == (400, "pins")
        assert pinned(rank=0) == (400, "pins[1].logical_expert_id")
        assert pinned(logical_expert_id=16, rank=0) == (400, "pins[1].logical_expert_id")
        assert pinned(logical_expert_id=0, rank=-1) == (400, "pins[1].rank")
        assert pinned(logical_expert_id=0, rank=0, layer=2) == (400, "pins[1].layer")
        crowd = {"pins": [{"logical_expert_id": expert, "rank": 0} for expert in range(6)]}
        assert refused("pins", crowd, "PUT") == (400, "pins")
        assert server.show()["pins"] == []
        assert server.order("apply", {"plan_id": 0}).status_code == 409


def test_one_rank_alone_is_static_and_still_counts_loads(tokenizer_folder: Path) -> None:
    alone = ExpertPlacement.identity(num_layers=2, num_logical_experts=5, num_ranks=1)
    with (
        run_frontend_in_thread(tokenizer_folder) as running,
        httpx.Client(base_url=running.url, timeout=30.0) as http,
        FakeMigrators(running.engine_address, alone, dp_size=1).running() as ranks,
    ):
        wait_until(lambda: http.get("/v1/placement").json()["map"] is not None)
        assert http.get("/v1/placement").json()["state"] == "static"
        ranks.report(np.array([[10, 0, 20, 0, 0], [6, 6, 6, 6, 6]]))
        wait_until(lambda: http.get("/v1/placement/load").status_code == 200)
        load = http.get("/v1/placement/load").json()
        assert [layer["expert_load"] for layer in load["layers"]] == [[10, 0, 20, 0, 0], [6] * 5]
        assert (load["balancedness_worst"], load["floor"]) == (1.0, 1.0)
        assert http.get("/v1/placement/advice").status_code == 409
        metrics = http.get("/metrics").text
        assert 'moeserve:placement_expert_load{expert="2",layer="1"} 3.3' in metrics
        assert 'moeserve:placement_state{state="static"} 1.0' in metrics


def test_a_model_without_experts_is_static(tokenizer_folder: Path, tokenizer: Tokenizer) -> None:
    """Its ranks say nothing about placement."""
    settings = {"parallel": {"data_parallel_size": 2}}
    with (
        serve_fake_engine(tokenizer_folder, settings, vocab_size=tokenizer.vocab_size) as running,
        httpx.Client(base_url=running.url, timeout=30.0) as http,
    ):
        assert http.get("/v1/placement").json()["state"] == "static"
        assert http.get("/v1/placement/decisions").json()["decisions"] == []
        assert http.get("/v1/placement/export").status_code == 409
