"""What a load is made of: classes of requests with their targets, and requests as they are planned."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficClass:
    """Requests of one kind. A target that is None is always met."""

    name: str
    share: float = 1.0
    """Of all requests, relative to the shares of the other classes."""
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    tenant: str | None = None
    is_told: bool = True
    """Whether the server is told class and targets in headers; a server that knows no classes needs none."""

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a class must have a name")
        for text in (self.name, self.tenant or ""):
            if not (text.isascii() and text.isprintable()):
                raise ValueError(f"a class or tenant must be named in printable ASCII, got {text!r}")
        for field in ("share", "ttft_s", "tpot_s", "e2e_s"):
            value = getattr(self, field)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{field} of class {self.name} must be a number above 0, got {value}")

    def headers(self) -> dict[str, str]:
        """What tells the server what is expected of it."""
        if not self.is_told:
            return {}
        headers = {"x-slo-class": self.name}
        if self.ttft_s is not None:
            headers["x-slo-ttft-ms"] = f"{self.ttft_s * 1e3:g}"
        if self.tpot_s is not None:
            headers["x-slo-tpot-ms"] = f"{self.tpot_s * 1e3:g}"
        if self.tenant is not None:
            headers["x-tenant"] = self.tenant
        return headers

    def latest_end_s(self, output_tokens: int) -> float:
        """How long after it was sent a request can end at the latest and still meet its targets."""
        ends = [math.inf if self.e2e_s is None else self.e2e_s]
        if self.ttft_s is not None and self.tpot_s is not None:
            ends.append(self.ttft_s + self.tpot_s * (output_tokens - 1))
        return min(ends)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBlock:
    """A piece of a prompt. Equal seeds begin with equal tokens, so requests share a prefix when they share blocks."""

    seed: tuple[int, ...]
    num_tokens: int
    domain: str | None = None
    """Of text prompts: what kind of text; None takes any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """One request before it is sent."""

    traffic_class: TrafficClass
    prompt: tuple[PromptBlock, ...]
    output_tokens: int
    arrival_s: float = 0.0
    """Since the start of the load; without meaning in a closed loop."""

    @property
    def prompt_tokens(self) -> int:
        return sum(block.num_tokens for block in self.prompt)


def draw_classes(classes: Sequence[TrafficClass], count: int, rng: np.random.Generator) -> list[TrafficClass]:
    """A class for each of `count` requests, by their shares."""
    shares = np.array([each.share for each in classes])
    return [classes[index] for index in rng.choice(len(classes), size=count, p=shares / shares.sum())]
