"""Dense gated MLP, its width split over the tensor-parallel ranks."""

from dataclasses import dataclass

import torch

from moeserve.layers.forward_batch import ForwardBatch
from moeserve.layers.linear import Linear, merged_column_linear, row_linear
from moeserve.models.parameters import ParameterReader
from moeserve.parallel import Group, ParallelContext, shard_range
from moeserve_kernels import silu_and_mul


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """down(silu(gate(x)) * up(x))."""

    gate_up_proj: Linear
    down_proj: Linear
    group: Group

    @staticmethod
    def build(reader: ParameterReader, prefix: str, *, intermediate_size: int, parallel: ParallelContext) -> "DenseMlp":
        """Read this rank's part of `prefix.gate_proj`, `up_proj` and `down_proj`."""
        width = shard_range(intermediate_size, parallel.tp.size, parallel.tp.rank)
        parts = {f"{prefix}.{name}": width for name in ("gate_proj", "up_proj")}
        gate_up = merged_column_linear(reader, parts, parallel.device)
        down = row_linear(reader, f"{prefix}.down_proj", width, parallel.device)
        return DenseMlp(gate_up, down, parallel.tp)

    def forward(self, hidden_TD: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """[T, D] on every rank of the group."""
        return self.group.all_reduce(self.forward_partial(hidden_TD))

    def forward_partial(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        """This rank's addend of `forward`, for callers that reduce it together with another."""
        return self.down_proj.forward(silu_and_mul(self.gate_up_proj.forward(hidden_TD)))
