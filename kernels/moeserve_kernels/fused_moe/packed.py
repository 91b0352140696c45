"""The weights of a rank's experts in the form that one backend reads fastest, an expert at a time.

A record is one expert in a form that every rank and backend reads alike: tensors by name, in this order, those that
the experts have: gate_up_proj [2 F, D] (gate rows first), down_proj [D, F], gate_up_scale [2 F] and down_scale [D]
(float32, where the weights are int8), gate_up_bias [2 F], down_bias [D].
"""

from dataclasses import dataclass

import torch

from moeserve_kernels.backend import Backend, choose_backend
from moeserve_kernels.linear.quantize import Quantization, quantize_weight
from moeserve_kernels.native import is_loaded
from moeserve_kernels.native.blocks import BlockLayout

ExpertRecord = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """What all experts of a layer have in common."""

    hidden_size: int
    width: int
    """Of the inside of an expert."""
    dtype: torch.dtype
    """Of the hidden states, and of the weights unless quantized."""
    has_bias: bool = False
    quantization: Quantization | None = None

    @property
    def weight_dtype(self) -> torch.dtype:
        return torch.int8 if self.quantization == "int8" else self.dtype

    @property
    def record(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each tensor of a record."""
        outputs = {"gate_up": 2 * self.width, "down": self.hidden_size}
        inputs = {"gate_up": self.hidden_size, "down": self.width}
        fields: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            f"{name}_proj": ((outputs[name], inputs[name]), self.weight_dtype) for name in outputs
        }
        if self.quantization is not None:
            fields |= {f"{name}_scale": ((size,), torch.float32) for name, size in outputs.items()}
        if self.has_bias:
            fields |= {f"{name}_bias": ((size,), self.dtype) for name, size in outputs.items()}
        return fields

    @property
    def record_bytes(self) -> int:
        return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in self.record.values())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedExperts:
    """Memory for the experts of one layer, by place. A place that was never written must not be routed to."""

    shape: ExpertShape
    backend: Backend
    num_places: int
    tensors: dict[str, torch.Tensor]
    """The tensors of a record with an axis of places before the rest.

    cpu: a weight is [places, blocks, parts, steps, columns, group], all else float32 [places, blocks, parts, columns];
    the parts of gate_up are gate and up, down has one.
    """

    @staticmethod
    def allocate(
        num_places: int, shape: ExpertShape, *, device: torch.device, backend: Backend | None = None
    ) -> "PackedExperts":
        """Room for `num_places` experts, not initialised."""
        chosen = choose_backend(device, backend, has_native=is_loaded())
        fields = _cpu_fields(shape) if chosen == "cpu" else shape.record
        tensors = {
            name: torch.empty((num_places, *size), dtype=dtype, device=device) for name, (size, dtype) in fields.items()
        }
        return PackedExperts(shape=shape, backend=chosen, num_places=num_places, tensors=tensors)

    def write(self, place: int, record: ExpertRecord) -> None:
        """Put an expert into a place, in memory that is there already."""
        assert 0 <= place < self.num_places
        expected = self.shape.record
        assert record.keys() == expected.keys(), f"a record holds {list(expected)}, got {list(record)}"
        for name, tensor in record.items():
            size, dtype = expected[name]
            assert tensor.shape == size, f"{name} is {size}, got {tuple(tensor.shape)}"
            assert tensor.dtype == dtype, f"{name} is {dtype}, got {tensor.dtype}"
            packed = self.tensors[name][place]
            if self.backend != "cpu":
                packed.copy_(tensor)
                continue
            layout = _layout(self.shape)
            for part, values in enumerate(tensor.chunk(_num_parts(name))):
                if values.ndim == 2:
                    layout.pack(values, packed[:, part])
                else:
                    packed[:, part] = layout.pad(values).view(-1, layout.columns)

    def read(self, place: int) -> ExpertRecord:
        """The expert in a place, as it was written to the bit, in memory of its own."""
        assert 0 <= place < self.num_places
        return {name: self._read(name, place, *field) for name, field in self.shape.record.items()}

    def _read(self, name: str, place: int, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        packed = self.tensors[name][place]
        if self.backend != "cpu":
            return packed.clone()
        parts = _num_parts(name)
        if len(size) == 2:
            layout = _layout(self.shape)
            return torch.cat([layout.unpack(packed[:, part], size[0] // parts, size[1]) for part in range(parts)])
        return torch.cat([packed[:, part].flatten()[: size[0] // parts] for part in range(parts)]).to(dtype)


def make_record(
    shape: ExpertShape,
    gate_up_proj_2FD: torch.Tensor,
    down_proj_DF: torch.Tensor,
    gate_up_bias_2F: torch.Tensor | None = None,
    down_bias_D: torch.Tensor | None = None,
) -> ExpertRecord:
    """The record of an expert, from the tensors of a model, which are quantized where the shape says so."""
    projections = {"gate_up": gate_up_proj_2FD, "down": down_proj_DF}
    biases = {"gate_up": gate_up_bias_2F, "down": down_bias_D}
    record: ExpertRecord = {}
    for name, weight in projections.items():
        if shape.quantization is None:
            record[f"{name}_proj"] = weight
        else:
            record[f"{name}_proj"], record[f"{name}_scale"] = quantize_weight(weight)
    record |= {f"{name}_bias": bias for name, bias in biases.items() if bias is not None}
    return {name: record[name] for name in shape.record}


def pack_experts(
    gate_up_proj_p2FD: torch.Tensor,
    down_proj_pDF: torch.Tensor,
    gate_up_bias_p2F: torch.Tensor | None = None,
    down_bias_pD: torch.Tensor | None = None,
    *,
    quantization: Quantization | None = None,
    backend: Backend | None = None,
) -> PackedExperts:
    """All experts of a layer at once, from tensors that are in memory."""
    num_experts, hidden_size, width = down_proj_pDF.shape
    assert gate_up_proj_p2FD.shape == (num_experts, 2 * width, hidden_size)
    assert (gate_up_bias_p2F is None) == (down_bias_pD is None), "both projections have a bias, or none"
    shape = ExpertShape(
        hidden_size=hidden_size,
        width=width,
        dtype=down_proj_pDF.dtype,
        has_bias=down_bias_pD is not None,
        quantization=quantization,
    )
    experts = PackedExperts.allocate(num_experts, shape, device=down_proj_pDF.device, backend=backend)
    tensors = (gate_up_proj_p2FD, down_proj_pDF, gate_up_bias_p2F, down_bias_pD)
    for place in range(num_experts):
        gate_up, down, gate_up_bias, down_bias = (None if tensor is None else tensor[place] for tensor in tensors)
        assert gate_up is not None
        assert down is not None
        experts.write(place, make_record(shape, gate_up, down, gate_up_bias, down_bias))
    return experts


def _cpu_fields(shape: ExpertShape) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of the tensors of a record in blocks."""
    layout = _layout(shape)
    fields = {}
    for name, (size, dtype) in shape.record.items():
        parts = _num_parts(name)
        is_weight = len(size) == 2
        inner = layout.shape(0, size[1])[1:] if is_weight else (layout.columns,)
        fields[name] = (layout.num_blocks(size[0] // parts), parts, *inner), dtype if is_weight else torch.float32
    return fields


def _layout(shape: ExpertShape) -> BlockLayout:
    return BlockLayout.of(shape.dtype, shape.weight_dtype)


def _num_parts(name: str) -> int:
    return 2 if name.startswith("gate_up") else 1
