"""Times of competing calls, taken in turns, and the ceilings that the same machine reaches in the same run."""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Call = Callable[[], object]

_COPY_BYTES = {"cpu": 128 << 20, "cuda": 1 << 30}
_MATMUL_SIZE = {"cpu": 1024, "cuda": 8192}
_FLUSHED_BYTES = 256 << 20
"""More than the cache of any GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    num_rounds: int
    round_s: float
    """How long a contender runs in a round, about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """What torch reaches where nothing but memory, or nothing but products, counts."""

    copy_gb_per_s: float
    """Read and written, by copying a large tensor."""
    matmul_gflops: float
    """The best of a square product in bfloat16 and in float32."""


class Clock:
    """Seconds of calls on one device; on a GPU its own time, with a cold cache."""

    def __init__(self, device: torch.device, effort: Effort) -> None:
        self._effort = effort
        self._flushed = torch.empty(_FLUSHED_BYTES, dtype=torch.int8, device=device) if device.type == "cuda" else None

    def time(self, calls: Mapping[str, Call]) -> dict[str, tuple[float, ...]]:
        """Seconds of one call, for each round: the contenders take turns, so that all see the same disturbances."""
        repeats = {}
        for name, call in calls.items():
            seconds = self._seconds(call, 1)  # compiles, and touches the memory
            if seconds < self._effort.round_s:
                seconds = self._seconds(call, 1)
            repeats[name] = max(1, math.ceil(self._effort.round_s / seconds))
        rounds = [
            {name: self._seconds(call, repeats[name]) for name, call in calls.items()}
            for _ in range(self._effort.num_rounds)
        ]
        return {name: tuple(seconds[name] for seconds in rounds) for name in calls}

    def _seconds(self, call: Call, repeats: int) -> float:
        if self._flushed is None:
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            return (time.perf_counter() - start) / repeats
        events = [(_event(), _event()) for _ in range(repeats)]
        for start_event, end_event in events:
            self._flushed.zero_()
            start_event.record()
            call()
            end_event.record()
        torch.cuda.synchronize()
        return statistics.median(float(start.elapsed_time(end)) for start, end in events) / 1e3


def measure_ceilings(device: torch.device, clock: Clock) -> Ceilings:
    source = torch.ones(_COPY_BYTES[device.type], dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    size = _MATMUL_SIZE[device.type]
    halves = torch.ones(size, size, dtype=torch.bfloat16, device=device)
    floats = halves.float()
    times = clock.time(
        {"copy": lambda: target.copy_(source), "bf16": lambda: halves @ halves, "float32": lambda: floats @ floats}
    )
    best = {name: min(rounds) for name, rounds in times.items()}
    return Ceilings(
        copy_gb_per_s=2 * source.numel() / best["copy"] / 1e9,
        matmul_gflops=2 * size**3 / min(best["bf16"], best["float32"]) / 1e9,
    )


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)
