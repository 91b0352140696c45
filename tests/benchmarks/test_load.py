"""The load generator against a fake server: what it sends, how it counts tokens, and that no failure counts as good."""

import itertools
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from benchmarks.harness.load import Endpoint, Load, LoadTimes, drive

Answer = Callable[[dict[str, Any]], Sequence[str]]
"""From the body of a request to the `data:` payloads of its stream; a PermissionError becomes status 503."""
LOAD = Load(name="test", num_clients=3, prompt_tokens=5, output_tokens=4, requests_per_client=2)


class _Handler(BaseHTTPRequestHandler):
    answer: Answer

    def handle(self) -> None:
        with suppress(ConnectionError):  # a client that has seen enough hangs up
            super().handle()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            payloads = type(self).answer(body)
        except PermissionError as refusal:
            self.send_error(503, str(refusal))
            return
        self.send_response(200)
        self.end_headers()
        for payload in payloads:
            self.wfile.write(f"data: {payload}\n\n".encode())

    def log_message(self, *_: object) -> None:
        """Quiet."""


@contextmanager
def _fake_server(answer: Answer) -> Iterator[str]:
    handler = type("Handler", (_Handler,), {"answer": staticmethod(answer)})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _usage_chunk(prompt_tokens: int, completion_tokens: int, text: str = "a") -> str:
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return json.dumps({"choices": [{"text": text}], "usage": usage})


def _drive(answer: Answer, load: Load = LOAD) -> LoadTimes:
    prompts = load.prompts(vocab_size=50, seed=0)
    with _fake_server(answer) as url:
        endpoint = Endpoint(url=url, model="m", extra_body={"stream_options": {"more": True}, "own": 1})
        return drive(endpoint, load, prompts, timeout_s=30.0)


def _good(body: dict[str, Any]) -> list[str]:
    return [_usage_chunk(len(body["prompt"]), n + 1) for n in range(body["max_tokens"])] + ["[DONE]"]


def test_every_prompt_is_sent_once_and_all_clients_at_once() -> None:
    bodies: list[dict[str, Any]] = []
    all_here = threading.Barrier(LOAD.num_clients)

    def answer(body: dict[str, Any]) -> list[str]:
        bodies.append(body)
        all_here.wait(timeout=20.0)  # answers nobody until the request of every client is here
        return _good(body)

    times = _drive(answer)
    assert sorted(body["prompt"] for body in bodies) == sorted(LOAD.prompts(vocab_size=50, seed=0))
    for body in bodies:
        assert (body["model"], body["max_tokens"], body["ignore_eos"], body["temperature"]) == ("m", 4, True, 0)
        assert body["stream_options"] == {"include_usage": True, "more": True}
        assert body["own"] == 1
    assert [len(request) for request in times.token_times] == [4] * 6
    assert all(list(request) == sorted(request) and request[0] > 0 for request in times.token_times)
    assert times.seconds >= max(request[-1] for request in times.token_times)


def _in_lumps(body: dict[str, Any]) -> list[str]:
    """Three tokens at once, a chunk that brings none, the last token."""
    return [_usage_chunk(len(body["prompt"]), n) for n in (3, 3, 4)]


def _as_llama_cpp(body: dict[str, Any]) -> list[str]:
    chunks = [json.dumps({"choices": [{"text": "a"}], "timings": {"predicted_n": n + 1}}) for n in range(4)]
    return [*chunks, _usage_chunk(len(body["prompt"]), 4, text="")]


def _usage_at_the_end_only(body: dict[str, Any]) -> list[str]:
    chunks = [json.dumps({"choices": [{"text": "a"}], "usage": None})] * 4
    return [*chunks, _usage_chunk(len(body["prompt"]), 4, text="")]


@pytest.mark.parametrize("answer", [_in_lumps, _as_llama_cpp, _usage_at_the_end_only])
def test_tokens_are_counted_by_what_the_server_says(answer: Answer) -> None:
    assert [len(request) for request in _drive(answer).token_times] == [4] * 6


def _refuses(body: dict[str, Any]) -> list[str]:
    raise PermissionError("busy")


FAILURES: dict[str, tuple[Answer, str]] = {
    "refused": (_refuses, "503"),
    "too few tokens": (lambda body: _good(body | {"max_tokens": 3}), r"asked for 5 \+ 4 tokens, got 5 \+ 3"),
    "too many tokens": (lambda body: _good(body | {"max_tokens": 5}), r"got 5 \+ 5"),
    "a shorter prompt": (lambda body: _good(body | {"prompt": [1, 2]}), r"got 2 \+ 4"),
    "cut short": (lambda body: ['{"choices": [{"text": "a"}]}'], "without a usage"),
    "nothing": (lambda body: [], "without a usage"),
    "an error in the stream": (lambda body: [*_good(body)[:2], '{"error": "out of blocks"}'], "out of blocks"),
    "half a chunk": (lambda body: [*_good(body)[:2], '{"choices": [{'], "not a chunk"),
    "a usage without counts": (lambda body: ['{"choices": [], "usage": {"total": 9}}'], "not a chunk"),
    "counts that skip the prompt": (lambda body: ['{"usage": {"completion_tokens": 4}}'], r"got None \+ 4"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_is_never_timed(name: str) -> None:
    answer, reason = FAILURES[name]
    with pytest.raises(RuntimeError, match=reason):
        _drive(answer)


def test_one_failed_request_among_good_ones_fails_the_load() -> None:
    count = itertools.count()
    with pytest.raises(RuntimeError, match="503"):
        _drive(lambda body: _refuses(body) if next(count) == LOAD.num_requests - 1 else _good(body))


def test_a_server_that_is_not_there_is_a_failure() -> None:
    with _fake_server(_good) as url:
        gone = url
    with pytest.raises(OSError):
        drive(Endpoint(url=gone, model="m", extra_body={}), LOAD, LOAD.prompts(vocab_size=50, seed=0))


def test_prompts_share_no_prefix_and_repeat_with_their_seed() -> None:
    load = Load(name="many", num_clients=40, prompt_tokens=16, output_tokens=1, requests_per_client=3)
    first, again, other = (load.prompts(vocab_size=8192, seed=seed) for seed in (1, 1, 2))
    assert first == again
    heads = {tuple(prompt[:3]) for prompt in (*first, *other)}
    assert len(heads) == 240
    assert all(len(prompt) == 16 and min(prompt) >= 3 and max(prompt) < 8192 for prompt in first)
