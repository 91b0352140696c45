"""The weights of this rank's physical experts of one layer.

Axes: p physical experts of this rank, F expert width, D model width.
"""

from dataclasses import dataclass

import torch

from moeserve.models.parameters import ParameterReader
from moeserve.models.spec import MoeSpec
from moeserve_placement import ExpertPlacement


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertStore:
    """Every tensor with an expert axis of one layer; a physical expert is the same place in each of them."""

    logical_ids: tuple[int, ...]
    """The logical expert in each place."""
    gate_up_proj_p2FD: torch.Tensor
    """Gate rows first, then up rows."""
    down_proj_pDF: torch.Tensor
    gate_up_bias_p2F: torch.Tensor | None = None
    down_bias_pD: torch.Tensor | None = None

    @staticmethod
    def load(
        spec: MoeSpec,
        reader: ParameterReader,
        prefix: str,
        placement: ExpertPlacement,
        moe_layer: int,
        *,
        rank: int,
        device: torch.device,
    ) -> "ExpertStore":
        """Read the experts that `placement` gives to `rank`, and no others.

        prefix: of the canonical names, `layers.3.moe.experts`. moe_layer: index among the MoE layers.
        """
        held = placement.physical_to_logical_LP[moe_layer, placement.rank_slice(rank)]
        logical_ids = tuple(int(logical) for logical in held)

        def read(name: str) -> torch.Tensor:
            return _read_experts(reader, f"{prefix}.{name}", logical_ids, device)

        return ExpertStore(
            logical_ids=logical_ids,
            gate_up_proj_p2FD=read("gate_up_proj"),
            down_proj_pDF=read("down_proj"),
            gate_up_bias_p2F=read("gate_up_bias") if spec.expert_bias else None,
            down_bias_pD=read("down_bias") if spec.expert_bias else None,
        )


def _read_experts(
    reader: ParameterReader, name: str, logical_ids: tuple[int, ...], device: torch.device
) -> torch.Tensor:
    """One tensor of each expert, stacked; holds no second copy of the layer while reading."""
    first = reader.read(name, logical_ids[0])
    stacked = torch.empty((len(logical_ids), *first.shape), dtype=first.dtype, device=device)
    stacked[0] = first
    for place, logical in enumerate(logical_ids[1:], start=1):
        stacked[place] = reader.read(name, logical)
    return stacked
