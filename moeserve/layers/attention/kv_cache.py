"""The paged KV cache of one rank: a key and a value tensor per layer, or one of latents (MLA)."""

from dataclasses import dataclass

import torch

from moeserve.models.spec import GqaSpec, ModelSpec
from moeserve.parallel import ParallelContext


@dataclass(frozen=True, slots=True)
class GqaLayerCache:
    """Keys (rotated) and values of this rank's key-value heads; scales where the cache is narrow."""

    key_NSGD: torch.Tensor
    value_NSGD: torch.Tensor
    key_scale_NSG: torch.Tensor | None
    value_scale_NSG: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class MlaLayerCache:
    """Latents, the same on every rank: kv_lora_rank normalised values, then the rotated key part of all heads.

    They are the one key head of all query heads. Scales where the cache is narrow.
    """

    latent_NS1C: torch.Tensor
    scale_NS1: torch.Tensor | None


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
        """Zeroed caches on the rank's device. A narrow dtype (int8, float8_e4m3fn) has a scale for every row."""

        def rows(num_heads: int, width: int) -> tuple[torch.Tensor, torch.Tensor | None]:
            shape = (num_blocks, block_size, num_heads)
            scale = torch.zeros(shape, device=parallel.device) if _is_narrow(dtype) else None
            return torch.zeros(*shape, width, dtype=dtype, device=parallel.device), scale

        layers: list[LayerCache] = []
        for layer in spec.layers:
            attention = layer.attention
            if isinstance(attention, GqaSpec):
                heads = local_num_kv_heads(attention, parallel.tp.size)
                (key, key_scale), (value, value_scale) = (rows(heads, attention.head_dim) for _ in range(2))
                layers.append(GqaLayerCache(key, value, key_scale, value_scale))
            else:
                layers.append(MlaLayerCache(*rows(1, attention.kv_lora_rank + attention.qk_rope_head_dim)))
        return KVCache(tuple(layers), num_blocks, block_size)

    def layer(self, index: int) -> LayerCache:
        """The cache that the attention of layer `index` reads and writes."""
        return self.layers[index]


def local_num_kv_heads(spec: GqaSpec, tp_size: int) -> int:
    """Key-value heads of a rank: its share, or one where there are fewer than ranks."""
    return max(1, spec.num_kv_heads // tp_size)


def kv_bytes_per_block(spec: ModelSpec, *, block_size: int, dtype: torch.dtype, tp_size: int) -> int:
    """Bytes of one block in all layers of one rank."""
    bytes_per_token = 0
    scale_bytes = torch.float32.itemsize if _is_narrow(dtype) else 0
    for layer in spec.layers:
        attention = layer.attention
        if isinstance(attention, GqaSpec):
            num_rows, width = 2 * local_num_kv_heads(attention, tp_size), attention.head_dim
        else:
            num_rows, width = 1, attention.kv_lora_rank + attention.qk_rope_head_dim
        bytes_per_token += num_rows * (width * dtype.itemsize + scale_bytes)
    return bytes_per_token * block_size


def _is_narrow(dtype: torch.dtype) -> bool:
    return dtype.itemsize == 1
