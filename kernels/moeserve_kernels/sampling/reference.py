"""Oracle of sampling: Python integers and floats, one token at a time."""

import math

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def gumbel_reference(seed: int, position: int, token_id: int) -> float:
    """The noise of one token."""
    key = _mix(_mix(seed + _GOLDEN) + position * _GOLDEN)
    hashed = _mix(key + (token_id + 1) * _GOLDEN)
    return -math.log(-math.log(((hashed >> 12) + 0.5) / 2**52))


def penalties_reference(
    logits: list[float], *, prompt: list[int], output: list[int], presence: float, frequency: float, repetition: float
) -> list[float]:
    """The logits of one row after its penalties."""
    result = list(logits)
    for token_id in set(prompt) | set(output):
        result[token_id] = logits[token_id] / repetition if logits[token_id] > 0 else logits[token_id] * repetition
    for token_id in set(output):
        result[token_id] -= presence + frequency * output.count(token_id)
    return result


def kept_tokens_reference(logits: list[float], *, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The token ids of one row that its filters keep."""
    order = sorted(range(len(logits)), key=lambda token_id: (-logits[token_id], token_id))
    kept = order[:top_k] if top_k > 0 else order
    powers = {token_id: math.exp(logits[token_id] - logits[order[0]]) for token_id in kept}
    total = sum(powers.values())
    mass = 0.0
    nucleus = []
    for token_id in kept:
        nucleus.append(token_id)
        mass += powers[token_id] / total
        if mass >= top_p and top_p < 1.0:
            break
    return {token_id for token_id in nucleus if powers[token_id] >= min_p}


def _mix(x: int) -> int:
    x &= _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
