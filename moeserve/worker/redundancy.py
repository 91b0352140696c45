"""What `num_redundant_experts = "auto"` comes to: as many as help, at a price that the KV cache can bear.

With as many redundant experts as ranks all ranks can share load through replicas; with twice as many, experts that are
hotter than two ranks can carry find room. More gain next to nothing, so there are at most MOST_MORE_PLACES places more
on each rank than an even spread needs. Each of them is taken only while LEAST_KV_SHARE of the KV blocks are left that
there would be without any. Places that an even spread leaves empty cost nothing, and are always filled.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch

from moeserve.config import Config, ModelConfig
from moeserve.models.layout import evenly_redundant
from moeserve.models.spec import ModelSpec, MoeSpec, canonical_shapes
from moeserve.parallel import ParallelContext
from moeserve.worker.memory import free_bytes_of_rank, kv_budget_bytes, least_of_ranks
from moeserve_kernels import ExpertShape, PackedExperts, Quantization

MOST_MORE_PLACES = 2
LEAST_KV_SHARE = 0.9
_MOST_OF_FREE = 0.95
"""Of the free memory that a KV cache of a given size may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Redundancy:
    num_redundant_experts: int
    """Of each MoE layer."""
    num_bytes: int
    """What they add to the weights of a rank, beyond an even spread without more places."""
    num_blocks: int
    """KV blocks of a rank that there is no memory for because of that, as estimated before loading."""

    def describe(self) -> str:
        return (
            f"{self.num_redundant_experts} in each MoE layer, {self.num_bytes / 2**20:,.1f} MiB on each rank, "
            f"{self.num_blocks:,} KV blocks less"
        )


def choose_more_places(*, num_experts: int, num_ranks: int, num_blocks_with: Callable[[int], int]) -> int:
    """Places of each rank beyond an even spread.

    num_blocks_with: KV blocks of a rank that has so many places more in every MoE layer; 0 where too few are left to
    serve with.
    """
    needed = LEAST_KV_SHARE * num_blocks_with(0)
    num_more = 0
    while (
        num_more < MOST_MORE_PLACES
        and evenly_redundant(num_experts, num_ranks, num_more + 1) > evenly_redundant(num_experts, num_ranks, num_more)
        and num_blocks_with(num_more + 1) >= max(needed, 1)
    ):
        num_more += 1
    return num_more


def agree_on_redundancy(
    config: Config,
    spec: ModelSpec,
    parallel: ParallelContext,
    *,
    dtype: torch.dtype,
    num_spare_places: int,
    bytes_per_block: int,
    max_model_len: int,
) -> Redundancy | None:
    """Before anything is loaded; collective over the engine. None where the number is given, or a saved placement."""
    wanted, cache = config.parallel, config.cache
    if wanted.num_redundant_experts != "auto" or wanted.placement_file is not None or not spec.moe_layer_ids:
        return None
    num_ranks, num_experts = parallel.layout.world_size, spec.num_experts
    bytes_per_place = _bytes_per_place(spec, dtype, quantization_of(config.model), parallel.device)
    num_places = -(-num_experts // num_ranks) + num_spare_places
    loaded_bytes = num_places * bytes_per_place + _other_weight_bytes(spec, dtype) // parallel.layout.tp_size
    free_bytes = free_bytes_of_rank(parallel) - loaded_bytes
    blocks_per_sequence = -(-max_model_len // cache.block_size)

    def num_blocks_with(num_more: int) -> int:
        left = max(free_bytes - num_more * bytes_per_place, 0)
        budget = min(kv_budget_bytes(cache, left), int(_MOST_OF_FREE * left))
        num_blocks = min(budget // bytes_per_block, config.scheduler.max_num_seqs * blocks_per_sequence)
        return num_blocks if num_blocks >= blocks_per_sequence else 0

    chosen = choose_more_places(num_experts=num_experts, num_ranks=num_ranks, num_blocks_with=num_blocks_with)
    num_more = least_of_ranks(chosen, parallel)
    return Redundancy(
        num_redundant_experts=evenly_redundant(num_experts, num_ranks, num_more),
        num_bytes=num_more * bytes_per_place,
        num_blocks=num_blocks_with(0) - num_blocks_with(num_more),
    )


def quantization_of(model: ModelConfig) -> Quantization | None:
    """As kernels name it."""
    return "int8" if model.quantization == "int8" else None


def _bytes_per_place(
    spec: ModelSpec, dtype: torch.dtype, quantization: Quantization | None, device: torch.device
) -> int:
    """Of one expert in every MoE layer, in the form that kernels read."""
    total = 0
    for layer in spec.layers:
        if isinstance(layer.mlp, MoeSpec):
            shape = ExpertShape(
                hidden_size=spec.hidden_size,
                width=layer.mlp.expert_intermediate_size,
                dtype=dtype,
                has_bias=layer.mlp.expert_bias,
                quantization=quantization,
            )
            total += sum(tensor.nbytes for tensor in PackedExperts.allocate(1, shape, device=device).tensors.values())
    return total


def _other_weight_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Of everything but the experts of all ranks together; quantized weights count as if they were not."""
    shapes = canonical_shapes(spec).items()
    return sum(prod(shape) for name, shape in shapes if ".moe.experts." not in name) * dtype.itemsize
