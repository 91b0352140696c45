"""Top-k routing on GPUs: scores, groups, choice, weights and expert load of a tile of whole tokens in one pass.

Experts are laid out as groups padded to powers of two, in the order of their ids, so that of equal scores the leftmost
is the lower id. A token is scored and chosen alike in any batch; expert load is counted in integers, in any order.
"""
# mypy: disable-error-code="untyped-decorator"
# ruff: noqa: PLR0917

import torch
import triton
import triton.language as tl

from moeserve_kernels.tuning import Tuning, tuning_for

_SOFTMAX: tl.constexpr = tl.constexpr(0)
_SIGMOID: tl.constexpr = tl.constexpr(1)
_TOPK_SOFTMAX: tl.constexpr = tl.constexpr(2)
_SCORINGS = {"softmax": _SOFTMAX.value, "sigmoid": _SIGMOID.value, "topk_softmax": _TOPK_SOFTMAX.value}


@triton.jit
def _softmax(x: tl.tensor) -> tl.tensor:
    powers = tl.exp(x - tl.max(x, axis=1)[:, None])
    return powers / tl.sum(powers, axis=1)[:, None]


@triton.jit
def _mask_groups(
    choice: tl.tensor,
    num_selected: tl.tensor,
    BEST_TWO: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
) -> tl.tensor:
    """-inf for every expert outside the best groups of its token. BEST_TWO: groups are judged by their two best."""
    grouped = tl.reshape(choice, (BLOCK_T, BLOCK_G, BLOCK_S))
    score = tl.max(grouped, axis=2)
    if BEST_TWO:
        is_best = tl.arange(0, BLOCK_S)[None, None, :] == tl.argmax(grouped, axis=2)[:, :, None]
        score += tl.max(tl.where(is_best, float("-inf"), grouped), axis=2)
    groups = tl.arange(0, BLOCK_G)[None, :]
    is_selected = tl.zeros((BLOCK_T, BLOCK_G), tl.int1)
    for _ in range(num_selected):
        is_next = groups == tl.argmax(score, axis=1)[:, None]
        is_selected |= is_next
        score = tl.where(is_next, float("-inf"), score)
    return tl.reshape(tl.where(is_selected[:, :, None], grouped, float("-inf")), (BLOCK_T, BLOCK_G * BLOCK_S))


@triton.jit
def _topk_routing_kernel(
    logits: tl.tensor,
    bias: tl.tensor,
    weights: tl.tensor,
    expert_ids: tl.tensor,
    load: tl.tensor,
    num_real: tl.tensor,
    num_tokens: tl.tensor,
    num_counted: tl.tensor,
    num_experts: tl.tensor,
    group_size: tl.tensor,
    num_selected: tl.tensor,
    top_k: tl.tensor,
    stride_token: tl.tensor,
    scaling_factor: tl.tensor,
    SCORING: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    LIMIT_GROUPS: tl.constexpr,
    BEST_TWO: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    COUNT_LOAD: tl.constexpr,
    HAS_PADDING: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token = (tokens < num_tokens)[:, None]
    places = tl.arange(0, BLOCK_G * BLOCK_S)
    experts = places // BLOCK_S * group_size + places % BLOCK_S
    is_expert = (places % BLOCK_S < group_size) & (experts < num_experts)
    values = tl.load(
        logits + (tokens * stride_token)[:, None] + experts[None, :],
        mask=is_token & is_expert[None, :],
        other=float("-inf"),
    ).to(tl.float32)
    values = tl.where(is_token, values, 0.0)
    scores = values
    if SCORING == _SOFTMAX:
        scores = _softmax(values)
    elif SCORING == _SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-values))
    choice = scores
    if HAS_BIAS:
        choice += tl.load(bias + experts, mask=is_expert, other=0.0)[None, :]
    choice = tl.where(is_expert[None, :], choice, float("-inf"))
    if LIMIT_GROUPS:
        choice = _mask_groups(choice, num_selected, BEST_TWO, BLOCK_T, BLOCK_G, BLOCK_S)

    ks = tl.arange(0, BLOCK_K)
    chosen = tl.zeros((BLOCK_T, BLOCK_K), tl.int32)
    # What no k stands for weighs nothing, in a softmax over the chosen too.
    picked = tl.full((BLOCK_T, BLOCK_K), float("-inf") if SCORING == _TOPK_SOFTMAX else 0.0, tl.float32)
    is_taken = tl.zeros((BLOCK_T, BLOCK_G * BLOCK_S), tl.int1)
    for k in range(top_k):
        best = tl.argmax(choice, axis=1)
        is_best = places[None, :] == best[:, None]
        is_k = ks[None, :] == k
        chosen = tl.where(is_k, best[:, None], chosen)
        picked = tl.where(is_k, tl.sum(tl.where(is_best, scores, 0.0), axis=1)[:, None], picked)
        is_taken |= is_best
        choice = tl.where(is_best, float("-inf"), choice)
    if SCORING == _TOPK_SOFTMAX:
        picked = _softmax(picked)
    if RENORMALIZE:
        picked /= tl.sum(picked, axis=1)[:, None] + 1e-20  # sigmoids may all be 0
    chosen = chosen // BLOCK_S * group_size + chosen % BLOCK_S
    # A row of NaN chooses anything, but nothing outside the table.
    chosen = tl.minimum(chosen, num_experts - 1).to(tl.int64)
    is_counted = tokens < num_counted
    if HAS_PADDING:
        is_real = tokens < tl.load(num_real)
        chosen = tl.where(is_real[:, None], chosen, -1)
        is_counted &= is_real
    out = (tokens * top_k)[:, None] + ks[None, :]
    is_out = is_token & (ks < top_k)[None, :]
    tl.store(weights + out, picked * scaling_factor, mask=is_out)
    tl.store(expert_ids + out, chosen, mask=is_out)
    if COUNT_LOAD:
        counts = tl.sum((is_taken & is_counted[:, None]).to(tl.int64), axis=0)
        tl.atomic_add(load + experts, counts, mask=is_expert & (counts > 0), sem="relaxed")


def topk_routing(
    logits_TE: torch.Tensor,
    *,
    top_k: int,
    scoring: str,
    renormalize: bool,
    scaling_factor: float = 1.0,
    num_groups: int = 1,
    num_selected_groups: int = 1,
    group_score: str = "max",
    correction_bias_E: torch.Tensor | None = None,
    load_E: torch.Tensor | None = None,
    num_counted_tokens: int | None = None,
    num_real_tokens_1: torch.Tensor | None = None,
    tuning: Tuning | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the op; of experts with equal scores the lowest id is chosen."""
    num_tokens, num_experts = logits_TE.shape
    group_size = num_experts // num_groups
    weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=logits_TE.device)
    expert_ids = torch.empty(num_tokens, top_k, dtype=torch.int64, device=logits_TE.device)
    if num_tokens == 0:
        return weights, expert_ids
    if logits_TE.stride(1) != 1:
        logits_TE = logits_TE.contiguous()
    config = dict((tuning or tuning_for("topk_routing", logits_TE.device))["any"])
    block_g, block_s = triton.next_power_of_2(num_groups), triton.next_power_of_2(group_size)
    block_t = max(config.pop("TILE") // (block_g * block_s), 1)
    _topk_routing_kernel[(triton.cdiv(num_tokens, block_t),)](
        logits_TE,
        weights if correction_bias_E is None else correction_bias_E,
        weights,
        expert_ids,
        expert_ids if load_E is None else load_E,
        expert_ids if num_real_tokens_1 is None else num_real_tokens_1,
        num_tokens,
        num_tokens if num_counted_tokens is None else num_counted_tokens,
        num_experts,
        group_size,
        num_selected_groups,
        top_k,
        logits_TE.stride(0),
        scaling_factor,
        SCORING=_SCORINGS[scoring],
        HAS_BIAS=correction_bias_E is not None,
        LIMIT_GROUPS=num_groups > 1,
        BEST_TWO=group_score == "top2_sum",
        RENORMALIZE=renormalize,
        COUNT_LOAD=load_E is not None,
        HAS_PADDING=num_real_tokens_1 is not None,
        BLOCK_T=block_t,
        BLOCK_G=block_g,
        BLOCK_S=block_s,
        BLOCK_K=triton.next_power_of_2(top_k),
        **config,
    )
    return weights, expert_ids
