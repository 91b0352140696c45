"""Sampling on GPUs: one program draws the token of one row; penalties are left to torch.

The filters never sort. What top_k and top_p leave is found as a cut - a logit, and for those equal to it a last id - by
radix search: logits are read as integers of the same order, and each pass over the row settles four more bits of the
cut from the number (or mass) of tokens above sixteen candidates. A row without filters is read twice. Sums are taken
in an order that depends on the vocabulary alone, so a row draws the same token in any batch.
"""
# mypy: disable-error-code="untyped-decorator"
# ruff: noqa: PLR0917

import torch
import triton
import triton.language as tl

from moeserve_kernels.tuning import Tuning, tuning_for

_GOLDEN: tl.constexpr = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1: tl.constexpr = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2: tl.constexpr = tl.constexpr(0x94D049BB133111EB)
_DIGIT_BITS: tl.constexpr = tl.constexpr(4)
_NUM_DIGITS: tl.constexpr = tl.constexpr(16)
_NUM_STEPS: tl.constexpr = tl.constexpr(8)
_NOISE_RANGE: tl.constexpr = tl.constexpr(41.0)
"""The largest noise is 36.7, the smallest -3.6: a token further below the best cannot win."""


@triton.jit
def _mix(x: tl.tensor) -> tl.tensor:
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    return x ^ (x >> 31)


@triton.jit
def _gumbel_noise(key: tl.tensor, token_ids: tl.tensor) -> tl.tensor:
    """Noise of some tokens of a row, as `torch_impl.gumbel_noise` defines it: float64 up to the first logarithm."""
    hashed = _mix(key + (token_ids + 1).to(tl.uint64) * _GOLDEN)
    uniform = ((hashed >> 12).to(tl.float64) + 0.5) * (1.0 / 4503599627370496.0)
    return -tl.log((-tl.log(uniform)).to(tl.float32))


@triton.jit
def _load_scaled(
    row: tl.tensor, start: tl.tensor, vocab_size: tl.tensor, temperature: tl.tensor, BLOCK_V: tl.constexpr
) -> tl.tensor:
    """(token ids, logits over temperature); -inf beyond the vocabulary. Adding 0 makes of -0.0 the zero it equals."""
    token_ids = start + tl.arange(0, BLOCK_V)
    values = tl.load(row + token_ids, mask=token_ids < vocab_size, other=float("-inf"))
    return token_ids, tl.div_rn(values, tl.zeros_like(values) + temperature) + 0.0


@triton.jit
def _ordered_bits(values: tl.tensor) -> tl.tensor:
    """uint32 that are ordered as the float32 values are."""
    bits = values.to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) != 0, ~bits, bits | 0x80000000)


@triton.jit
def _is_kept(keys: tl.tensor, token_ids: tl.tensor, cut_key: tl.tensor, last_id: tl.tensor) -> tl.tensor:
    return (keys > cut_key) | ((keys == cut_key) & (token_ids <= last_id))


@triton.jit
def _tail_sums(
    row: tl.tensor,
    vocab_size: tl.tensor,
    temperature: tl.tensor,
    best: tl.tensor,
    cut_key: tl.tensor,
    last_id: tl.tensor,
    pivots: tl.tensor,
    BY_MASS: tl.constexpr,
    NUM_PIVOTS: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> tl.tensor:
    """For each pivot the number (or mass) of the tokens inside the cut that are not below it, float64."""
    acc = tl.zeros((BLOCK_V, NUM_PIVOTS), tl.float32)
    for start in range(0, vocab_size, BLOCK_V):
        token_ids, values = _load_scaled(row, start, vocab_size, temperature, BLOCK_V)
        keys = _ordered_bits(values)
        is_inside = (token_ids < vocab_size) & _is_kept(keys, token_ids, cut_key, last_id)
        weights = tl.exp(values - best) if BY_MASS else tl.full((BLOCK_V,), 1.0, tl.float32)
        weights = tl.where(is_inside, weights, 0.0)
        acc += tl.where(keys[:, None] >= pivots[None, :], weights[:, None], 0.0)
    return tl.sum(acc.to(tl.float64), axis=0)


@triton.jit
def _find_cut(
    row: tl.tensor,
    vocab_size: tl.tensor,
    temperature: tl.tensor,
    best: tl.tensor,
    cut_key: tl.tensor,
    last_id: tl.tensor,
    target: tl.tensor,
    BY_MASS: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> tl.tensor:
    """(key, last id) of the smallest set of best tokens inside the old cut whose number (or mass) is the target."""
    digits = tl.arange(0, _NUM_DIGITS).to(tl.uint32)
    key = tl.zeros((), tl.uint32)
    for step in range(_NUM_STEPS):
        shift = (_NUM_STEPS - 1 - step) * _DIGIT_BITS
        tail = _tail_sums(
            row, vocab_size, temperature, best, cut_key, last_id, key + (digits << shift.to(tl.uint32)),
            BY_MASS, _NUM_DIGITS, BLOCK_V,
        )  # fmt: skip
        digit = tl.maximum(tl.sum((tail >= target).to(tl.int32), axis=0) - 1, 0)
        key += digit.to(tl.uint32) << shift.to(tl.uint32)
    above = tl.sum(
        _tail_sums(
            row, vocab_size, temperature, best, cut_key, last_id, key + 1 + tl.zeros((1,), tl.uint32),
            BY_MASS, 1, BLOCK_V,
        ),
        axis=0,
    )  # fmt: skip
    share = 1.0
    if BY_MASS:
        bits = tl.where((key >> 31) != 0, key & 0x7FFFFFFF, ~key)
        share = tl.maximum(tl.exp(bits.to(tl.float32, bitcast=True) - best), 1e-38)
    num_equal = tl.minimum(tl.maximum(tl.ceil((target - above) / share), 1.0), vocab_size * 1.0).to(tl.int32)
    num_seen = 0
    new_last_id = vocab_size
    for start in range(0, vocab_size, BLOCK_V):
        token_ids, values = _load_scaled(row, start, vocab_size, temperature, BLOCK_V)
        is_equal = (_ordered_bits(values) == key) & (token_ids < vocab_size)
        place = num_seen + tl.cumsum(is_equal.to(tl.int32), axis=0)
        found = tl.min(tl.where(is_equal & (place == num_equal), token_ids, vocab_size), axis=0)
        new_last_id = tl.minimum(new_last_id, found)
        num_seen += tl.sum(is_equal.to(tl.int32), axis=0)
    return key, new_last_id


@triton.jit
def _sample_kernel(
    logits: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    seed: tl.tensor,
    position: tl.tensor,
    sampled: tl.tensor,
    vocab_size: tl.tensor,
    stride_row: tl.tensor,
    BLOCK_V: tl.constexpr,
    BLOCK_SEARCH: tl.constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64)
    row = logits + place * stride_row
    heat = tl.load(temperature + place)
    is_random = heat > 0.0
    heat = tl.where(is_random, heat, 1.0)
    highest = tl.full((BLOCK_V,), float("-inf"), tl.float32)
    for start in range(0, vocab_size, BLOCK_V):
        _, values = _load_scaled(row, start, vocab_size, heat, BLOCK_V)
        highest = tl.maximum(highest, values)
    best = tl.max(highest, axis=0)

    cut_key = tl.zeros((), tl.uint32)
    last_id = vocab_size
    floor = best
    noise_key = tl.zeros((), tl.uint64)
    if is_random:
        limit = tl.load(top_k + place)
        if (limit > 0) & (limit < vocab_size):
            cut_key, last_id = _find_cut(
                row, vocab_size, heat, best, cut_key, last_id, limit.to(tl.float64), False, BLOCK_SEARCH
            )
        mass = tl.load(top_p + place)
        if mass < 1.0:
            everything = _tail_sums(
                row, vocab_size, heat, best, cut_key, last_id, tl.zeros((1,), tl.uint32), True, 1, BLOCK_SEARCH
            )
            # The best token, whose mass is 1, always stays.
            target = tl.maximum(mass.to(tl.float64) * tl.sum(everything, axis=0), 1e-30)
            cut_key, last_id = _find_cut(row, vocab_size, heat, best, cut_key, last_id, target, True, BLOCK_SEARCH)
        share = tl.load(min_p + place)
        floor = best - _NOISE_RANGE
        if share > 0.0:
            floor = tl.maximum(floor, best + tl.log(share))
        noise_key = _mix(tl.load(seed + place).to(tl.uint64) + _GOLDEN)
        noise_key = _mix(noise_key + tl.load(position + place).to(tl.uint64) * _GOLDEN)

    winning = tl.full((), float("-inf"), tl.float32)
    winner = tl.zeros((), tl.int32)
    for start in range(0, vocab_size, BLOCK_V):
        token_ids, values = _load_scaled(row, start, vocab_size, heat, BLOCK_V)
        is_candidate = _is_kept(_ordered_bits(values), token_ids, cut_key, last_id) & (values >= floor)
        scores = tl.where(is_candidate, values, float("-inf"))
        highest_here = tl.max(scores, axis=0)
        if is_random & (highest_here > float("-inf")):
            scores += _gumbel_noise(noise_key, token_ids)
            highest_here = tl.max(scores, axis=0)
        first = tl.min(tl.where(scores == highest_here, token_ids, vocab_size), axis=0)
        winner = tl.where(highest_here > winning, first, winner)
        winning = tl.maximum(winning, highest_here)
    tl.store(sampled + place, winner.to(tl.int64))


def sample(
    logits_RV: torch.Tensor,
    *,
    temperature_R: torch.Tensor,
    top_k_R: torch.Tensor,
    top_p_R: torch.Tensor,
    min_p_R: torch.Tensor,
    seed_R: torch.Tensor,
    position_R: torch.Tensor,
    tuning: Tuning | None = None,
) -> torch.Tensor:
    """As the op; a row in which no logit is a number gives token 0."""
    num_rows, vocab_size = logits_RV.shape
    if logits_RV.stride(1) != 1:
        logits_RV = logits_RV.contiguous()
    sampled = torch.empty(num_rows, dtype=torch.int64, device=logits_RV.device)
    if num_rows > 0:
        config = (tuning or tuning_for("sampling", logits_RV.device))["any"]
        settings = (temperature_R, top_k_R, top_p_R, min_p_R, seed_R, position_R)
        _sample_kernel[(num_rows,)](
            logits_RV, *(x.contiguous() for x in settings), sampled, vocab_size, logits_RV.stride(0), **config
        )
    return sampled
