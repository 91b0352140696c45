"""Products of heads: out[t, h] = weight[h] x[t, h]."""

import torch

from moeserve_kernels.head_linear import torch_impl
from moeserve_kernels.head_linear.packed import PackedHeads


def head_linear(x_THi: torch.Tensor, packed: PackedHeads, *, out_THo: torch.Tensor | None = None) -> torch.Tensor:
    """[T, H, in] to [T, H, out], in the dtype of x, summed in float32 by the backend the weights were packed for.

    out_THo: where to write, such as a part of a wider tensor; by default a new one. A head of either lies in one piece.
    cpu: a row's result does not depend on the other rows, to the bit.
    """
    assert x_THi.shape[1:] == (packed.num_heads, packed.num_inputs), f"packed for other heads: {tuple(x_THi.shape)}"
    assert x_THi.dtype == packed.weight.dtype, f"packed for {packed.weight.dtype}, got {x_THi.dtype}"
    if out_THo is None:
        out_THo = x_THi.new_empty(len(x_THi), packed.num_heads, packed.num_outputs)
    assert out_THo.shape == (len(x_THi), packed.num_heads, packed.num_outputs)
    if packed.backend == "cpu":
        torch.ops.moeserve.head_linear.default(x_THi, packed.weight, out_THo)
    else:
        torch_impl.head_linear(x_THi, packed.weight, out_THo)
    return out_THo
