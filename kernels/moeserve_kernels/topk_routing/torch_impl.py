"""Top-k routing in plain torch."""

import torch


def topk_routing(
    logits_TE: torch.Tensor,
    *,
    top_k: int,
    scoring: str,
    renormalize: bool,
    scaling_factor: float,
    num_groups: int,
    num_selected_groups: int,
    group_score: str,
    correction_bias_E: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights_TK, expert_ids_TK) as the op; which of equal experts is chosen is torch's choice."""
    logits_TE = logits_TE.float()
    if scoring == "topk_softmax":
        best_TK, expert_ids_TK = logits_TE.topk(top_k, dim=-1)
        return best_TK.softmax(dim=-1) * scaling_factor, expert_ids_TK
    scores_TE = logits_TE.softmax(dim=-1) if scoring == "softmax" else logits_TE.sigmoid()
    choice_TE = scores_TE if correction_bias_E is None else scores_TE + correction_bias_E.float()
    if num_groups > 1:
        choice_TE = _mask_groups(choice_TE, num_groups, num_selected_groups, group_score)
    expert_ids_TK = choice_TE.topk(top_k, dim=-1).indices
    weights_TK = scores_TE.gather(1, expert_ids_TK)
    if renormalize:
        weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + 1e-20)  # sigmoids may all be 0
    return weights_TK * scaling_factor, expert_ids_TK


def _mask_groups(choice_TE: torch.Tensor, num_groups: int, num_selected_groups: int, group_score: str) -> torch.Tensor:
    """-inf for every expert outside the token's best groups."""
    grouped_TGE = choice_TE.view(len(choice_TE), num_groups, choice_TE.shape[1] // num_groups)
    best_TGK = grouped_TGE.topk(1 if group_score == "max" else 2, dim=-1).values
    selected_TG = best_TGK.sum(dim=-1).topk(num_selected_groups, dim=-1).indices
    masked_TG = torch.ones(grouped_TGE.shape[:2], dtype=torch.bool, device=choice_TE.device)
    masked_TG.scatter_(1, selected_TG, False)
    return grouped_TGE.masked_fill(masked_TG.unsqueeze(-1), -torch.inf).flatten(1)


def drop_padding(
    expert_ids_TK: torch.Tensor, num_real_tokens_1: torch.Tensor, num_counted_tokens: int, load_E: torch.Tensor | None
) -> torch.Tensor:
    """The choices with those of padding replaced by -1, and the others counted; the host learns nothing."""
    token_T1 = torch.arange(len(expert_ids_TK), device=expert_ids_TK.device).unsqueeze(1)
    is_real_T1 = token_T1 < num_real_tokens_1
    if load_E is not None:
        is_counted_T1 = is_real_T1 & (token_T1 < num_counted_tokens)
        load_E.scatter_add_(0, expert_ids_TK.flatten(), is_counted_T1.expand_as(expert_ids_TK).flatten().long())
    return expert_ids_TK.masked_fill(~is_real_T1, -1)
