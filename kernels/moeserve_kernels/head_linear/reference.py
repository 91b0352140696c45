"""Oracle of head_linear: one token and one head at a time, in float64."""

import torch


def head_linear_reference(x_THi: torch.Tensor, weight_Hoi: torch.Tensor) -> torch.Tensor:
    """As `head_linear`, float64."""
    num_tokens, num_heads, _ = x_THi.shape
    out = torch.zeros(num_tokens, num_heads, weight_Hoi.shape[1], dtype=torch.float64)
    for token in range(num_tokens):
        for head in range(num_heads):
            out[token, head] = weight_Hoi[head].double() @ x_THi[token, head].double()
    return out
