"""Oracle of rotary: complex multiplication, one pair at a time."""

import torch


def rotary_reference(
    x_THD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """As `rotary`, float64."""
    out = x_THD.double().clone()
    num_tokens, num_heads, _ = x_THD.shape
    num_pairs = cos_TR.shape[1]
    for token in range(num_tokens):
        for head in range(num_heads):
            for pair in range(num_pairs):
                a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + num_pairs)
                number = complex(float(x_THD[token, head, a]), float(x_THD[token, head, b]))
                turned = number * complex(float(cos_TR[token, pair]), float(sin_TR[token, pair]))
                out[token, head, a], out[token, head, b] = turned.real, turned.imag
    return out
