"""The load: closed-loop clients that stream completions of random token ids from an OpenAI-compatible server.

Every request has the same number of prompt tokens and asks, whatever its text says, for the same number of output
tokens. Both are checked against the usage that the server reports, so no system is timed for work that it did not do.
"""

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

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
    """Run the load to its end; raises RuntimeError or httpx.HTTPError when any request fails or is cut short."""
    return asyncio.run(_drive(endpoint, load, prompts, timeout_s))


async def _drive(endpoint: Endpoint, load: Load, prompts: Sequence[Sequence[int]], timeout_s: float) -> LoadTimes:
    # A connection a request: some servers stall on the second request of a connection that is kept.
    limits = httpx.Limits(max_connections=load.num_clients, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=endpoint.url, timeout=timeout_s, limits=limits) as http:

        async def client(own: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
            return [await _stream(http, endpoint, prompt, load.output_tokens) for prompt in own]

        shares = [prompts[first :: load.num_clients] for first in range(load.num_clients)]
        start = time.perf_counter()
        times = await asyncio.gather(*(client(own) for own in shares))
        return LoadTimes(
            seconds=time.perf_counter() - start, token_times=tuple(request for own in times for request in own)
        )


async def _stream(
    http: httpx.AsyncClient, endpoint: Endpoint, prompt: Sequence[int], output_tokens: int
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
    async with http.stream("POST", "/v1/completions", json=body) as response:
        if response.is_error:
            raise RuntimeError(f"{response.status_code}: {(await response.aread()).decode(errors='replace')[:300]}")
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                clock.read(line[6:], time.perf_counter() - start)
    return clock.finish(prompt_tokens=len(prompt), output_tokens=output_tokens)


class TokenClock:
    """Times of the tokens of one stream, from the counts that its chunks carry.

    A chunk may bring no token (a withheld part of a character) or several. Counts come as `usage` in each chunk, or
    as llama.cpp's `timings`; a server that gives neither in a chunk with text is taken to have sent one token.
    """

    def __init__(self) -> None:
        self._times: list[float] = []
        self._usage: Mapping[str, int] | None = None

    def read(self, text: str, now_s: float) -> None:
        """One chunk, as JSON. Raises RuntimeError when it is an error or not what the API promises."""
        try:
            chunk = json.loads(text)
            if "error" in chunk:
                raise RuntimeError(f"the server answered with an error: {chunk['error']}")
            seen = self._tokens_seen(chunk)
        except (ValueError, KeyError, TypeError) as error:
            raise RuntimeError(f"not a chunk of a completion: {text[:300]}") from error
        self._times += [now_s] * (seen - len(self._times))

    def _tokens_seen(self, chunk: Mapping[str, Any]) -> int:
        usage = chunk.get("usage")
        if usage:
            self._usage = usage
            return int(usage["completion_tokens"])
        if "timings" in chunk:
            return int(chunk["timings"]["predicted_n"])
        return len(self._times) + any(choice.get("text") for choice in chunk.get("choices", ()))

    def finish(self, *, prompt_tokens: int, output_tokens: int) -> tuple[float, ...]:
        """Raises RuntimeError unless the server says that it did exactly the work it was asked for."""
        if self._usage is None:
            raise RuntimeError("the stream ended without a usage")
        did = self._usage.get("prompt_tokens"), self._usage.get("completion_tokens")
        if did != (prompt_tokens, output_tokens) or len(self._times) != output_tokens:
            raise RuntimeError(f"asked for {prompt_tokens} + {output_tokens} tokens, got {did[0]} + {did[1]}")
        return tuple(self._times)
