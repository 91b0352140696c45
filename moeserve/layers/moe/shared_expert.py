"""The shared experts of an MoE layer: one dense MLP that every token runs, split over the tensor-parallel ranks."""

from dataclasses import dataclass

import torch

from moeserve.layers.linear import Linear
from moeserve.layers.mlp import DenseMlp
from moeserve.models.parameters import ParameterReader
from moeserve.models.spec import MoeSpec
from moeserve.parallel import ParallelContext


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedExpert:
    """The shared experts side by side as one MLP, scaled by a gate where the model has one (Qwen2-MoE)."""

    mlp: DenseMlp
    gate: Linear | None

    @staticmethod
    def load(spec: MoeSpec, reader: ParameterReader, prefix: str, parallel: ParallelContext) -> "SharedExpert":
        """Read this rank's part of `prefix.shared_expert`, and `prefix.shared_gate` whole."""
        mlp = DenseMlp.build(
            reader,
            f"{prefix}.shared_expert",
            intermediate_size=spec.shared_intermediate_size,
            parallel=parallel,
        )
        return SharedExpert(mlp=mlp, gate=_load_gate(reader, prefix, parallel) if spec.shared_gate else None)

    def forward(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        """This tp rank's addend [T, D]; the caller reduces it together with the routed experts' sum."""
        partial_TD = self.mlp.forward_partial(hidden_TD)
        return partial_TD if self.gate is None else partial_TD * self.gate.forward(hidden_TD).sigmoid()


def _load_gate(reader: ParameterReader, prefix: str, parallel: ParallelContext) -> Linear:
    """One output: too little to be worth quantizing."""
    return Linear.build(reader.read(f"{prefix}.shared_gate.weight").to(parallel.device))
