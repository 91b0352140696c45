"""Products of heads in plain torch."""

import torch


def head_linear(x_THi: torch.Tensor, weight_Hio: torch.Tensor, out_THo: torch.Tensor) -> None:
    """As the op."""
    x_HTi = x_THi.transpose(0, 1)
    if x_THi.device.type == "cpu":  # halves are slower than floats there, where they can be multiplied at all
        x_HTi, weight_Hio = x_HTi.float(), weight_Hio.float()
    out_THo.copy_(torch.bmm(x_HTi, weight_Hio).transpose(0, 1))
