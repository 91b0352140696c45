"""Rotary embedding in plain torch."""

import torch


def rotary(x_THD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """As the op."""
    num_pairs = cos_TR.shape[-1]
    first, second = _halves(x_THD, num_pairs, interleaved)
    wide_first, wide_second = first.float(), second.float()
    cos_T1R, sin_T1R = cos_TR.unsqueeze(1), sin_TR.unsqueeze(1)
    out = x_THD.clone(memory_format=torch.contiguous_format)
    out_first, out_second = _halves(out, num_pairs, interleaved)
    out_first.copy_(wide_first * cos_T1R - wide_second * sin_T1R)
    out_second.copy_(wide_second * cos_T1R + wide_first * sin_T1R)
    return out


def _halves(x_THD: torch.Tensor, num_pairs: int, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the first and the second members of the pairs."""
    if interleaved:
        return x_THD[..., 0 : 2 * num_pairs : 2], x_THD[..., 1 : 2 * num_pairs : 2]
    return x_THD[..., :num_pairs], x_THD[..., num_pairs : 2 * num_pairs]
