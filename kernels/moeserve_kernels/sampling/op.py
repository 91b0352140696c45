"""Sampling by the Gumbel-max trick: argmax(logits / temperature + noise) is a draw from the softmax.

The noise is a hash of (seed, position, token id), so a request draws the same tokens alone, in any batch, on any rank
and after a restart. Every row has its own parameters.
"""

from typing import Any

import torch

from moeserve_kernels.backend import Backend, choose_backend
from moeserve_kernels.native import is_loaded
from moeserve_kernels.sampling import torch_impl


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
    backend: Backend | None = None,
) -> None:
    """Change the rows `rows_r` of the float32 logits in place; tokens that a row has not seen keep their logits.

    token_ids[start_loc[i] : start_loc[i + 1]] are the tokens of row rows_r[i], the first num_prompt_tokens_r[i] of them
    its prompt, the others its output; all are int64 and in the vocabulary. repetition: logits of tokens of prompt or
    output are divided by it where positive, multiplied where negative (arXiv 1909.05858). presence is taken once,
    frequency for every occurrence, from tokens of the output.
    """
    assert logits_RV.dtype == torch.float32
    assert start_loc.shape == (len(rows_r) + 1,)
    chosen = choose_backend(logits_RV.device, backend, has_native=is_loaded())
    if chosen == "cpu":
        torch.ops.moeserve.apply_penalties.default(
            logits_RV,
            rows_r,
            token_ids,
            start_loc,
            num_prompt_tokens_r,
            presence_penalty_r,
            frequency_penalty_r,
            repetition_penalty_r,
        )
        return
    torch_impl.apply_penalties(
        logits_RV,
        rows_r=rows_r,
        token_ids=token_ids,
        start_loc=start_loc,
        num_prompt_tokens_r=num_prompt_tokens_r,
        presence_penalty_r=presence_penalty_r,
        frequency_penalty_r=frequency_penalty_r,
        repetition_penalty_r=repetition_penalty_r,
    )


def sample(
    logits_RV: torch.Tensor,
    *,
    temperature_R: torch.Tensor,
    top_k_R: torch.Tensor,
    top_p_R: torch.Tensor,
    min_p_R: torch.Tensor,
    seed_R: torch.Tensor,
    position_R: torch.Tensor,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Token ids [R], int64. Rows of temperature 0 take the most likely token, the lowest id where several are.

    logits_RV: float32, penalties and biases applied. temperature, top_p and min_p are float32; top_k, seed and position
    (the place in the sequence of the token to be drawn) int64. Temperature comes first, then top_k: the k best tokens
    (0: all); then top_p: of those, the smallest set of best tokens whose mass is at least top_p; then min_p: of those,
    tokens at least min_p times as likely as the best; then the noise. Lower ids win ties at the edge of top_k and
    top_p; the best token always stays.
    """
    assert logits_RV.dtype == torch.float32
    assert seed_R.dtype == position_R.dtype == torch.int64
    chosen = choose_backend(logits_RV.device, backend, has_native=is_loaded())
    settings: dict[str, Any] = {
        "temperature_R": temperature_R,
        "top_k_R": top_k_R,
        "top_p_R": top_p_R,
        "min_p_R": min_p_R,
        "seed_R": seed_R,
        "position_R": position_R,
    }
    if chosen == "cpu":
        return torch.ops.moeserve.sample.default(logits_RV, *settings.values())
    if chosen == "triton":
        from moeserve_kernels.sampling import triton as triton_impl

        return triton_impl.sample(logits_RV, **settings)
    return torch_impl.sample(logits_RV, **settings)
