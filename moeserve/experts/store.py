"""The weights of this rank's physical experts of one layer.

Axes: F expert width, D model width.
"""

from dataclasses import dataclass

import torch

from moeserve.models.parameters import ParameterReader
from moeserve.models.spec import MoeSpec
from moeserve_kernels import ExpertRecord, ExpertShape, PackedExperts, make_record
from moeserve_placement import ExpertPlacement


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertStore:
    """Every tensor with an expert axis of one layer, by place: those of the placement, then the spare ones."""

    logical_ids: tuple[int, ...]
    """The logical expert in each place of the placement."""
    experts: PackedExperts

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
        num_spare_places: int = 0,
    ) -> "ExpertStore":
        """Read the experts that `placement` gives to `rank`, and no others; never two copies of more than one expert.

        prefix: of the canonical names, `layers.3.moe.experts`. moe_layer: index among the MoE layers. num_spare_places:
        room for experts beyond the placement, behind its own.
        """
        held = placement.physical_to_logical_LP[moe_layer, placement.rank_slice(rank)]
        logical_ids = tuple(int(logical) for logical in held)
        names = ("gate_up_proj", "down_proj", *(("gate_up_bias", "down_bias") if spec.expert_bias else ()))
        experts: PackedExperts | None = None
        for place, logical in enumerate(logical_ids):
            tensors = [reader.read(f"{prefix}.{name}", logical).to(device) for name in names]
            if experts is None:
                shape = _shape_of(tensors, reader)
                experts = PackedExperts.allocate(len(logical_ids) + num_spare_places, shape, device=device)
            experts.write(place, make_record(experts.shape, *tensors))
        assert experts is not None, "a rank holds at least one expert of each layer"
        return ExpertStore(logical_ids=logical_ids, experts=experts)

    @property
    def num_places(self) -> int:
        """With the spare ones."""
        return self.experts.num_places

    @property
    def expert_bytes(self) -> int:
        """Of one record."""
        return self.experts.shape.record_bytes

    def read_expert(self, place: int) -> ExpertRecord:
        """The whole expert in a place: every tensor of it by name, in a form that is the same on all ranks."""
        return self.experts.read(place)

    def write_expert(self, place: int, record: ExpertRecord) -> None:
        """Put an expert that `read_expert` gave into a place, in memory that is there already."""
        self.experts.write(place, record)


def _shape_of(tensors: list[torch.Tensor], reader: ParameterReader) -> ExpertShape:
    hidden_size, width = tensors[1].shape
    return ExpertShape(
        hidden_size=hidden_size,
        width=width,
        dtype=tensors[1].dtype,
        has_bias=len(tensors) > 2,
        quantization=reader.quantization,
    )
