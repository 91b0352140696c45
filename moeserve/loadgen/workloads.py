"""Where planned requests come from: random lengths and arrivals, or a recorded trace at any rate."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from moeserve.loadgen.traces import TraceRow
from moeserve.loadgen.traffic import PlannedRequest, PromptBlock, TrafficClass, draw_classes

TRACE_BLOCK_TOKENS = 512
"""Tokens that one of a trace's `hash_ids` stands for."""
_UNIQUE, _SHARED = 0, 1
"""First numbers of the seeds of prompts that share nothing, and of those that do."""


class Workload(Protocol):
    """Something that can be sent at a rate."""

    def at_rate(self, rate: float, *, duration_s: float, seed: int) -> list[PlannedRequest]:
        """Requests in the order of their arrival, `rate` of them a second on average. Raises ValueError for none."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthRange:
    """A number of tokens between two, drawn evenly on a logarithmic scale."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ValueError(f"lengths must be 1 or more tokens, low:high, got {self.low}:{self.high}")

    def draw(self, count: int, rng: np.random.Generator) -> list[int]:
        exponents = rng.uniform(np.log(self.low), np.log(self.high + 1), size=count)
        return [min(int(length), self.high) for length in np.exp(exponents) + 1e-9]


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticWorkload:
    """Requests whose lengths and distances are drawn at random."""

    classes: tuple[TrafficClass, ...]
    prompt_tokens: LengthRange
    output_tokens: LengthRange
    burstiness: float = 1.0
    """Shape of the gamma distribution of the distances: 1 is Poisson, below comes in bursts, above is more even."""

    def __post_init__(self) -> None:
        if not self.burstiness > 0:
            raise ValueError(f"burstiness must be above 0, got {self.burstiness}")

    def at_rate(self, rate: float, *, duration_s: float, seed: int) -> list[PlannedRequest]:
        rng = np.random.default_rng(seed)
        arrivals = _gamma_arrivals(rate, duration_s, self.burstiness, rng)
        if not arrivals:
            raise ValueError(f"no request arrives in {duration_s:g} s at {rate:g} requests/s: choose more of either")
        return self._plan(arrivals, rng, seed)

    def together(self, count: int, *, seed: int) -> list[PlannedRequest]:
        """Requests without arrival times, for a closed loop."""
        return self._plan([0.0] * count, np.random.default_rng(seed), seed)

    def _plan(self, arrivals: Sequence[float], rng: np.random.Generator, seed: int) -> list[PlannedRequest]:
        count = len(arrivals)
        prompts, outputs = self.prompt_tokens.draw(count, rng), self.output_tokens.draw(count, rng)
        return [
            PlannedRequest(
                traffic_class=traffic_class,
                prompt=(PromptBlock(seed=(_UNIQUE, seed, index), num_tokens=prompts[index]),),
                output_tokens=outputs[index],
                arrival_s=arrivals[index],
            )
            for index, traffic_class in enumerate(draw_classes(self.classes, count, rng))
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceWorkload:
    """A recorded trace, its lengths scaled; its bursts, its mix of lengths and its shared prefixes are kept."""

    rows: tuple[TraceRow, ...]
    classes: tuple[TrafficClass, ...]
    length_scale: float = 1.0
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None

    def __post_init__(self) -> None:
        if len(self.rows) < 2:
            raise ValueError(f"a trace must have two or more requests, got {len(self.rows)}")
        if not self.length_scale > 0:
            raise ValueError(f"length scale must be above 0, got {self.length_scale}")

    def at_rate(self, rate: float, *, duration_s: float, seed: int) -> list[PlannedRequest]:
        """As many successive requests of the trace as come in that time, over just that time.

        They begin where the seed says, and at the start for seed 0; distances keep their proportions. A trace that has
        fewer gives all it has, at the rate.
        """
        check_rate(rate)
        count = round(rate * duration_s)
        if count < 1:
            raise ValueError(f"no request arrives in {duration_s:g} s at {rate:g} requests/s: choose more of either")
        last_start = max(0, len(self.rows) - 1 - count)
        start = int(np.random.default_rng(seed).integers(last_start + 1)) if seed else 0
        # The row after the last one ends the stretch: the distance to it belongs to the time.
        stretch = self.rows[start : start + count + 1]
        recorded_s = max(stretch[-1].arrival_s - stretch[0].arrival_s, 1e-9)
        return self._plan(stretch[:-1], time_scale=recorded_s * rate / (len(stretch) - 1), seed=seed)

    def as_recorded(self, *, time_scale: float, duration_s: float, seed: int) -> list[PlannedRequest]:
        """The start of the trace, so many times as fast as it was recorded."""
        rows = [row for row in self.rows if row.arrival_s < duration_s * time_scale]
        return self._plan(rows, time_scale=time_scale, seed=seed)

    def _plan(self, rows: Sequence[TraceRow], *, time_scale: float, seed: int) -> list[PlannedRequest]:
        classes = draw_classes(self.classes, len(rows), np.random.default_rng(seed))
        return [
            self._request(row, (row.arrival_s - rows[0].arrival_s) / time_scale, (_UNIQUE, seed, index), traffic_class)
            for index, (row, traffic_class) in enumerate(zip(rows, classes, strict=True))
        ]

    def _request(
        self, row: TraceRow, arrival_s: float, unique_seed: tuple[int, ...], traffic_class: TrafficClass
    ) -> PlannedRequest:
        prompt_tokens = _scaled(row.prompt_tokens, self.length_scale, self.max_prompt_tokens)
        block_tokens = max(1, round(TRACE_BLOCK_TOKENS * self.length_scale))
        return PlannedRequest(
            traffic_class=traffic_class,
            prompt=_blocks(row.hash_ids, prompt_tokens, block_tokens, unique_seed),
            output_tokens=_scaled(row.output_tokens, self.length_scale, self.max_output_tokens),
            arrival_s=arrival_s,
        )


def _scaled(tokens: int, scale: float, most: int | None) -> int:
    scaled = max(1, round(tokens * scale))
    return scaled if most is None else min(scaled, most)


def _blocks(
    hash_ids: Sequence[int], prompt_tokens: int, block_tokens: int, unique_seed: tuple[int, ...]
) -> tuple[PromptBlock, ...]:
    """Whole blocks of the ids, the last one cut to length; what rounding leaves over is nobody else's."""
    blocks = []
    left = prompt_tokens
    for hash_id in hash_ids:
        if not left:
            break
        blocks.append(PromptBlock(seed=(_SHARED, hash_id), num_tokens=min(left, block_tokens)))
        left -= blocks[-1].num_tokens
    if left:
        blocks.append(PromptBlock(seed=unique_seed, num_tokens=left))
    return tuple(blocks)


def check_rate(rate: float) -> None:
    """Raises ValueError."""
    if not rate > 0:
        raise ValueError(f"rate must be above 0 requests/s, got {rate}")


def _gamma_arrivals(rate: float, duration_s: float, burstiness: float, rng: np.random.Generator) -> list[float]:
    """Times below `duration_s` whose distances are gamma distributed with mean 1 / rate."""
    check_rate(rate)
    arrivals: list[float] = []
    now_s = 0.0
    while True:
        now_s += rng.gamma(burstiness, 1.0 / (rate * burstiness))
        if now_s >= duration_s:
            return arrivals
        arrivals.append(float(now_s))
