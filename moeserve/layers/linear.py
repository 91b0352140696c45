"""Linear layers and the shards of them that a tensor-parallel rank holds."""

from dataclasses import dataclass

import torch

from moeserve.models.parameters import ParameterReader
from moeserve_kernels import linear


@dataclass(frozen=True, slots=True)
class Linear:
    """x W^T + b."""

    weight: torch.Tensor
    """[out, in]."""
    bias: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] to [..., out]."""
        return linear(x, self.weight, self.bias)


def column_linear(
    reader: ParameterReader, name: str, rows: slice, device: torch.device, *, bias: bool = False
) -> Linear:
    """The part of `name.weight` (and `name.bias`) that makes the outputs `rows`."""
    weight = reader.read(f"{name}.weight", rows).to(device)
    return Linear(weight, reader.read(f"{name}.bias", rows).to(device) if bias else None)


def merge_columns(parts: list[Linear]) -> Linear:
    """One product instead of several with the same input; outputs side by side. All or none have a bias."""
    biases = [part.bias for part in parts if part.bias is not None]
    assert len(biases) in (0, len(parts))
    return Linear(torch.cat([part.weight for part in parts]), torch.cat(biases) if biases else None)


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
    return Linear(weight, reader.read(f"{name}.bias").to(device) if adds_bias else None)
