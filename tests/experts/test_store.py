"""A rank's expert store holds the experts of its placement, reads no others, and moves experts between places."""

import dataclasses

import pytest
import torch

from moeserve.experts.store import ExpertStore
from moeserve.models.parameters import DictReader
from moeserve.models.spec import MoeSpec
from moeserve.testing.placements import random_placement
from moeserve.testing.tiny_models import Style, random_parameters, tiny_spec
from moeserve_kernels import Quantization

CPU = torch.device("cpu")


class CountingReader(DictReader):
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.reads: list[tuple[str, tuple[slice | int, ...]]] = []

    def read(self, name: str, *index: slice | int, dtype: torch.dtype | None = None) -> torch.Tensor:
        self.reads.append((name, index))
        return super().read(name, *index, dtype=dtype)


def test_store_holds_the_placed_experts_in_order_and_reads_only_those() -> None:
    spec = tiny_spec("gpt_oss", num_experts=5)
    mlp = spec.layers[1].mlp
    assert isinstance(mlp, MoeSpec)
    parameters = random_parameters(spec)
    placement = random_placement(num_layers=2, num_experts=5, num_ranks=3, num_redundant_experts=4, seed=1)
    for rank in range(3):
        reader = CountingReader(parameters)
        store = ExpertStore.load(mlp, reader, "layers.1.moe.experts", placement, 1, rank=rank, device=CPU)
        held = placement.physical_to_logical_LP[1, placement.rank_slice(rank)].tolist()
        assert list(store.logical_ids) == held
        assert store.num_places == len(held)
        for place, logical in enumerate(held):
            record = store.read_expert(place)
            assert set(record) == {"gate_up_proj", "down_proj", "gate_up_bias", "down_bias"}
            for name, tensor in record.items():
                assert torch.equal(tensor, parameters[f"layers.1.moe.experts.{name}"][logical])
        read = {index for name, index in reader.reads if name.endswith("down_proj")}
        assert read == {(logical,) for logical in held}


def _store(style: Style, *, quantization: Quantization | None = None, num_spare_places: int = 0) -> ExpertStore:
    spec = tiny_spec(style, num_experts=4)
    mlp = spec.layers[1].mlp
    assert isinstance(mlp, MoeSpec)
    placement = random_placement(num_layers=2, num_experts=4, num_ranks=2)
    reader = DictReader(random_parameters(spec), torch.bfloat16, quantization=quantization)
    return ExpertStore.load(
        mlp,
        reader,
        "layers.1.moe.experts",
        placement,
        1,
        rank=0,
        device=CPU,
        num_spare_places=num_spare_places,
    )


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_experts_without_bias_have_none(quantization: Quantization | None) -> None:
    record = _store("qwen3", quantization=quantization).read_expert(0)
    scales = {"gate_up_scale", "down_scale"} if quantization else set()
    assert set(record) == {"gate_up_proj", "down_proj"} | scales


@pytest.mark.parametrize("style", ["qwen3", "gpt_oss"])
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_experts_move_into_spare_places_and_back(style: Style, quantization: Quantization | None) -> None:
    """To the bit, and in the memory that the store has had since it was loaded."""
    store = _store(style, quantization=quantization, num_spare_places=2)
    held = len(store.logical_ids)
    assert store.num_places == held + 2
    addresses = {name: tensor.data_ptr() for name, tensor in store.experts.tensors.items()}
    first, second = store.read_expert(0), store.read_expert(1)
    assert sum(tensor.nbytes for tensor in first.values()) == store.expert_bytes
    store.write_expert(held, first)
    store.write_expert(held + 1, second)
    store.write_expert(0, store.read_expert(held + 1))
    for place, expected in ((held, first), (0, second), (1, second)):
        for name, tensor in store.read_expert(place).items():
            assert torch.equal(tensor, expected[name]), name
    assert {name: tensor.data_ptr() for name, tensor in store.experts.tensors.items()} == addresses


def test_stores_of_one_layer_take_each_others_records() -> None:
    """What two ranks of an engine exchange has one form, whatever each does with it."""
    source, target = _store("gpt_oss"), _store("gpt_oss", num_spare_places=1)
    target.write_expert(target.num_places - 1, source.read_expert(1))
    moved = target.read_expert(target.num_places - 1)
    assert all(torch.equal(moved[name], tensor) for name, tensor in source.read_expert(1).items())
    assert dataclasses.asdict(source.experts.shape) == dataclasses.asdict(target.experts.shape)
