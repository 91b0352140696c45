"""Oracle of topk_routing: one token at a time, sorting in Python."""

import math

import torch


def topk_routing_reference(
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `topk_routing`, float64; the lower id wins a tie."""
    weights, ids = [], []
    bias = [0.0] * logits_TE.shape[1] if correction_bias_E is None else correction_bias_E.tolist()
    for logits in logits_TE.double().tolist():
        scores = logits if scoring == "topk_softmax" else _scores(logits, scoring)
        choice = [score + b for score, b in zip(scores, bias, strict=True)]
        allowed = _allowed(choice, num_groups, num_selected_groups, group_score)
        chosen = sorted(allowed, key=lambda expert: (-choice[expert], expert))[:top_k]
        picked = [scores[expert] for expert in chosen]
        if scoring == "topk_softmax":
            picked = _scores(picked, "softmax")
        if renormalize:
            picked = [weight / sum(picked) for weight in picked]
        weights.append([weight * scaling_factor for weight in picked])
        ids.append(chosen)
    return torch.tensor(weights, dtype=torch.float64), torch.tensor(ids)


def _scores(logits: list[float], scoring: str) -> list[float]:
    if scoring == "sigmoid":
        return [1.0 / (1.0 + math.exp(-logit)) for logit in logits]
    powers = [math.exp(logit - max(logits)) for logit in logits]
    return [power / sum(powers) for power in powers]


def _allowed(choice: list[float], num_groups: int, num_selected: int, group_score: str) -> list[int]:
    size = len(choice) // num_groups
    members = [list(range(group * size, (group + 1) * size)) for group in range(num_groups)]
    best = 1 if group_score == "max" else 2
    totals = [sum(sorted((choice[expert] for expert in group), reverse=True)[:best]) for group in members]
    selected = sorted(range(num_groups), key=lambda group: (-totals[group], group))[:num_selected]
    return [expert for group in selected for expert in members[group]]
