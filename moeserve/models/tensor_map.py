"""The canonical tensors of a model to their sources in a given checkpoint; no torch here.

Names differ by family, and experts come in several layouts: a tensor for each expert, all experts in one tensor (either
way round), gpt-oss's interleaved one, and that quantised to MXFP4. What the checkpoint holds decides.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from moeserve.models.families.family import CheckpointNames
from moeserve.models.safetensors_header import TensorInfo
from moeserve.models.spec import ModelSpec, canonical_shapes
from moeserve.models.tensor_sources import PerExpertSource, StoredTensor, TensorSource, WholeSource

Shape = tuple[int, ...]

_OUTER = {
    "embed_tokens.weight": "model.embed_tokens.weight",
    "final_norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}
_RENAMED = {
    "input_norm.": "input_layernorm.",
    "post_attention_norm.": "post_attention_layernorm.",
    "attention.": "self_attn.",
}
_FUSED = {
    "gate_up_proj": "gate_up_proj",
    "down_proj": "down_proj",
    "gate_up_bias": "gate_up_proj_bias",
    "down_bias": "down_proj_bias",
}


def map_tensors(spec: ModelSpec, names: CheckpointNames, stored: Mapping[str, TensorInfo]) -> dict[str, TensorSource]:
    """A source for every canonical tensor, whether or not the checkpoint has it all."""
    sources: dict[str, TensorSource] = {}
    mappers = [_LayerMapper(names, stored, f"model.layers.{i}") for i in range(len(spec.layers))]
    for canonical, shape in canonical_shapes(spec).items():
        if canonical in _OUTER:
            sources[canonical] = WholeSource(shape, StoredTensor(_OUTER[canonical], shape))
            continue
        _, layer, part = canonical.split(".", 2)
        sources[canonical] = mappers[int(layer)].map(part, shape)
    return sources


@dataclass(frozen=True, slots=True)
class _LayerMapper:
    """The sources of one layer's tensors."""

    names: CheckpointNames
    stored: Mapping[str, TensorInfo]
    prefix: str

    def map(self, part: str, shape: Shape) -> TensorSource:
        """`part`: the canonical name within the layer."""
        group, _, name = part.rpartition(".")
        if group == "moe.experts":
            return self._map_experts(name, shape)
        return WholeSource(shape, StoredTensor(f"{self.prefix}.{self._rename(part)}", shape))

    def _rename(self, part: str) -> str:
        renamed = {**_RENAMED, **self.names.renamed}
        start = max((start for start in renamed if part.startswith(start)), key=len, default="")
        if start:
            return renamed[start] + part.removeprefix(start)
        return f"{self._moe_block}.{part.removeprefix('moe.')}" if part.startswith("moe.") else part

    @property
    def _moe_block(self) -> str:
        blocks = self.names.moe_blocks
        return next((block for block in blocks if f"{self.prefix}.{block}.gate.weight" in self.stored), blocks[0])

    def _map_experts(self, name: str, shape: Shape) -> TensorSource:
        experts = f"{self.prefix}.{self._moe_block}.experts"
        fused = f"{experts}.{_FUSED[name]}"
        interleaved = self.names.interleaved_experts and name in ("gate_up_proj", "gate_up_bias")
        if name.endswith("_bias"):
            return WholeSource(shape, StoredTensor(fused, shape), interleaved=interleaved)
        if self._has(experts, "gate_up_proj_blocks", "down_proj_blocks"):
            return WholeSource(shape, StoredTensor(fused, shape, "mxfp4"), interleaved=interleaved)
        if self.names.interleaved_experts:
            return WholeSource(shape, StoredTensor(fused, _swapped(shape)), transposed=True, interleaved=interleaved)
        if not self._has(experts, "gate_up_proj", "down_proj"):
            return self._map_single_experts(experts, name, shape)
        if self._is_transposed(experts, name, shape):
            return WholeSource(shape, StoredTensor(fused, _swapped(shape)), transposed=True)
        return WholeSource(shape, StoredTensor(fused, shape))

    def _map_single_experts(self, experts: str, name: str, shape: Shape) -> PerExpertSource:
        gate, up, down = self.names.expert_projections
        num_experts, rows, columns = shape
        parts, height = ((gate, up), rows // 2) if name == "gate_up_proj" else ((down,), rows)
        return PerExpertSource(
            shape,
            tuple(
                tuple(StoredTensor(f"{experts}.{expert}.{part}.weight", (height, columns)) for part in parts)
                for expert in range(num_experts)
            ),
        )

    def _is_transposed(self, experts: str, name: str, shape: Shape) -> bool:
        """Told by the shapes of both fused tensors: one may be square, but never both."""
        num_experts, rows, columns = shape
        width, hidden = (rows // 2, columns) if name == "gate_up_proj" else (columns, rows)
        for fused, expected in (
            ("gate_up_proj", (num_experts, 2 * width, hidden)),
            ("down_proj", (num_experts, hidden, width)),
        ):
            info = self.stored.get(f"{experts}.{fused}")
            if info is not None and expected != _swapped(expected):
                return info.shape == _swapped(expected)
        return False

    def _has(self, experts: str, *names: str) -> bool:
        return any(f"{experts}.{name}" in self.stored for name in names)


def _swapped(shape: Shape) -> Shape:
    return (*shape[:-2], shape[-1], shape[-2])
