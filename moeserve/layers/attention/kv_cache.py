"""The paged KV cache of one rank: a key and a value tensor per layer, or one of latents (MLA)."""

from dataclasses import dataclass

import torch

from moeserve.models.spec import GqaSpec, ModelSpec
from moeserve.parallel import ParallelContext


@dataclass(frozen=True, slots=True)
class GqaLayerCache:
    """Keys (rotated) and values of this rank's key-value heads."""

    key_NSGD: torch.Tensor
    value_NSGD: torch.Tensor


@dataclass(frozen=True, slots=True)
class MlaLayerCache:
    """Latents, the same on every rank: kv_lora_rank normalised values, then the rotated key part of all heads."""

    latent_NSC: torch.Tensor


LayerCache = GqaLayerCache | MlaLayerCache


@dataclass(frozen=True, slots=True)
class KVCache:
    """Caches of all layers; a block id means the same place in every one."""

    layers: tuple[LayerCache, ...]
    num_blocks: int
    block_size: int

    @staticmethod
    def allocate(
        spec: ModelSpec, *, num_blocks: int, block_size: int, dtype: torch.dtype, parallel: ParallelContext
    ) -> "KVCache":
        """Zeroed caches on the rank's device."""
        layers: list[LayerCache] = []
        for layer in spec.layers:
            attention = layer.attention
            if isinstance(attention, GqaSpec):
                heads = local_num_kv_heads(attention, parallel.tp.size)
                shape = (num_blocks, block_size, heads, attention.head_dim)
                key, value = (torch.zeros(shape, dtype=dtype, device=parallel.device) for _ in range(2))
                layers.append(GqaLayerCache(key, value))
            else:
                width = attention.kv_lora_rank + attention.qk_rope_head_dim
                latent = torch.zeros(num_blocks, block_size, width, dtype=dtype, device=parallel.device)
                layers.append(MlaLayerCache(latent))
        return KVCache(tuple(layers), num_blocks, block_size)

    def layer(self, index: int) -> LayerCache:
        """The cache that the attention of layer `index` reads and writes."""
        return self.layers[index]


def local_num_kv_heads(spec: GqaSpec, tp_size: int) -> int:
    """Key-value heads of a rank: its share, or one where there are fewer than ranks."""
    return max(1, spec.num_kv_heads // tp_size)


def kv_bytes_per_block(spec: ModelSpec, *, block_size: int, dtype: torch.dtype, tp_size: int) -> int:
    """Bytes of one block in all layers of one rank."""
    values_per_token = 0
    for layer in spec.layers:
        attention = layer.attention
        if isinstance(attention, GqaSpec):
            values_per_token += 2 * local_num_kv_heads(attention, tp_size) * attention.head_dim
        else:
            values_per_token += attention.kv_lora_rank + attention.qk_rope_head_dim
    return values_per_token * block_size * dtype.itemsize
