"""A rank's expert store holds the experts of its placement, and reads no others."""

import torch

from moeserve.experts.store import ExpertStore
from moeserve.models.parameters import DictReader
from moeserve.models.spec import MoeSpec
from moeserve.testing.placements import random_placement
from moeserve.testing.tiny_models import random_parameters, tiny_spec


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
        store = ExpertStore.load(
            mlp, reader, "layers.1.moe.experts", placement, 1, rank=rank, device=torch.device("cpu")
        )
        held = placement.physical_to_logical_LP[1, placement.rank_slice(rank)].tolist()
        assert list(store.logical_ids) == held
        loaded = {
            "gate_up_proj": store.gate_up_proj_p2FD,
            "down_proj": store.down_proj_pDF,
            "gate_up_bias": store.gate_up_bias_p2F,
            "down_bias": store.down_bias_pD,
        }
        for name, tensor in loaded.items():
            assert tensor is not None
            assert torch.equal(tensor, parameters[f"layers.1.moe.experts.{name}"][held])
        read = {index for name, index in reader.reads if name.endswith("down_proj")}
        assert read == {(logical,) for logical in held}


def test_experts_without_bias_have_none() -> None:
    spec = tiny_spec("qwen3", num_experts=2)
    mlp = spec.layers[0].mlp
    assert isinstance(mlp, MoeSpec)
    placement = random_placement(num_layers=2, num_experts=2, num_ranks=1)
    store = ExpertStore.load(
        mlp,
        DictReader(random_parameters(spec)),
        "layers.0.moe.experts",
        placement,
        0,
        rank=0,
        device=torch.device("cpu"),
    )
    assert store.gate_up_bias_p2F is None
    assert store.down_bias_pD is None
