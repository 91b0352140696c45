"""Ranks that die and come back: streams go on where they were, token for token; health says what is going on."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import msgspec
import pytest

from moeserve.engine.sampling_params import SamplingParams
from moeserve.testing.fake_engine import FakeEngineSettings
from moeserve.testing.fake_model import generate, hashed_token
from moeserve.testing.served_engine import RunningFrontend, run_frontend_in_thread, wait_until
from moeserve.tokenizer import Tokenizer

PROMPTS = [[5, 6, 7], [9, 10], [11] * 40, [12, 13, 14, 15]]
NUM_TOKENS = 60


@contextmanager
def engine_process(running: RunningFrontend, dp_size: int, vocab_size: int) -> Iterator[subprocess.Popen[bytes]]:
    """All replicas in a process that can be killed like ranks."""
    settings = FakeEngineSettings(
        frontend_address=running.engine_address,
        dp_size=dp_size,
        max_model_len=512,
        vocab_size=vocab_size,
        step_time_s=0.02,
    )
    command = [sys.executable, "-m", "moeserve.testing.fake_engine", msgspec.json.encode(settings).decode()]
    process = subprocess.Popen(command)
    try:
        yield process
    finally:
        process.kill()
        process.wait(10.0)


def expected_text(tokenizer: Tokenizer, prompt: list[int]) -> str:
    ids, _ = generate(prompt, SamplingParams(max_tokens=NUM_TOKENS), hashed_token(tokenizer.vocab_size))
    return tokenizer.decode(ids)


@pytest.mark.parametrize("dp_size", [1, 2])
def test_streams_go_on_when_the_ranks_are_started_again(
    tokenizer_folder: Path, tokenizer: Tokenizer, dp_size: int
) -> None:
    settings = {"parallel": {"data_parallel_size": dp_size}}
    vocab_size = tokenizer.vocab_size
    with (
        run_frontend_in_thread(tokenizer_folder, settings) as running,
        httpx.Client(base_url=running.url, timeout=60.0) as http,
        engine_process(running, dp_size, vocab_size) as engine,
    ):
        running.wait_ready()
        assert http.get("/health").status_code == 200
        body = {"prompt": PROMPTS, "max_tokens": NUM_TOKENS, "stream": True, "logprobs": 0}
        body["stream_options"] = {"include_usage": True}
        with http.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            events = [next(lines) for _ in range(40)]
            engine.kill()
            engine.wait(10.0)
            wait_until(lambda: http.get("/health").status_code == 503)
            refused = http.post("/v1/completions", json={"prompt": "x"})
            assert refused.status_code == 503
            with engine_process(running, dp_size, vocab_size):
                events += list(lines)
                wait_until(lambda: http.get("/health").status_code == 200)
                assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 200
                metrics = http.get("/metrics").text
    chunks = [msgspec.json.decode(event[6:]) for event in events if event.startswith("data: {")]
    assert all("error" not in chunk for chunk in chunks)
    for index, prompt in enumerate(PROMPTS):
        parts = [c["choices"][0] for c in chunks if c["choices"] and c["choices"][0]["index"] == index]
        assert "".join(part["text"] for part in parts) == expected_text(tokenizer, prompt)
        assert sum(len(part["logprobs"]["tokens"]) for part in parts if part["logprobs"]) == NUM_TOKENS
    assert chunks[-1]["usage"]["completion_tokens"] == NUM_TOKENS * len(PROMPTS)
    assert "moeserve:resumed_requests_total 4.0" in metrics


def test_a_whole_answer_survives_two_restarts(tokenizer_folder: Path, tokenizer: Tokenizer) -> None:
    vocab_size = tokenizer.vocab_size
    with (
        run_frontend_in_thread(tokenizer_folder) as running,
        httpx.Client(base_url=running.url, timeout=60.0) as http,
    ):
        body = {"prompt": PROMPTS[2], "max_tokens": NUM_TOKENS, "echo": True, "logprobs": 1, "stream": True}
        with engine_process(running, 1, vocab_size) as engine:
            running.wait_ready()
            with http.stream("POST", "/v1/completions", json=body) as stream:
                lines = stream.iter_lines()
                text = ""
                for _ in range(2):
                    text += "\n".join(next(lines) for _ in range(10)) + "\n"
                    engine.kill()
                    engine.wait(10.0)
                    engine = subprocess.Popen(engine.args)  # noqa: PLW2901
                try:
                    text += "\n".join(lines)
                finally:
                    engine.kill()
                    engine.wait(10.0)
    chunks = [msgspec.json.decode(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    choices = [chunk["choices"][0] for chunk in chunks]
    prompt_text = tokenizer.decode(PROMPTS[2])
    assert "".join(choice["text"] for choice in choices) == prompt_text + expected_text(tokenizer, PROMPTS[2])
    tokens = [token for choice in choices if choice["logprobs"] for token in choice["logprobs"]["tokens"]]
    assert len(tokens) == len(PROMPTS[2]) + NUM_TOKENS


def test_a_client_may_leave_while_the_ranks_are_down(tokenizer_folder: Path, tokenizer: Tokenizer) -> None:
    vocab_size = tokenizer.vocab_size
    with (
        run_frontend_in_thread(tokenizer_folder) as running,
        httpx.Client(base_url=running.url, timeout=60.0) as http,
    ):
        with engine_process(running, 1, vocab_size) as engine:
            running.wait_ready()
            body = {"prompt": PROMPTS, "max_tokens": 400, "stream": True}
            with http.stream("POST", "/v1/completions", json=body) as stream:
                lines = stream.iter_lines()
                next(lines)
                engine.kill()
                engine.wait(10.0)
                wait_until(lambda: http.get("/health").status_code == 503)
            wait_until(lambda: running.frontend.num_unfinished == 0)
        with engine_process(running, 1, vocab_size):
            wait_until(lambda: http.get("/health").status_code == 200)
            answer = http.post("/v1/completions", json={"prompt": PROMPTS[0], "max_tokens": NUM_TOKENS})
            assert answer.json()["choices"][0]["text"] == expected_text(tokenizer, PROMPTS[0])
            assert "moeserve:resumed_requests_total 0.0" in http.get("/metrics").text
