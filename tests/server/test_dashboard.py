"""The page's files, its stream of events, and the drain button's calls."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from moeserve.testing.served_engine import serve_fake_engine
from moeserve.testing.served_placement import NUM_RANKS, SKEWED_LE, serve_placement
from moeserve.tokenizer import Tokenizer

BODY = {"model": "demo", "prompt": "one two", "max_tokens": 5, "ignore_eos": True}


@pytest.fixture
def server(tokenizer_folder: Path, tokenizer: Tokenizer) -> Iterator[httpx.Client]:
    """With keys; the client has the operator's."""
    settings = {"model": {"model": "demo"}, "server": {"api_key": "look", "admin_key": "turn"}}
    headers = {"Authorization": "Bearer turn"}
    with (
        serve_fake_engine(tokenizer_folder, settings, vocab_size=tokenizer.vocab_size) as running,
        httpx.Client(base_url=running.url, headers=headers, timeout=30.0) as client,
    ):
        yield client


def messages(client: httpx.Client) -> Iterator[dict[str, Any]]:
    with client.stream("GET", "/v1/events") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response.iter_lines():
            if line.startswith("data: "):
                yield json.loads(line[6:])


def health_of(stream: Iterator[dict[str, Any]], state: str) -> dict[str, Any]:
    """The first message in this state: a picture may be a second old."""
    return next(message for message in itertools.islice(stream, 4) if message["health"]["state"] == state)


def test_every_file_that_the_page_asks_for_is_there_without_a_key(server: httpx.Client) -> None:
    del server.headers["authorization"]
    page = server.get("/dashboard", follow_redirects=True)
    assert page.status_code == 200
    assert page.headers["content-security-policy"].startswith("default-src 'self'")
    assert "<script>" not in page.text
    for name in ("style.css", "icon.svg", "vendor/uPlot.min.css", "vendor/uPlot.esm.js", "js/main.js"):
        assert server.get(f"/dashboard/{name}").status_code == 200, name


@pytest.mark.parametrize("path", ["nothing.js", "../routes.py", "%2e%2e/routes.py", "js", "vendor/uPlot.LICENSE/x"])
def test_nothing_else_is_there(server: httpx.Client, path: str) -> None:
    assert server.get(f"/dashboard/{path}").status_code in (401, 404)


def test_events_need_a_key(server: httpx.Client) -> None:
    assert server.get("/v1/events", headers={"Authorization": "Bearer wrong"}).status_code == 401


def test_events_begin_with_the_history_and_count_what_is_generated(server: httpx.Client) -> None:
    stream = messages(server)
    first = next(stream)
    assert first["history"][-1] == first["point"]
    assert first["model"] == "demo"
    assert health_of(stream, "ready")["alarms"] == []
    assert server.post("/v1/completions", json=BODY).status_code == 200
    # The rates of two neighbouring seconds hold all of the request.
    rates = [next(stream)["point"]["generation_tokens_per_s"] for _ in range(2)]
    assert sum(rates) > 0
    assert next(stream)["replicas"][0]["num_blocks"] > 0


def test_a_draining_server_refuses_and_says_so_until_it_takes_requests_again(server: httpx.Client) -> None:
    assert server.post("/v1/drain", headers={"Authorization": "Bearer look"}).status_code == 403
    assert server.post("/v1/drain").json() == {"draining": True, "num_unfinished": 0}
    refused = server.post("/v1/completions", json=BODY)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert server.get("/health").status_code == 503
    assert health_of(messages(server), "draining")["alarms"] == []
    assert server.post("/v1/undrain").status_code == 200
    assert server.post("/v1/completions", json=BODY).status_code == 200
    assert server.get("/health").status_code == 200


def test_placement_is_in_the_events(tokenizer_folder: Path) -> None:
    with serve_placement(tokenizer_folder, placement={"policy": "frozen"}) as placed:
        placed.serve(SKEWED_LE, 4)
        stream = messages(placed.http)
        next(stream)
        placement = next(stream)["placement"]
        assert (placement["state"], placement["epoch"], len(placement["rank_load"])) == ("observing", 0, NUM_RANKS)
        assert 0 < placement["worst"] <= placement["balancedness"] < placement["floor"] <= 1
