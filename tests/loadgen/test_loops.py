"""Open and closed loop against a server that decides when it answers."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from moeserve.loadgen.goodput_search import SearchSettings
from moeserve.loadgen.loops import LoadResult, run_closed_loop, run_open_loop
from moeserve.loadgen.outcomes import Outcome
from moeserve.loadgen.prompts import TextPrompts, TokenIdPrompts
from moeserve.loadgen.sender import Endpoint, RequestStyle, Sender
from moeserve.loadgen.stream_client import Server, StreamClient
from moeserve.loadgen.traffic import PlannedRequest, PromptBlock, TrafficClass
from moeserve.loadgen.trials import FoundGoodput, find_max_goodput
from moeserve.loadgen.workloads import LengthRange, SyntheticWorkload
from moeserve.testing.stream_server import STREAM_HEAD, ReceivedRequest, answer, stream_server, tokens_event

T = TypeVar("T")
Respond = Callable[[ReceivedRequest, asyncio.StreamWriter], Awaitable[None]]
CLASS = TrafficClass(name="interactive", ttft_s=60.0, tpot_s=60.0, tenant="acme")
STYLE = RequestStyle(model="m")


def _request(index: int, *, arrival_s: float = 0.0, traffic_class: TrafficClass = CLASS) -> PlannedRequest:
    block = PromptBlock(seed=(index,), num_tokens=index + 1)
    return PlannedRequest(traffic_class=traffic_class, prompt=(block,), output_tokens=3, arrival_s=arrival_s)


def _with_server(respond: Respond, run: Callable[[Sender], Awaitable[T]], style: RequestStyle = STYLE) -> T:
    async def main() -> T:
        async with stream_server(respond) as url:
            client = StreamClient(Server.from_url(url), timeout_s=30.0)
            prompts = TokenIdPrompts(1000) if style.endpoint is Endpoint.COMPLETIONS else TextPrompts(
                {"a": "words " * 9}, chars_per_token=4.0
            )  # fmt: skip
            return await run(Sender(client, style, prompts))

    return asyncio.run(main())


async def _answer_at_once(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
    writer.write(answer(request))


def _ignore(outcome: Outcome) -> None:
    """Nobody looks."""


def test_an_open_loop_does_not_wait_for_answers() -> None:
    num_requests = 5
    arrived = 0
    all_here = asyncio.Event()

    async def respond(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        nonlocal arrived
        arrived += 1
        if arrived == num_requests:
            all_here.set()
        await all_here.wait()  # nobody gets an answer before all have asked
        writer.write(answer(request))

    plan = [_request(index, arrival_s=index * 0.002) for index in range(num_requests)]

    async def run(sender: Sender) -> LoadResult:
        return await run_open_loop(sender, plan, duration_s=0.3, on_outcome=_ignore, stop=asyncio.Event())

    result = _with_server(respond, run)
    assert [outcome.prompt_tokens for outcome in result.outcomes] == [1, 2, 3, 4, 5]
    assert all(outcome.is_good and len(outcome.token_times_s) == 3 for outcome in result.outcomes)
    for planned, outcome in zip(plan, result.outcomes, strict=True):
        assert outcome.sent_s >= planned.arrival_s
        assert outcome.lag_s == pytest.approx(outcome.sent_s - planned.arrival_s)
    assert result.seconds >= 0.3  # a quiet end belongs to the load


def test_a_closed_loop_has_as_many_requests_at_once_as_clients() -> None:
    now = most = 0
    full = asyncio.Event()

    async def respond(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        if now == 3:
            full.set()
        await full.wait()
        now -= 1
        writer.write(answer(request))

    seen: list[Outcome] = []
    requests = iter([_request(index) for index in range(9)])

    async def run(sender: Sender) -> LoadResult:
        return await run_closed_loop(
            sender,
            lambda elapsed_s: next(requests, None),
            num_clients=3,
            duration_s=float("inf"),
            on_outcome=seen.append,
            stop=asyncio.Event(),
        )

    result = _with_server(respond, run)
    assert most == 3
    assert sorted(outcome.prompt_tokens for outcome in result.outcomes) == list(range(1, 10))
    assert len(seen) == 9


@pytest.mark.parametrize("is_open", [True, False])
def test_after_a_stop_nothing_is_sent_and_what_was_sent_ends(is_open: bool) -> None:
    received = 0

    async def run(sender: Sender) -> LoadResult:
        stop = asyncio.Event()

        def on_outcome(outcome: Outcome) -> None:
            if received == 2:
                stop.set()

        if is_open:
            plan = [_request(0), _request(1), _request(2, arrival_s=3600.0)]
            return await run_open_loop(sender, plan, duration_s=3600.0, on_outcome=on_outcome, stop=stop)
        numbers = itertools.count()
        return await run_closed_loop(
            sender,
            lambda elapsed_s: _request(next(numbers)),
            num_clients=1,
            duration_s=3600.0,
            on_outcome=on_outcome,
            stop=stop,
        )

    async def respond(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        nonlocal received
        received += 1
        writer.write(answer(request))

    result = _with_server(respond, run)
    assert len(result.outcomes) == 2
    assert not any(outcome.is_failed for outcome in result.outcomes)
    assert result.seconds < 3600.0


def test_requests_that_cannot_be_good_any_more_are_cut_off_where_that_is_wanted() -> None:
    hung_up = 0

    async def respond(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        nonlocal hung_up
        if len(request.body["prompt"]) == 1:
            writer.write(answer(request))
            return
        writer.write(STREAM_HEAD + tokens_event(request, 1))
        await request.hung_up.wait()
        hung_up += 1

    tight = replace(CLASS, ttft_s=0.1, tpot_s=0.01)

    async def run(sender: Sender) -> LoadResult:
        plan = [_request(index, traffic_class=tight) for index in range(3)]
        result = await run_open_loop(
            sender, plan, duration_s=0.01, on_outcome=_ignore, stop=asyncio.Event(), cuts_off=True
        )
        while hung_up < 2:
            await asyncio.sleep(0)
        return result

    result = _with_server(respond, run)
    assert [outcome.is_failed for outcome in result.outcomes] == [False, True, True]
    assert [outcome.prompt_tokens for outcome in result.outcomes] == [1, 2, 3]
    assert "cut off" in str(result.outcomes[1].error)


async def _refuse(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 429 Too Many\r\nX-Request-Id: r-9\r\nContent-Length: 4\r\n\r\nbusy")


async def _break(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM_HEAD + tokens_event(request, 1))


async def _say_nothing(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
    writer.write(answer(ReceivedRequest(path="", headers={}, body={"max_tokens": 0}, hung_up=request.hung_up)))


@pytest.mark.parametrize(
    ("respond", "reason", "num_tokens"),
    [(_refuse, "429: busy", 0), (_break, "before the end", 1), (_say_nothing, "no tokens", 0)],
)
def test_whatever_goes_wrong_is_a_failed_outcome(respond: Respond, reason: str, num_tokens: int) -> None:
    outcome = _with_server(respond, lambda sender: sender.send(sender.prepare(_request(4)), start_s=0.0, due_s=None))
    assert outcome.is_failed
    assert not outcome.is_good
    assert reason in str(outcome.error)
    assert len(outcome.token_times_s) == num_tokens
    assert outcome.prompt_tokens == 5
    if respond is _refuse:
        assert outcome.request_id == "r-9"


@pytest.mark.parametrize(
    ("style", "path", "expected", "absent"),
    [
        (STYLE, "/v1/completions", {"ignore_eos": True, "temperature": 0.0, "model": "m", "max_tokens": 3}, "seed"),
        (replace(STYLE, temperature=1.0, extra_body={"top_k": 5, "ignore_eos": False}), "/v1/completions",
         {"seed": 4, "top_k": 5, "ignore_eos": False}, "messages"),
        (replace(STYLE, endpoint=Endpoint.CHAT), "/v1/chat/completions", {"stream": True}, "prompt"),
        (replace(STYLE, is_plain=True), "/v1/completions", {"stream_options": {"include_usage": True}}, "ignore_eos"),
    ],
)  # fmt: skip
def test_what_is_sent(style: RequestStyle, path: str, expected: dict[str, Any], absent: str) -> None:
    received: list[ReceivedRequest] = []

    async def respond(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        received.append(request)
        writer.write(answer(request))

    outcome = _with_server(
        respond, lambda sender: sender.send(sender.prepare(_request(4)), start_s=0.0, due_s=None), style
    )
    assert outcome.error is None
    (request,) = received
    assert request.path == path
    assert expected.items() <= request.body.items()
    assert absent not in request.body
    assert request.headers["x-slo-class"] == "interactive"
    assert request.headers["x-tenant"] == "acme"
    if style.endpoint is Endpoint.CHAT:
        (message,) = request.body["messages"]
        assert len(message["content"]) == 20  # five tokens of four characters


def test_a_search_loads_the_server_until_it_knows_the_rate() -> None:

    class Even:
        """Requests at even distances; above fifty a second they are given a target that nobody meets."""

        def at_rate(self, rate: float, *, duration_s: float, seed: int) -> list[PlannedRequest]:
            count = max(1, round(rate * duration_s))
            traffic_class = CLASS if rate <= 50.0 else replace(CLASS, ttft_s=1e-9, tpot_s=1e-9)
            return [_request(index, arrival_s=index / rate, traffic_class=traffic_class) for index in range(count)]

    started: list[tuple[float, int]] = []

    async def run(sender: Sender) -> FoundGoodput | None:
        return await find_max_goodput(
            sender,
            Even(),
            SearchSettings(tolerance=0.2, repeats=1),
            start_rate=20.0,
            duration_s=0.2,
            seed=0,
            on_trial_start=lambda rate, count: started.append((rate, count)) or _ignore,
            on_trial_end=lambda trial: None,
            stop=asyncio.Event(),
        )

    search = _with_server(_answer_at_once, run)
    assert search is not None
    assert search.found.rate is not None
    assert search.found.rate <= 50.0 < search.found.rate * 1.2
    assert [trial.rate for trial in search.found.trials] == [rate for rate, _ in started]
    assert len(search.load.outcomes) == round(search.found.rate * 0.2)
    assert search.found.goodput_rps == pytest.approx(len(search.load.outcomes) / 0.2)


def test_a_search_that_is_stopped_in_its_first_trial_has_no_result() -> None:
    async def run(sender: Sender) -> FoundGoodput | None:
        stop = asyncio.Event()
        stop.set()
        lengths = LengthRange(low=1, high=1)
        return await find_max_goodput(
            sender,
            SyntheticWorkload(classes=(CLASS,), prompt_tokens=lengths, output_tokens=lengths),
            SearchSettings(),
            start_rate=50.0,
            duration_s=1.0,
            seed=0,
            on_trial_start=lambda rate, count: _ignore,
            on_trial_end=lambda trial: None,
            stop=stop,
        )

    assert _with_server(_answer_at_once, run) is None
