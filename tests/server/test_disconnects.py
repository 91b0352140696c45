"""A client that goes away takes its work with it, wherever its request is; others do not notice."""

import asyncio
import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from moeserve.config import SchedulerConfig
from moeserve.engine.outputs import SchedulerOutput
from moeserve.engine.sampling_params import SamplingParams
from moeserve.testing.fake_model import generate, hashed_token
from moeserve.testing.served_engine import RunningFrontend, StepGate, serve_fake_engine, wait_until
from moeserve.tokenizer import Tokenizer

NUM_BLOCKS = 256


class GatedEngine:
    """A served engine whose steps can be held, and which remembers what ran in each step."""

    def __init__(self, running: RunningFrontend, gate: StepGate, steps: list[dict[str, int]]) -> None:
        self.running = running
        self.gate = gate
        self.steps = steps

    def count(self, metric: str) -> float:
        text = httpx.get(f"{self.running.url}/metrics").text
        values = [line.rsplit(" ", 1)[1] for line in text.splitlines() if line.startswith(f"moeserve:{metric}")]
        return sum(map(float, values))

    @property
    def num_aborted(self) -> float:
        return self.count('request_success_total{finished_reason="abort"}')

    def wait_all_free(self) -> None:
        wait_until(lambda: self.count("num_free_kv_blocks") == NUM_BLOCKS * len(self.running.replicas))
        assert self.count("num_requests_running") == self.count("num_requests_waiting") == 0
        for replica in self.running.replicas:
            stats = replica.scheduler.stats()
            assert stats.num_free_blocks == NUM_BLOCKS
            assert not replica.scheduler.has_unfinished


@pytest.fixture
def gated(tokenizer_folder: Path, tokenizer: Tokenizer) -> Iterator[GatedEngine]:
    gate, steps = StepGate(), []

    def on_step(output: SchedulerOutput) -> None:
        steps.append(dict(output.num_scheduled_tokens))
        gate(output)

    with serve_fake_engine(
        tokenizer_folder,
        vocab_size=tokenizer.vocab_size,
        num_blocks=NUM_BLOCKS,
        on_step=on_step,
        scheduler=SchedulerConfig(max_num_seqs=2),
    ) as running:
        try:
            yield GatedEngine(running, gate, steps)
        finally:
            gate.open()


CASES = {
    "completion": ("/v1/completions", {"prompt": "hi", "max_tokens": 400}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
}


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("stream", [False, True])
def test_blocks_are_free_after_the_step_in_which_the_client_left(gated: GatedEngine, kind: str, stream: bool) -> None:
    path, body = CASES[kind]
    gated.gate.close()

    async def leave_during_a_step() -> None:
        async with httpx.AsyncClient(base_url=gated.running.url, timeout=30.0) as http:
            request = asyncio.create_task(http.post(path, json={**body, "stream": stream}))
            await asyncio.to_thread(gated.gate.wait_reached)
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)

    asyncio.run(leave_during_a_step())
    wait_until(lambda: gated.num_aborted == 1)
    steps_before = sum(bool(step) for step in gated.steps)
    gated.gate.open()
    gated.wait_all_free()
    # The held step ends; the abort was there before the next one began.
    assert sum(bool(step) for step in gated.steps) == steps_before


def test_a_waiting_request_can_leave_too(gated: GatedEngine) -> None:
    gated.gate.close()

    async def three_requests() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=gated.running.url, timeout=30.0) as http:
            body = {"prompt": "hi", "max_tokens": 20}
            staying = [asyncio.create_task(http.post("/v1/completions", json=body)) for _ in range(2)]
            await asyncio.to_thread(gated.gate.wait_reached)
            waiting = asyncio.create_task(http.post("/v1/completions", json={**body, "n": 5}))
            await asyncio.to_thread(wait_until, lambda: gated.running.frontend.num_unfinished == 7)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            await asyncio.to_thread(wait_until, lambda: gated.num_aborted == 5)
            gated.gate.open()
            return list(await asyncio.gather(*staying))

    for answer in asyncio.run(three_requests()):
        assert answer.json()["usage"]["completion_tokens"] == 20
    gated.wait_all_free()
    assert not any(request_id.endswith("-2") for step in gated.steps for request_id in step), "a dropped request ran"


def test_leaving_while_the_prompt_is_encoded(
    gated: GatedEngine, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    started, cancelled = asyncio.Event(), []

    async def never_ends(*args: object, **kwargs: object) -> list[int]:
        loop.call_soon_threadsafe(started.set)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise
        raise AssertionError

    async def leave() -> None:
        nonlocal loop
        loop = asyncio.get_running_loop()
        async with httpx.AsyncClient(base_url=gated.running.url, timeout=30.0) as http:
            for stream in (False, True):
                started.clear()
                request = asyncio.create_task(http.post("/v1/completions", json={"prompt": "hi", "stream": stream}))
                await asyncio.wait_for(started.wait(), 30.0)
                request.cancel()
                await asyncio.gather(request, return_exceptions=True)

    loop: asyncio.AbstractEventLoop
    monkeypatch.setattr("moeserve.server.prompts.encode", never_ends)
    asyncio.run(leave())
    wait_until(lambda: len(cancelled) == 2)
    assert gated.running.frontend.num_unfinished == 0
    assert gated.steps == []


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    prompt: list[int]
    max_tokens: int
    stream: bool
    is_dropped: bool
    drop_after_chunks: int


def make_jobs(count: int, tokenizer: Tokenizer) -> list[Job]:
    rng = random.Random(3)

    def random_ids(length: int) -> list[int]:
        return [rng.randrange(3, tokenizer.vocab_size) for _ in range(length)]

    shared, whole_character = random_ids(100), tokenizer.encode(".")
    return [
        Job(
            prompt=shared[: rng.choice((0, 40, 100))] + random_ids(rng.randint(0, 200)) + whole_character,
            max_tokens=rng.choice((1, 5, 30, 100)),
            stream=rng.random() < 0.6,
            is_dropped=index % 3 == 0,
            drop_after_chunks=rng.randint(0, 5),
        )
        for index in range(count)
    ]


@pytest.mark.parametrize("dp_size", [1, 2])
def test_many_mixed_requests_a_third_dropped(tokenizer_folder: Path, tokenizer: Tokenizer, dp_size: int) -> None:
    jobs = make_jobs(72, tokenizer)
    settings = {"parallel": {"data_parallel_size": dp_size}}
    scheduler = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=256)
    with serve_fake_engine(
        tokenizer_folder, settings, vocab_size=tokenizer.vocab_size, num_blocks=NUM_BLOCKS, scheduler=scheduler
    ) as running:
        texts = asyncio.run(run_jobs(running.url, jobs))
        engine = GatedEngine(running, StepGate(), [])
        wait_until(lambda: running.frontend.num_unfinished == 0)
        engine.wait_all_free()
    for job, text in zip(jobs, texts, strict=True):
        ids, _ = generate(job.prompt, SamplingParams(max_tokens=job.max_tokens), hashed_token(tokenizer.vocab_size))
        expected = tokenizer.decode(ids)
        if job.is_dropped:
            assert text is None or expected.startswith(text)
        else:
            assert text == expected


async def run_jobs(url: str, jobs: list[Job]) -> list[str | None]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=60.0, limits=limits) as http:
        return list(await asyncio.gather(*(run_job(http, job) for job in jobs)))


async def run_job(http: httpx.AsyncClient, job: Job) -> str | None:
    """The text; of a dropped request what came before, or None where nothing can be known."""
    body: dict[str, Any] = {"prompt": job.prompt, "max_tokens": job.max_tokens, "stream": job.stream}
    if not job.stream:
        request = asyncio.ensure_future(http.post("/v1/completions", json=body))
        if job.is_dropped:
            await asyncio.wait({request}, timeout=0.002 * job.drop_after_chunks)
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
            return None
        answer = (await request).json()
        text: str = answer["choices"][0]["text"]
        return text
    parts = []
    async with http.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if job.is_dropped and len(parts) >= job.drop_after_chunks:
                break
            if line.startswith("data: {"):
                parts.append(httpx.Response(200, content=line[6:]).json()["choices"][0]["text"])
    return "".join(parts)
