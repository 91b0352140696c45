"""Attention over the paged KV cache: grouped-query (GQA) and multi-head latent (MLA)."""

from typing import Protocol

import torch

from moeserve.layers.attention.gqa import GqaAttention
from moeserve.layers.attention.kv_cache import KVCache, LayerCache, kv_bytes_per_block
from moeserve.layers.attention.mla import MlaAttention
from moeserve.layers.forward_batch import ForwardBatch
from moeserve.layers.rope import Angles
from moeserve.models.parameters import ParameterReader
from moeserve.models.spec import GqaSpec, ModelSpec
from moeserve.parallel import ParallelContext

__all__ = ["Attention", "KVCache", "LayerCache", "build_attention", "kv_bytes_per_block"]


class Attention(Protocol):
    """The attention of one layer, with this rank's heads."""

    def forward(self, hidden_TD: torch.Tensor, batch: ForwardBatch, cache: LayerCache, angles: Angles) -> torch.Tensor:
        """Write the tokens of the step to the cache, attend; [T, D] on every tensor-parallel rank. T may be 0.

        angles: of the tokens, by the layer's RopeSpec.
        """
        ...


def build_attention(spec: ModelSpec, layer_index: int, reader: ParameterReader, parallel: ParallelContext) -> Attention:
    """The attention of a layer, as its spec says."""
    build = GqaAttention.build if isinstance(spec.layers[layer_index].attention, GqaSpec) else MlaAttention.build
    return build(spec, layer_index, reader, parallel)
