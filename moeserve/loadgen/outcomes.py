"""What became of one request, and whether it met its targets."""

import itertools
from dataclasses import dataclass

from moeserve.loadgen.traffic import PlannedRequest, TrafficClass


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One request as its client saw it."""

    traffic_class: TrafficClass
    sent_s: float
    """Since the start of the load."""
    lag_s: float
    """How much later it was sent than planned: the load generator's own delay."""
    prompt_tokens: int
    """As the server counted them, else as planned."""
    output_tokens_wanted: int
    token_times_s: tuple[float, ...]
    """When each token came, since it was sent."""
    error: str | None = None
    request_id: str | None = None
    """As the server named it in `x-request-id`."""
    served_class: str | None = None
    """As the server says in `x-slo-class` it was served."""

    @classmethod
    def cut_off(cls, planned: PlannedRequest) -> "Outcome":
        """Of a request that was ended because it could not be good any more."""
        return cls(
            traffic_class=planned.traffic_class,
            sent_s=planned.arrival_s,
            lag_s=0.0,
            prompt_tokens=planned.prompt_tokens,
            output_tokens_wanted=planned.output_tokens,
            token_times_s=(),
            error="cut off: it could not meet its targets any more",
        )

    @property
    def is_failed(self) -> bool:
        return self.error is not None

    @property
    def ttft_s(self) -> float | None:
        return self.token_times_s[0] if self.token_times_s else None

    @property
    def e2e_s(self) -> float | None:
        """Until the last token."""
        return self.token_times_s[-1] if self.token_times_s else None

    @property
    def tpot_s(self) -> float | None:
        """(E2E - TTFT) / (n - 1); None below two tokens."""
        times = self.token_times_s
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """ITL: between each token and the next."""
        return tuple(later - earlier for earlier, later in itertools.pairwise(self.token_times_s))

    @property
    def meets_ttft(self) -> bool:
        return not self.is_failed and _meets(self.ttft_s, self.traffic_class.ttft_s)

    @property
    def meets_tpot(self) -> bool:
        """A request of one token has none, and so meets it."""
        return not self.is_failed and _meets(self.tpot_s, self.traffic_class.tpot_s)

    @property
    def is_good(self) -> bool:
        """Whether it came to its end and met every target of its class."""
        return self.meets_ttft and self.meets_tpot and _meets(self.e2e_s, self.traffic_class.e2e_s)


def _meets(value: float | None, target: float | None) -> bool:
    return target is None or value is None or value <= target
