"""`moeserve serve demo -tp 2` as its users meet it: the openai client, the terminal, and a crowd that leaves midway."""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator

import httpx
import openai
import pytest

from moeserve.testing.server import RunningServer, running_server

pytestmark = pytest.mark.e2e

NUM_REQUESTS = 200


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server("demo", "-tp", "2") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="demo", prompt="The captain", max_tokens=12, temperature=0)
    assert answer.choices[0].text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12


def test_chat_and_its_stream_say_the_same(client: openai.OpenAI) -> None:
    messages: list[dict[str, str]] = [{"role": "user", "content": "Tell me of the sea."}]
    settings = {"model": "demo", "messages": messages, "max_tokens": 20, "temperature": 0.8, "seed": 7}
    whole = client.chat.completions.create(**settings)
    parts = list(client.chat.completions.create(**settings, stream=True))
    assert parts[0].choices[0].delta.role == "assistant"
    streamed = "".join(part.choices[0].delta.content or "" for part in parts)
    assert streamed == whole.choices[0].message.content
    assert parts[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_terminal_complete_prints_what_the_api_answers(server: RunningServer, client: openai.OpenAI) -> None:
    command = [sys.executable, "-m", "moeserve", "complete", "The captain", "--url", server.url]
    command += ["--max-tokens", "12", "--temperature", "0"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    answer = client.completions.create(model="demo", prompt="The captain", max_tokens=12, temperature=0)
    assert printed == answer.choices[0].text + "\n"


def test_terminal_chat_answers_each_line(server: RunningServer) -> None:
    command = [sys.executable, "-m", "moeserve", "chat", "--url", server.url, "--max-tokens", "8", "--temperature", "0"]
    talk = subprocess.run(command, input="Hello.\nAnd then?\n", check=True, capture_output=True, text=True, timeout=60)
    assert talk.stdout.count("\n") >= 2
    assert "demo" in talk.stderr


def test_terminal_names_a_server_that_is_not_there() -> None:
    command = [sys.executable, "-m", "moeserve", "complete", "x", "--url", "http://127.0.0.1:9"]
    failed = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert failed.returncode == 1
    assert failed.stderr.startswith("moeserve: error: no server at http://127.0.0.1:9")
    assert "Traceback" not in failed.stderr


async def _one_request(http: httpx.AsyncClient, index: int) -> str:
    """A request of mixed length; every third client leaves after a few chunks, or at once when it does not stream."""
    prompt = "The sea was calm. " * (1 + index * 7 % 40)
    output_tokens = 4 + index * 13 % 40
    body = {"model": "demo", "prompt": prompt, "max_tokens": output_tokens, "ignore_eos": True}
    leaves = index % 3 == 0
    if index % 2 and leaves:
        with pytest.raises(httpx.ReadTimeout):
            await http.post("/v1/completions", json=body | {"max_tokens": 600}, timeout=httpx.Timeout(60, read=0.5))
        return "left"
    if index % 2:
        response = await http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        assert response.json()["usage"]["completion_tokens"] == output_tokens
        return "whole"
    settings = body | {"stream": True, "stream_options": {"include_usage": True}}
    if leaves:
        settings["max_tokens"] = 600
    num_chunks, usage = 0, None
    async with http.stream("POST", "/v1/completions", json=settings) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            num_chunks += line.startswith("data: {")
            if leaves and num_chunks == 3:
                return "left"
            if line.startswith("data: {"):
                usage = json.loads(line[6:]).get("usage") or usage
    assert usage is not None
    assert usage["completion_tokens"] == output_tokens
    return "whole"


async def _crowd(url: str) -> list[str]:
    limits = httpx.Limits(max_connections=NUM_REQUESTS, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=240, limits=limits) as http:
        return await asyncio.gather(*(_one_request(http, index) for index in range(NUM_REQUESTS)))


def _gauge(metrics: str, name: str) -> float:
    return sum(
        float(value) for value in re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", metrics, re.MULTILINE)
    )


def test_a_crowd_of_which_a_third_leaves_loses_nothing_and_frees_every_block(server: RunningServer) -> None:
    ends = asyncio.run(_crowd(server.url))
    assert ends.count("whole") == sum(index % 3 != 0 for index in range(NUM_REQUESTS))
    with httpx.Client(base_url=server.url) as http:
        for _ in range(2000):
            metrics = http.get("/metrics").text
            names = ("moeserve:num_requests_running", "moeserve:num_requests_waiting", "moeserve:kv_cache_usage_perc")
            if all(_gauge(metrics, name) == 0 for name in names):
                break
        else:
            pytest.fail(f"requests or blocks are still held:\n{metrics}")
