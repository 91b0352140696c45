"""What a request asks of the sampler, validated at birth."""

import math
from dataclasses import dataclass, field

MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling settings of one request.

    `seed` is never None inside the engine: the frontend draws one when the user gave none and keeps it in the journal,
    so that a request resumed elsewhere continues with the same tokens.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    """0.0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    """Number of most likely tokens to report with each output token; None: none, 0: only the chosen token's."""
    prompt_logprobs: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        _at_least("max_tokens", self.max_tokens, 1)
        _between("min_tokens", self.min_tokens, 0, self.max_tokens)
        _between("temperature", self.temperature, 0.0, 2.0)
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        _at_least("top_k", self.top_k, 0)
        _between("min_p", self.min_p, 0.0, 1.0)
        _between("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _between("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if not 0.0 < self.repetition_penalty <= 10.0:
            raise ValueError(f"repetition_penalty must be above 0 and at most 10, got {self.repetition_penalty}")
        for token_id, bias in self.logit_bias.items():
            _between(f"logit_bias[{token_id}]", bias, -100.0, 100.0)
        if any(not text for text in self.stop):
            raise ValueError("stop must not hold an empty string")
        if self.logprobs is not None:
            _between("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _between("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed must fit 64 bits, between {-(2**63)} and {2**63 - 1}, got {self.seed}")
        _between("n", self.n, 1, 128)
        if self.n > 1 and self.temperature == 0.0:
            raise ValueError(f"n must be 1 when temperature is 0 (greedy), got {self.n}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def needs_output_history(self) -> bool:
        """Whether the logits depend on the tokens that came before."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


def child_seed(seed: int, index: int) -> int:
    """Seed of the sequence `index` of a request with n > 1: the first keeps the request's own.

    The others get the splitmix64 stream that starts there (Steele et al., "Fast splittable pseudorandom number
    generators", 2014), cut to 63 bits.
    """
    if index == 0:
        return seed
    z = (seed + index * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return (z ^ (z >> 31)) >> 1


def _at_least(name: str, value: float, low: float) -> None:
    if not (math.isfinite(value) and value >= low):
        raise ValueError(f"{name} must be at least {low}, got {value}")


def _between(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise ValueError(f"{name} must be between {low} and {high}, got {value}")
