"""Requests that are refused for what the server is or does now: key, size, queue, replicas, failures."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
import zmq

from moeserve.engine.messages import AddRequest, ReplicaReady, StepOutputs, ToReplica, replica_identity
from moeserve.engine.outputs import FinishReason, ReplicaStats, RequestOutput
from moeserve.ids import DpRank
from moeserve.testing.served_engine import (
    RunningFrontend,
    StepGate,
    run_frontend_in_thread,
    serve_fake_engine,
    wait_until,
)
from moeserve.testing.tokenizer_files import write_tokenizer
from moeserve.tokenizer import Tokenizer

COMPLETION = {"prompt": "hi"}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


@pytest.fixture
def guarded(tokenizer_folder: Path) -> Iterator[RunningFrontend]:
    settings = {"server": {"api_key": "secret", "max_body_bytes": 4096}}
    with run_frontend_in_thread(tokenizer_folder, settings) as running:
        yield running


def test_api_key(guarded: RunningFrontend) -> None:
    with httpx.Client(base_url=guarded.url) as http:
        for given in (None, "Bearer wrong", "secret", "Basic secret", "Bearer"):
            headers = {} if given is None else {"authorization": given}
            response = http.get("/v1/models", headers=headers)
            assert error_of(response, 401)["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
            error_of(http.post("/tokenize", json={"prompt": "x"}, headers=headers), 401)
        assert http.get("/v1/models", headers={"authorization": "Bearer secret"}).status_code == 200
        assert http.get("/metrics").status_code == 200
        assert http.get("/version").status_code == 200
        assert http.get("/health").status_code == 503  # open, but there are no replicas
    with (
        openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()


def test_body_too_large_by_its_length(guarded: RunningFrontend) -> None:
    response = httpx.post(
        f"{guarded.url}/tokenize", json={"prompt": "x" * 5000}, headers={"authorization": "Bearer secret"}
    )
    error = error_of(response, 413)
    assert "at most 4096 bytes" in error["message"]


def test_body_too_large_in_chunks(guarded: RunningFrontend) -> None:
    def chunks() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(5):
            yield b"x" * 1000
        yield b'"}'

    headers = {"authorization": "Bearer secret", "content-type": "application/json"}
    response = httpx.post(f"{guarded.url}/tokenize", content=chunks(), headers=headers)
    assert "at most 4096 bytes" in error_of(response, 413)["message"]


def test_a_refused_body_is_not_waited_for(guarded: RunningFrontend) -> None:
    host, port = guarded.url.removeprefix("http://").split(":")
    head = (
        f"POST /tokenize HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer secret\r\nContent-Length: 999999999\r\n\r\n"
    )
    with socket.create_connection((host, int(port)), timeout=10.0) as connection:
        connection.sendall(head.encode())
        assert b" 413 " in connection.recv(4096)


def test_no_replicas_is_503(guarded: RunningFrontend) -> None:
    headers = {"authorization": "Bearer secret"}
    response = httpx.post(f"{guarded.url}/v1/completions", json=COMPLETION, headers=headers)
    assert error_of(response, 503)["code"] == "engine_not_ready"
    assert response.headers["retry-after"] == "1"
    assert error_of(httpx.get(f"{guarded.url}/health"), 503)["code"] == "engine_not_ready"


def test_full_queue_is_429(tokenizer_folder: Path, tokenizer: Tokenizer) -> None:
    gate = StepGate()
    settings = {"server": {"max_num_waiting": 4}}
    with (
        serve_fake_engine(tokenizer_folder, settings, vocab_size=tokenizer.vocab_size, on_step=gate) as running,
        httpx.Client(base_url=running.url, timeout=30.0) as http,
    ):
        gate.close()
        with http.stream("POST", "/v1/completions", json={**COMPLETION, "n": 3, "stream": True}) as stream:
            gate.wait_reached()
            refused = http.post("/v1/completions", json={**COMPLETION, "n": 2})
            gate.open()
            assert stream.read().endswith(b"[DONE]\n\n")
        error = error_of(refused, 429)
        assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
        assert "3 of 4" in error["message"]
        assert refused.headers["retry-after"] == "1"
        assert http.post("/v1/completions", json={**COMPLETION, "n": 4}).status_code == 200
        never = error_of(http.post("/v1/completions", json={**COMPLETION, "n": 5}), 400)
        assert "at most 4" in never["message"]


def test_a_kv_cache_smaller_than_the_context_is_the_limit(tokenizer_folder: Path, tokenizer: Tokenizer) -> None:
    with serve_fake_engine(tokenizer_folder, vocab_size=tokenizer.vocab_size, num_blocks=4) as running:
        error = error_of(httpx.post(f"{running.url}/v1/completions", json={"prompt": [5] * 100}), 400)
        assert "between 1 and 63 tokens" in error["message"]
        assert httpx.get(f"{running.url}/v1/models").json()["data"][0]["max_model_len"] == 64


@contextmanager
def refusing_replica(address: str) -> Iterator[None]:
    """Gives one token of every request, then an error."""
    stats = ReplicaStats(
        num_running=0,
        num_waiting=0,
        num_blocks=64,
        num_free_blocks=64,
        num_preemptions=0,
        num_prefix_queried_tokens=0,
        num_prefix_hit_tokens=0,
        step_id=0,
    )
    ready = ReplicaReady(dp_rank=DpRank(0), incarnation="only", num_blocks=64, block_size=16, max_model_len=512)
    stopping = threading.Event()

    def run() -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.IDENTITY, replica_identity(DpRank(0)))
            dealer.connect(address)
            dealer.send(b"not msgpack")
            dealer.send(msgspec.msgpack.encode(ready))
            while not stopping.is_set():
                if not dealer.poll(20):
                    continue
                message = msgspec.msgpack.decode(dealer.recv(), type=ToReplica)
                if isinstance(message, AddRequest):
                    news = [
                        RequestOutput(request_id=message.request_id, new_token_ids=[70]),
                        RequestOutput(
                            request_id=message.request_id,
                            new_token_ids=[],
                            finish_reason=FinishReason.ERROR,
                            error="the engine is tired",
                        ),
                    ]
                    for output in news:
                        step = StepOutputs(dp_rank=DpRank(0), outputs=[output], stats=stats)
                        dealer.send(msgspec.msgpack.encode(step))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield
    stopping.set()
    thread.join(10.0)


def test_engine_error_before_and_in_a_stream(tokenizer_folder: Path) -> None:
    with (
        run_frontend_in_thread(tokenizer_folder) as running,
        refusing_replica(running.engine_address),
        httpx.Client(base_url=running.url, timeout=30.0) as http,
    ):
        running.wait_ready()
        error = error_of(http.post("/v1/completions", json=COMPLETION), 500)
        assert (error["code"], error["message"]) == ("engine_error", "the engine is tired")
        streamed = http.post("/v1/chat/completions", json={**CHAT, "stream": True})
        assert streamed.status_code == 200
        events = [line for line in streamed.text.splitlines() if line]
        assert json.loads(events[-1].removeprefix("data: "))["error"]["message"] == "the engine is tired"
        assert all("error" not in json.loads(event.removeprefix("data: ")) for event in events[:-1])
        with (
            openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client,
            pytest.raises(openai.APIError, match="tired"),
        ):
            list(client.completions.create(model="demo", prompt="x", stream=True))


def test_unexpected_error_is_500_without_its_stack(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def explode(*args: object, **kwargs: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr("moeserve.server.routes.tokenization.encode", explode)
    error = error_of(http.post("/tokenize", json={"prompt": "x"}), 500)
    assert (error["type"], error["message"]) == ("internal_server_error", "internal error")
    # uvicorn logs it when the answer is already out.
    wait_until(lambda: any(record.exc_info and "secret detail" in str(record.exc_info[1]) for record in caplog.records))


def test_unexpected_error_in_a_stream_is_an_event(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def explode(*args: object, **kwargs: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr("moeserve.server.chat_rendering.ChatRenderer.events", explode)
    response = http.post("/v1/chat/completions", json={**CHAT, "stream": True})
    assert response.status_code == 200
    assert "secret detail" not in response.text
    assert response.text.rstrip().splitlines()[-1].startswith('data: {"error":{"message":"internal error"')
    assert any("request failed" in record.message for record in caplog.records)


def test_no_chat_template(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, chat_template=None)
    with run_frontend_in_thread(tmp_path) as running:
        error = error_of(httpx.post(f"{running.url}/v1/chat/completions", json=CHAT), 400)
        assert "no chat template" in error["message"]
