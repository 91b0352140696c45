"""The load: closed-loop clients that stream completions of random token ids from an OpenAI-compatible server.

Every request has the same number of prompt tokens and asks, whatever its text says, for the same number of output
tokens. Both are checked against the usage that the server reports, so no system is timed for work that it did not do.
"""

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from moeserve.loadgen.event_loop import run
from moeserve.loadgen.stream_client import Server, StreamClient
from moeserve.loadgen.token_clock import TokenClock

__all__ = ["Endpoint", "Load", "LoadTimes", "TokenClock", "drive"]

_FIRST_ORDINARY_ID = 3
"""Lower ids are special tokens in our tokenizers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What the clients send: each client its requests one after another, all clients at once."""

    name: str
    num_clients: int
    prompt_tokens: int
    output_tokens: int
    requests_per_client: int = 1

    @property
    def num_requests(self) -> int:
        return self.num_clients * self.requests_per_client

    def prompts(self, *, vocab_size: int, seed: int) -> list[list[int]]:
        """One prompt a request. Another seed shares no prefix with it, so that no prefix cache helps."""
        rng = random.Random(f"{self.name} {seed}")
        return [
            [rng.randrange(_FIRST_ORDINARY_ID, vocab_size) for _ in range(self.prompt_tokens)]
            for _ in range(self.num_requests)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTimes:
    """What the clients saw."""

    seconds: float
    """From the first request sent to the last token received."""
    token_times: tuple[tuple[float, ...], ...]
    """For each request when each of its tokens came, in seconds since it was sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A server that speaks the completions API, and the words of its own that it needs in a request."""

    url: str
    model: str
    extra_body: Mapping[str, Any]


def drive(endpoint: Endpoint, load: Load, prompts: Sequence[Sequence[int]], *, timeout_s: float = 600.0) -> LoadTimes:
    """Run the load to its end; raises RuntimeError or OSError when any request fails or is cut short.

    timeout_s: for each request.
    """
    return run(_drive(endpoint, load, prompts, timeout_s))


async def _drive(endpoint: Endpoint, load: Load, prompts: Sequence[Sequence[int]], timeout_s: float) -> LoadTimes:
    http = StreamClient(Server.from_url(endpoint.url), timeout_s=timeout_s)

    async def client(own: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
        return [await _stream(http, endpoint, prompt, load.output_tokens) for prompt in own]

    shares = [prompts[first :: load.num_clients] for first in range(load.num_clients)]
    start = time.perf_counter()
    times = await asyncio.gather(*(client(own) for own in shares))
    return LoadTimes(
        seconds=time.perf_counter() - start, token_times=tuple(request for own in times for request in own)
    )


async def _stream(
    http: StreamClient, endpoint: Endpoint, prompt: Sequence[int], output_tokens: int
) -> tuple[float, ...]:
    body: dict[str, Any] = {
        "model": endpoint.model,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    body["stream_options"] |= endpoint.extra_body.get("stream_options", {})
    body |= {name: value for name, value in endpoint.extra_body.items() if name != "stream_options"}
    start = time.perf_counter()
    clock = TokenClock()

    def read(event: bytes, now_s: float) -> None:
        if event.startswith(b"{"):
            clock.read(event, now_s - start)

    await http.stream("/v1/completions", msgspec.json.encode(body), read)
    return clock.finish(prompt_tokens=len(prompt), output_tokens=output_tokens)
