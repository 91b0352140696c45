"""From the words of `moeserve bench serve` to what is to be sent; every mistake in them is found here."""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from moeserve.config import ConfigError
from moeserve.loadgen.domains import DomainTraffic, load_domain_texts
from moeserve.loadgen.goodput_search import SearchSettings
from moeserve.loadgen.loops import NextRequest
from moeserve.loadgen.prompts import PromptMaker, TextPrompts, TokenIdPrompts
from moeserve.loadgen.sender import Endpoint, RequestStyle
from moeserve.loadgen.traces import read_trace
from moeserve.loadgen.traffic import PlannedRequest, TrafficClass
from moeserve.loadgen.workloads import LengthRange, SyntheticWorkload, TraceWorkload, Workload

_DEFAULT_CLASS = TrafficClass(name="standard", ttft_s=1.0, tpot_s=0.1, is_told=False)
_DEFAULT_DURATION_S = 30.0
_REQUESTS_PER_CLIENT = 10
_PROFILE_CLIENTS = 8
_MIN_TRIAL_REQUESTS = 20
_CHARS_PER_TOKEN = 4.0
_TARGETS = {"ttft": "ttft_s", "tpot": "tpot_s", "e2e": "e2e_s", "share": "share", "tenant": "tenant"}


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenPlan:
    """Requests at their times."""

    requests: tuple[PlannedRequest, ...]
    duration_s: float
    """Of the arrivals."""

    @property
    def first(self) -> PlannedRequest:
        return self.requests[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedPlan:
    """Clients that each send when their last answer has ended."""

    next_request: NextRequest
    num_clients: int
    num_requests: int | None
    duration_s: float
    first: PlannedRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchPlan:
    """A rate to be found."""

    workload: Workload
    settings: SearchSettings
    start_rate: float
    duration_s: float
    seed: int

    @property
    def first(self) -> PlannedRequest:
        return self.workload.at_rate(self.start_rate, duration_s=self.duration_s, seed=self.seed)[0]


Plan: TypeAlias = OpenPlan | ClosedPlan | SearchPlan


def make_plan(arguments: argparse.Namespace) -> Plan:
    """Raises ConfigError or ValueError."""
    classes = tuple(parse_class(text) for text in arguments.classes) or (_DEFAULT_CLASS,)
    _check_choice(arguments)
    if arguments.profile is not None:
        return _profile(arguments, classes)
    if arguments.find_max_goodput:
        duration_s = _positive("--duration", arguments.duration, _DEFAULT_DURATION_S)
        return SearchPlan(
            workload=_workload(arguments, classes),
            settings=SearchSettings(
                attainment=arguments.attainment,
                tolerance=arguments.tolerance,
                min_rate=_MIN_TRIAL_REQUESTS / duration_s,
            ),
            start_rate=1.0 if arguments.rate is None else arguments.rate,
            duration_s=duration_s,
            seed=arguments.seed,
        )
    if arguments.clients is not None:
        return _closed(arguments, classes)
    duration_s = _positive("--duration", arguments.duration, _DEFAULT_DURATION_S)
    workload = _workload(arguments, classes)
    if arguments.rate is not None:
        requests = workload.at_rate(arguments.rate, duration_s=duration_s, seed=arguments.seed)
    else:
        assert isinstance(workload, TraceWorkload)
        time_scale = _positive("--time-scale", arguments.time_scale, 1.0)
        requests = workload.as_recorded(time_scale=time_scale, duration_s=duration_s, seed=arguments.seed)
    if arguments.num_requests is not None and arguments.num_requests < len(requests):
        requests = requests[: arguments.num_requests]
        duration_s = requests[-1].arrival_s
    return OpenPlan(requests=tuple(requests), duration_s=duration_s)


def make_style(arguments: argparse.Namespace, *, model: str) -> RequestStyle:
    """Raises ConfigError."""
    temperature = arguments.temperature
    if temperature is None:
        temperature = 0.0 if arguments.profile is None else 1.0
    return RequestStyle(
        model=model,
        endpoint=Endpoint(arguments.endpoint),
        temperature=temperature,
        is_plain=arguments.plain,
        extra_body=_parse_body(arguments.extra_body),
    )


def make_prompts(arguments: argparse.Namespace) -> PromptMaker:
    """Raises ValueError."""
    if arguments.profile is None and arguments.endpoint == Endpoint.COMPLETIONS:
        return TokenIdPrompts(arguments.vocab_size)
    return TextPrompts(load_domain_texts(), chars_per_token=_CHARS_PER_TOKEN)


def parse_class(text: str) -> TrafficClass:
    """Of `interactive,share=0.3,ttft=0.5,tpot=0.05`. Raises ConfigError or ValueError."""
    name, *words = text.split(",")
    values: dict[str, Any] = {}
    for word in words:
        key, _, value = word.partition("=")
        if key not in _TARGETS:
            raise ConfigError(f"--class takes {', '.join(_TARGETS)}, got {word!r} in {text!r}")
        try:
            values[_TARGETS[key]] = value if key == "tenant" else float(value)
        except ValueError as error:
            raise ConfigError(f"{key} of --class must be a number, got {value!r} in {text!r}") from error
    return TrafficClass(name=name, **values)


def parse_lengths(flag: str, text: str) -> LengthRange:
    """Of `128` or `32:2048`. Raises ConfigError or ValueError."""
    low, _, high = text.partition(":")
    try:
        return LengthRange(low=int(low), high=int(high or low))
    except ValueError as error:
        raise ConfigError(f"{flag} must be N or LOW:HIGH, whole numbers from 1 up, got {text!r}") from error


def _check_choice(arguments: argparse.Namespace) -> None:
    given = {name: getattr(arguments, name) is not None for name in ("rate", "clients", "trace", "profile")}
    if not any(given.values()) and not arguments.find_max_goodput:
        raise ConfigError("say what to send: --rate, --clients, --trace, --profile or --find-max-goodput")
    if given["profile"] and (given["rate"] or given["trace"] or arguments.find_max_goodput):
        raise ConfigError("--profile is a closed loop: it takes --clients, not --rate, --trace or --find-max-goodput")
    if given["profile"] and arguments.num_requests is not None:
        raise ConfigError("--profile ends after --duration or with Ctrl-C, not after --num-requests")
    if given["clients"] and (given["rate"] or given["trace"] or arguments.find_max_goodput):
        raise ConfigError("--clients is a closed loop: it has no --rate, --trace or --find-max-goodput")
    if arguments.time_scale is not None and (given["rate"] or not given["trace"] or arguments.find_max_goodput):
        raise ConfigError("--time-scale is for a --trace without --rate or --find-max-goodput")
    for flag in ("clients", "num_requests"):
        value = getattr(arguments, flag)
        if value is not None and value < 1:
            raise ConfigError(f"--{flag.replace('_', '-')} must be 1 or more, got {value}")


def _workload(arguments: argparse.Namespace, classes: tuple[TrafficClass, ...]) -> Workload:
    if arguments.trace is None:
        return _synthetic(arguments, classes)
    return TraceWorkload(
        rows=read_trace(arguments.trace),
        classes=classes,
        length_scale=arguments.length_scale,
        max_prompt_tokens=arguments.max_prompt_tokens,
        max_output_tokens=arguments.max_output_tokens,
    )


def _synthetic(arguments: argparse.Namespace, classes: tuple[TrafficClass, ...]) -> SyntheticWorkload:
    return SyntheticWorkload(
        classes=classes,
        prompt_tokens=parse_lengths("--prompt-tokens", arguments.prompt_tokens),
        output_tokens=parse_lengths("--output-tokens", arguments.output_tokens),
        burstiness=arguments.burstiness,
    )


def _closed(arguments: argparse.Namespace, classes: tuple[TrafficClass, ...]) -> ClosedPlan:
    workload = _synthetic(arguments, classes)
    num_requests = arguments.num_requests
    if num_requests is None and arguments.duration is None:
        num_requests = arguments.clients * _REQUESTS_PER_CLIENT
    requests = _Numbered(workload, seed=arguments.seed, num_requests=num_requests)
    return ClosedPlan(
        next_request=requests,
        num_clients=arguments.clients,
        num_requests=num_requests,
        duration_s=_positive("--duration", arguments.duration, float("inf")),
        first=workload.together(1, seed=arguments.seed)[0],
    )


def _profile(arguments: argparse.Namespace, classes: tuple[TrafficClass, ...]) -> ClosedPlan:
    if len(classes) > 1:
        raise ConfigError(f"--profile sends requests of one class, got {len(classes)}")
    make = partial(
        DomainTraffic,
        classes[0],
        prompt_tokens=parse_lengths("--prompt-tokens", arguments.prompt_tokens).high,
        output_tokens=parse_lengths("--output-tokens", arguments.output_tokens).high,
        domain_s=arguments.domain_seconds,
        seed=arguments.seed,
    )
    return ClosedPlan(
        next_request=make().next_request,
        num_clients=_PROFILE_CLIENTS if arguments.clients is None else arguments.clients,
        num_requests=None,
        duration_s=_positive("--duration", arguments.duration, float("inf")),
        first=make().next_request(0.0),
    )


class _Numbered:
    """Requests of a synthetic workload, drawn a few at a time."""

    _DRAWN_AT_ONCE = 256

    def __init__(self, workload: SyntheticWorkload, *, seed: int, num_requests: int | None) -> None:
        self._workload = workload
        self._seed = seed
        self._left = num_requests
        self._drawn: list[PlannedRequest] = []
        self._num_draws = 0

    def __call__(self, _elapsed_s: float) -> PlannedRequest | None:
        if self._left == 0:
            return None
        if self._left is not None:
            self._left -= 1
        if not self._drawn:
            self._drawn = self._workload.together(self._DRAWN_AT_ONCE, seed=self._seed + self._num_draws)
            self._num_draws += 1
        return self._drawn.pop()


def _positive(flag: str, value: float | None, default: float) -> float:
    if value is not None and not value > 0:
        raise ConfigError(f"{flag} must be above 0, got {value}")
    return default if value is None else value


def _parse_body(text: str) -> Mapping[str, Any]:
    try:
        body = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--extra-body must be JSON, got {text!r}: {error}") from error
    if not isinstance(body, dict):
        raise ConfigError(f"--extra-body must be a JSON object, got {text!r}")
    return body
