"""Linear layer: x W^T + b."""

import torch

from moeserve_kernels.linear import torch_impl
from moeserve_kernels.linear.packed import PackedLinear


def linear(x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
    """[..., in] to [..., out], in the dtype of x, summed in float32 by the backend the weight was packed for.

    cpu: a row's result does not depend on the other rows, to the bit. That cannot be said of torch, whose matrix
    products choose their order of summation by shape.
    """
    assert x.dtype == packed.dtype, f"packed for inputs of {packed.dtype}, got {x.dtype}"
    assert x.shape[-1] == packed.num_inputs, f"packed for {packed.num_inputs} inputs, got {tuple(x.shape)}"
    if packed.backend == "cpu":
        return torch.ops.moeserve.linear.default(x, packed.weight, packed.num_outputs, packed.scale, packed.bias)
    return torch_impl.linear(x, packed.weight, packed.scale, packed.bias)
