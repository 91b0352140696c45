"""Sends one planned request to a server of the OpenAI API, and tells what became of it."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec

from moeserve.loadgen.outcomes import Outcome
from moeserve.loadgen.prompts import PromptMaker
from moeserve.loadgen.stream_client import RefusedError, StreamClient
from moeserve.loadgen.token_clock import TokenClock
from moeserve.loadgen.traffic import PlannedRequest

_PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


class Endpoint(StrEnum):
    COMPLETIONS = "completions"
    CHAT = "chat"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStyle:
    """How requests are written, whatever they say."""

    model: str
    endpoint: Endpoint = Endpoint.COMPLETIONS
    temperature: float = 0.0
    is_plain: bool = False
    """Only fields of OpenAI's own API: a server may then end its answers early, and tokens are counted by chunks."""
    extra_body: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """A request written down, so that nothing is left to do when its time comes."""

    planned: PlannedRequest
    body: bytes


class Sender:
    """Any number of requests at once to one server."""

    def __init__(self, client: StreamClient, style: RequestStyle, prompts: PromptMaker) -> None:
        self._client = client
        self._style = style
        self._prompts = prompts

    def prepare(self, planned: PlannedRequest) -> PreparedRequest:
        style = self._style
        prompt = self._prompts.make(planned.prompt)
        body: dict[str, Any] = {
            "model": style.model,
            "max_tokens": planned.output_tokens,
            "temperature": style.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if style.endpoint is Endpoint.CHAT:
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if not style.is_plain:
            body["ignore_eos"] = True
            body["stream_options"]["continuous_usage_stats"] = True
        if style.temperature:
            body["seed"] = planned.prompt[0].seed[-1]
        return PreparedRequest(planned=planned, body=msgspec.json.encode(body | dict(style.extra_body)))

    async def send(self, request: PreparedRequest, *, start_s: float, due_s: float | None) -> Outcome:
        """Whatever goes wrong is part of the outcome.

        By `time.perf_counter()`: start_s is that of the load, due_s when the request should be sent; None is now.
        """
        planned = request.planned
        clock = TokenClock()
        sent_s = time.perf_counter()

        def read(event: bytes, now_s: float) -> None:
            if event.startswith(b"{"):
                clock.read(event, now_s - sent_s)

        headers: Mapping[str, str] = {}
        error = None
        try:
            headers = await self._client.stream(
                _PATHS[self._style.endpoint], request.body, read, headers=planned.traffic_class.headers()
            )
            if not clock.times:
                error = "the answer had no tokens"
        except (RuntimeError, OSError) as problem:
            error = str(problem) or type(problem).__name__
            headers = problem.headers if isinstance(problem, RefusedError) else {}
        return Outcome(
            traffic_class=planned.traffic_class,
            sent_s=sent_s - start_s,
            lag_s=0.0 if due_s is None else max(0.0, sent_s - due_s),
            prompt_tokens=(clock.usage and clock.usage.prompt_tokens) or planned.prompt_tokens,
            output_tokens_wanted=planned.output_tokens,
            token_times_s=clock.times,
            error=error,
            request_id=headers.get("x-request-id"),
            served_class=headers.get("x-slo-class"),
        )
