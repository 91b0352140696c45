"""Log-probabilities of given tokens and of the most likely ones, from the model's own logits."""

from collections.abc import Sequence

import torch

from moeserve.engine.outputs import TokenLogprobs


def token_logprobs(logits_RV: torch.Tensor, token_ids_R: torch.Tensor, num_top: Sequence[int]) -> list[TokenLogprobs]:
    """One record for each row: its token's log-probability and rank, and the `num_top[row]` most likely tokens.

    Computed in float32. Ranks count the strictly more likely tokens, so that tokens alike share a rank.
    """
    logprobs_RV = torch.log_softmax(logits_RV.float(), dim=-1)
    chosen_R1 = logprobs_RV.gather(1, token_ids_R[:, None])
    ranks = ((logprobs_RV > chosen_R1).sum(dim=1) + 1).tolist()
    top_values, top_ids = logprobs_RV.topk(min(max(num_top, default=0), logprobs_RV.shape[1]), dim=1)
    rows = zip(
        token_ids_R.tolist(),
        chosen_R1[:, 0].tolist(),
        ranks,
        top_ids.tolist(),
        top_values.tolist(),
        num_top,
        strict=True,
    )
    return [
        TokenLogprobs(token_id=token, logprob=logprob, rank=rank, top_token_ids=ids[:n], top_logprobs=values[:n])
        for token, logprob, rank, ids, values, n in rows
    ]
