"""Sampling in plain torch; a filter costs nothing where no row asks for it."""

import torch

# Weyl increments and the finaliser of splitmix64 (Steele, Lea, Flood 2014; Stafford's variant 13), as signed 64 bits.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
_UNIFORM_BITS = 52
"""(k + 1/2) / 2 ** 52 is exact in float64 and never 0 or 1."""
_NUM_CANDIDATES = 256
"""So many best tokens decide nearly every top_k and top_p, at a fraction of the time of sorting a vocabulary."""


def gumbel_noise(seed_R: torch.Tensor, position_R: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[R, V] float32 of standard Gumbel noise, a pure function of (seed, position, token id).

    seed_R, position_R: int64; position is the place in the sequence of the token to be drawn.
    """
    assert seed_R.dtype == position_R.dtype == torch.int64
    assert seed_R.shape == position_R.shape
    key_R = _mix_(_mix_(seed_R + _GOLDEN) + position_R * _GOLDEN)
    token_ids_V = torch.arange(1, vocab_size + 1, device=seed_R.device)
    hashed_RV = _mix_(key_R.unsqueeze(1) + token_ids_V * _GOLDEN)
    bits_RV = _shift_right(hashed_RV, 64 - _UNIFORM_BITS, out=hashed_RV)
    uniform_RV = bits_RV.double().add_(0.5).mul_(2.0**-_UNIFORM_BITS)
    exponential_RV = uniform_RV.log_().neg_().float()  # the step that needs the digits near u = 1
    return exponential_RV.log_().neg_()


def apply_penalties(
    logits_RV: torch.Tensor,
    *,
    rows_r: torch.Tensor,
    token_ids: torch.Tensor,
    start_loc: torch.Tensor,
    num_prompt_tokens_r: torch.Tensor,
    presence_penalty_r: torch.Tensor,
    frequency_penalty_r: torch.Tensor,
    repetition_penalty_r: torch.Tensor,
) -> None:
    """As the op."""
    lens_r = start_loc.diff()
    row_of_token = torch.arange(len(rows_r), device=rows_r.device).repeat_interleave(lens_r)
    place = torch.arange(len(token_ids), device=rows_r.device) - start_loc[:-1].repeat_interleave(lens_r)
    is_output = place >= num_prompt_tokens_r.repeat_interleave(lens_r)
    shape = (len(rows_r), logits_RV.shape[1])
    index = row_of_token * shape[1] + token_ids
    seen_rV = torch.bincount(index, minlength=shape[0] * shape[1]).view(shape) > 0
    counts_rV = torch.bincount(index[is_output], minlength=shape[0] * shape[1]).view(shape)
    logits_rV = logits_RV[rows_r]
    repetition_r1 = repetition_penalty_r.unsqueeze(1)
    repeated_rV = torch.where(logits_rV > 0, logits_rV / repetition_r1, logits_rV * repetition_r1)
    logits_RV[rows_r] = (
        torch.where(seen_rV, repeated_rV, logits_rV)
        - frequency_penalty_r.unsqueeze(1) * counts_rV
        - presence_penalty_r.unsqueeze(1) * (counts_rV > 0)
    )


def filter_logits(
    logits_RV: torch.Tensor, *, top_k_R: torch.Tensor, top_p_R: torch.Tensor, min_p_R: torch.Tensor
) -> torch.Tensor:
    """Logits with every token outside the row's filters at -inf; at least the best token stays.

    top_k: the k best (0: all). top_p: of those, the smallest set of best tokens whose mass is at least top_p. min_p: of
    those, tokens at least min_p times as likely as the best. Lower ids win ties at the edge of top_k and top_p.
    """
    cut_rows = (((top_k_R > 0) & (top_k_R < logits_RV.shape[1])) | (top_p_R < 1.0)).nonzero().squeeze(1)
    for width in (min(_NUM_CANDIDATES, logits_RV.shape[1]), logits_RV.shape[1]):
        if len(cut_rows) > 0:
            kept_rV, decided_r = _cut(logits_RV[cut_rows], width, top_k_R[cut_rows], top_p_R[cut_rows])
            logits_RV = logits_RV.index_copy(0, cut_rows[decided_r], kept_rV[decided_r])
            cut_rows = cut_rows[~decided_r]
    floored_rows = (min_p_R > 0.0).nonzero().squeeze(1)
    if len(floored_rows) > 0:
        logits_rV = logits_RV[floored_rows]
        floor_r1 = logits_rV.amax(dim=1, keepdim=True) + min_p_R[floored_rows].log().unsqueeze(1)
        logits_RV = logits_RV.index_copy(0, floored_rows, logits_rV.masked_fill(logits_rV < floor_r1, -torch.inf))
    return logits_RV


def sample(
    logits_RV: torch.Tensor,
    *,
    temperature_R: torch.Tensor,
    top_k_R: torch.Tensor,
    top_p_R: torch.Tensor,
    min_p_R: torch.Tensor,
    seed_R: torch.Tensor,
    position_R: torch.Tensor,
) -> torch.Tensor:
    """As the op."""
    random_rows = (temperature_R > 0.0).nonzero().squeeze(1)
    if len(random_rows) > 0:
        scaled_rV = logits_RV[random_rows] / temperature_R[random_rows].unsqueeze(1)
        kept_rV = filter_logits(
            scaled_rV, top_k_R=top_k_R[random_rows], top_p_R=top_p_R[random_rows], min_p_R=min_p_R[random_rows]
        )
        noise_rV = gumbel_noise(seed_R[random_rows], position_R[random_rows], logits_RV.shape[1])
        logits_RV = logits_RV.index_copy(0, random_rows, kept_rV + noise_rV)
    return _lowest_argmax(logits_RV)


def _cut(
    logits_RV: torch.Tensor, width: int, top_k_R: torch.Tensor, top_p_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits after top_k and top_p, whether the row's `width` best tokens were enough to tell)."""
    vocab_size = logits_RV.shape[1]
    best_RC = logits_RV.topk(width, dim=1).values
    limit_R1 = torch.where(top_k_R > 0, top_k_R.clamp(max=vocab_size), vocab_size).unsqueeze(1)
    in_top_k_RC = torch.arange(width, device=logits_RV.device) < limit_R1
    powers_RC = (best_RC - best_RC[:, :1]).exp().double() * in_top_k_RC
    everything_R1 = (logits_RV - best_RC[:, :1]).exp().sum(dim=1, keepdim=True, dtype=torch.float64)
    total_R1 = torch.where(limit_R1 < vocab_size, powers_RC.sum(dim=1, keepdim=True), everything_R1)
    mass_before_RC = (powers_RC.cumsum(dim=1) - powers_RC) / total_R1
    in_top_p_RC = (mass_before_RC < top_p_R.unsqueeze(1)) | (top_p_R >= 1.0).unsqueeze(1)
    num_kept_R1 = (in_top_k_RC & in_top_p_RC).sum(dim=1, keepdim=True).clamp(min=1)
    decided_R1 = (limit_R1 <= width) | ((limit_R1 == vocab_size) & (num_kept_R1 < width))
    return _keep_best(logits_RV, best_RC.gather(1, num_kept_R1 - 1), num_kept_R1), decided_R1.squeeze(1)


def _keep_best(logits_RV: torch.Tensor, worst_kept_R1: torch.Tensor, num_kept_R1: torch.Tensor) -> torch.Tensor:
    """-inf for all but the num_kept best tokens, the lowest ids of those that are equal to the worst of them."""
    above_RV = logits_RV > worst_kept_R1
    equal_RV = logits_RV == worst_kept_R1
    num_equal_kept_R1 = num_kept_R1 - above_RV.sum(dim=1, keepdim=True)
    kept_RV = above_RV | (equal_RV & (equal_RV.cumsum(dim=1) <= num_equal_kept_R1))
    return logits_RV.masked_fill(~kept_RV, -torch.inf)


def _lowest_argmax(x_RV: torch.Tensor) -> torch.Tensor:
    """torch.argmax does not say which of equal maxima it returns. 0 for a row in which nothing is a number."""
    ids_V = torch.arange(x_RV.shape[1], device=x_RV.device)
    return torch.where(x_RV == x_RV.amax(dim=1, keepdim=True), ids_V, x_RV.shape[1]).amin(dim=1) % x_RV.shape[1]


def _mix_(x: torch.Tensor) -> torch.Tensor:
    """A bijection of 64 bits in which every input bit reaches every output bit, in place. Products wrap around."""
    shifted = torch.empty_like(x)
    x.bitwise_xor_(_shift_right(x, 30, out=shifted)).mul_(_MIX_1)
    x.bitwise_xor_(_shift_right(x, 27, out=shifted)).mul_(_MIX_2)
    return x.bitwise_xor_(_shift_right(x, 31, out=shifted))


def _shift_right(x: torch.Tensor, bits: int, *, out: torch.Tensor) -> torch.Tensor:
    """Logical shift: torch's own copies the sign bit in."""
    return torch.bitwise_right_shift(x, bits, out=out).bitwise_and_((1 << (64 - bits)) - 1)
