"""What the routers of a replica choose, counted by phase and layer, and the time the experts take, in windows.

Axes: L MoE layers, E logical experts, T tokens, K top-k; 2 phases, prefill and decode.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

_PREFILL, _DECODE = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadSample:
    """One window of steps."""

    start_s: float
    """Of the first step, Unix time."""
    end_s: float
    """Of the last one."""
    num_steps: int
    num_prefill_tokens: int
    num_decode_tokens: int
    step_s: float
    """Seconds of all steps together."""
    expert_s: float | None
    """Of them from dispatch to combine; None: not measured."""
    prefill_load_LE: npt.NDArray[np.int64]
    """Routed (token, choice) pairs."""
    decode_load_LE: npt.NDArray[np.int64]


class LayerLoad:
    """The counters of one layer; its tokens stand with those of decodes first."""

    def __init__(self, load_2E: torch.Tensor, add_expert_seconds: Callable[[float], None]) -> None:
        self._load_2E = load_2E
        self.add_expert_seconds = add_expert_seconds

    def first_counter(self, num_tokens: int, num_decode_tokens: int) -> tuple[torch.Tensor, int]:
        """A counter [E] and how many leading tokens belong to it: all, but in a step of both phases the decodes'."""
        if num_decode_tokens == 0:
            return self._load_2E[_PREFILL], num_tokens
        return self._load_2E[_DECODE], num_decode_tokens

    def count_rest(self, expert_ids_TK: torch.Tensor, num_decode_tokens: int) -> None:
        """Count the tokens that `first_counter` left out."""
        if 0 < num_decode_tokens < len(expert_ids_TK):
            chosen = expert_ids_TK[num_decode_tokens:].flatten()
            self._load_2E[_PREFILL].scatter_add_(0, chosen, torch.ones_like(chosen))


class LoadRecorder:
    """Counters that stay on the device until their window is over, and what becomes of them then.

    window_s: steps are counted for so long; the first step behind it hands the window to `on_window`, in the thread
    that steps.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_experts: int,
        device: torch.device,
        window_s: float,
        on_window: Callable[[LoadSample], None],
        clock: Callable[[], float] = time.perf_counter,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        self._load_2LE = torch.zeros(2, num_layers, num_experts, dtype=torch.int64, device=device)
        # On other devices the host is long past a layer when the device computes it.
        self._times_experts = device.type == "cpu"
        self._window_s = window_s
        self._on_window = on_window
        self._clock = clock
        self._unix_time = unix_time
        self._window = _Window()
        self._last_end_unix_s = 0.0
        self.layers = [LayerLoad(self._load_2LE[:, layer], self._add_expert_seconds) for layer in range(num_layers)]

    @contextmanager
    def step(self, *, num_prefill_tokens: int, num_decode_tokens: int) -> Iterator[None]:
        """Run a step of the engine inside, also one in which this replica has no tokens."""
        start = self._clock()
        if self._window.num_steps and start - self._window.start >= self._window_s:
            self._end_window()
        window = self._window
        if not window.num_steps:
            # Two clocks: the next window must not begin before the end of the last, not even by a microsecond.
            window.start, window.start_unix_s = start, max(self._unix_time(), self._last_end_unix_s)
        yield
        window.end = self._clock()
        window.step_s += window.end - start
        window.num_steps += 1
        window.num_prefill_tokens += num_prefill_tokens
        window.num_decode_tokens += num_decode_tokens

    def _add_expert_seconds(self, seconds: float) -> None:
        self._window.expert_s += seconds

    def _end_window(self) -> None:
        window, self._window = self._window, _Window()
        self._last_end_unix_s = window.start_unix_s + window.end - window.start
        load_2LE = self._load_2LE.cpu().numpy().copy()
        self._load_2LE.zero_()
        self._on_window(
            LoadSample(
                start_s=window.start_unix_s,
                end_s=self._last_end_unix_s,
                num_steps=window.num_steps,
                num_prefill_tokens=window.num_prefill_tokens,
                num_decode_tokens=window.num_decode_tokens,
                step_s=window.step_s,
                expert_s=window.expert_s if self._times_experts else None,
                prefill_load_LE=load_2LE[_PREFILL],
                decode_load_LE=load_2LE[_DECODE],
            )
        )


@dataclass(slots=True)
class _Window:
    """The window under way; times by the recorder's clock unless they say otherwise."""

    start: float = 0.0
    start_unix_s: float = 0.0
    end: float = 0.0
    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    step_s: float = 0.0
    expert_s: float = 0.0
