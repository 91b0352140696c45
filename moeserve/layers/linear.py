"""Linear layers and the shards of them that a tensor-parallel rank holds."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from moeserve.models.parameters import ParameterReader
from moeserve_kernels import PackedLinear, Quantization, linear, pack_linear


@dataclass(frozen=True, slots=True)
class Linear:
    """x W^T + b."""

    packed: PackedLinear

    @staticmethod
    def build(
        weight: torch.Tensor, bias: torch.Tensor | None = None, *, quantization: Quantization | None = None
    ) -> "Linear":
        """From [out, in] and [out] on the layer's device; the weight is packed and not kept."""
        return Linear(pack_linear(weight, bias, quantization=quantization))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] to [..., out]."""
        return linear(x, self.packed)


def column_linear(
    reader: ParameterReader, name: str, rows: slice, device: torch.device, *, bias: bool = False
) -> Linear:
    """The part of `name.weight` (and `name.bias`) that makes the outputs `rows`."""
    return merged_column_linear(reader, {name: rows}, device, bias=bias)


def merged_column_linear(
    reader: ParameterReader, parts: Mapping[str, slice], device: torch.device, *, bias: bool = False
) -> Linear:
    """One product instead of several with the same input: outputs `rows` of each name, side by side."""

    def read(kind: str) -> torch.Tensor:
        return torch.cat([reader.read(f"{name}.{kind}", rows) for name, rows in parts.items()]).to(device)

    return Linear.build(read("weight"), read("bias") if bias else None, quantization=reader.quantization)


def row_linear(
    reader: ParameterReader,
    name: str,
    columns: slice,
    device: torch.device,
    *,
    adds_bias: bool = False,
) -> Linear:
    """The part of `name.weight` that takes the inputs `columns`; outputs of the ranks add up.

    adds_bias: true on one rank of the group at most, so that the sum holds the bias once.
    """
    weight = reader.read(f"{name}.weight", slice(None), columns).to(device)
    bias = reader.read(f"{name}.bias").to(device) if adds_bias else None
    return Linear.build(weight, bias, quantization=reader.quantization)
