"""Grouped-query attention: query heads, and the key-value heads they share, split over the tensor-parallel ranks."""

from dataclasses import dataclass

import torch

from moeserve.layers.attention.kv_cache import GqaLayerCache, LayerCache, local_num_kv_heads
from moeserve.layers.attention.qk_norm import FullNorms, HeadNorms, build_qk_norm
from moeserve.layers.forward_batch import ForwardBatch
from moeserve.layers.linear import Linear, merged_column_linear, row_linear
from moeserve.layers.rope import Angles
from moeserve.models.parameters import ParameterReader
from moeserve.models.spec import GqaSpec, ModelSpec
from moeserve.parallel import Group, ParallelContext, shard_range
from moeserve_kernels import attention_inputs, paged_attention


@dataclass(frozen=True, slots=True, kw_only=True)
class GqaAttention:
    """This rank's heads of one layer."""

    spec: GqaSpec
    sliding_window: int | None
    num_heads: int
    num_kv_heads: int
    qkv_proj: Linear
    o_proj: Linear
    qk_norm: HeadNorms | FullNorms | None
    sinks_H: torch.Tensor | None
    group: Group

    @staticmethod
    def build(spec: ModelSpec, layer_index: int, reader: ParameterReader, parallel: ParallelContext) -> "GqaAttention":
        """Read this rank's heads. Sizes that do not fit `parallel` are refused before (`moeserve.models.layout`)."""
        layer = spec.layers[layer_index]
        attention = layer.attention
        assert isinstance(attention, GqaSpec)
        assert attention.qkv_clip is None or attention.qk_norm != "head", "clipping comes after norms"
        prefix, device = f"layers.{layer_index}.attention", parallel.device
        heads, kv_heads = _head_shards(attention, parallel.tp)
        q_rows, kv_rows = _scaled(heads, attention.head_dim), _scaled(kv_heads, attention.head_dim)
        projections = {
            f"{prefix}.{name}_proj": rows for name, rows in zip("qkv", (q_rows, kv_rows, kv_rows), strict=True)
        }
        qk_norm = build_qk_norm(
            attention, spec.rms_norm_eps, prefix, (heads, kv_heads), reader=reader, parallel=parallel
        )
        adds_bias = attention.o_bias and parallel.tp.rank == 0
        return GqaAttention(
            spec=attention,
            sliding_window=layer.sliding_window,
            num_heads=heads.stop - heads.start,
            num_kv_heads=kv_heads.stop - kv_heads.start,
            qkv_proj=merged_column_linear(reader, projections, device, bias=attention.qkv_bias),
            o_proj=row_linear(reader, f"{prefix}.o_proj", q_rows, device, adds_bias=adds_bias),
            qk_norm=qk_norm,
            sinks_H=reader.read(f"{prefix}.sinks", heads).to(device) if attention.sinks else None,
            group=parallel.tp,
        )

    def forward(self, hidden_TD: torch.Tensor, batch: ForwardBatch, cache: LayerCache, angles: Angles) -> torch.Tensor:
        """[T, D], summed over the ranks of the group. Writes the keys and values of the tokens first."""
        assert isinstance(cache, GqaLayerCache)
        q_THD, k_TGD, v_TGD = self._project(hidden_TD)
        norms = self.qk_norm if isinstance(self.qk_norm, HeadNorms) else None
        q_THD = attention_inputs(
            q_THD,
            k_TGD,
            v_TGD,
            cos_TR=angles[0],
            sin_TR=angles[1],
            interleaved=self.spec.rope.interleaved,
            slot_mapping_T=batch.slot_mapping_T,
            key_cache_NSGD=cache.key_NSGD,
            value_cache_NSGD=cache.value_NSGD,
            key_scale_NSG=cache.key_scale_NSG,
            value_scale_NSG=cache.value_scale_NSG,
            q_norm_weight_D=None if norms is None else norms.q_weight_D,
            k_norm_weight_D=None if norms is None else norms.k_weight_D,
            eps=0.0 if norms is None else norms.eps,
        )
        out_THD = paged_attention(
            q_THD,
            cache.key_NSGD,
            cache.value_NSGD,
            query_start_loc=batch.query_start_loc,
            seq_lens_R=batch.seq_lens_R,
            block_tables_RB=batch.block_tables_RB,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            softmax_scale=self.spec.softmax_scale,
            sliding_window=self.sliding_window,
            sinks_H=self.sinks_H,
            key_scale_NSG=cache.key_scale_NSG,
            value_scale_NSG=cache.value_scale_NSG,
        )
        return self.group.all_reduce(self.o_proj.forward(out_THD.flatten(1)))

    def _project(self, hidden_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values by head, as they are before head norms and rotation."""
        head_counts, clip = (self.num_heads, self.num_kv_heads, self.num_kv_heads), self.spec.qkv_clip
        qkv = self.qkv_proj.forward(hidden_TD).view(len(hidden_TD), sum(head_counts), self.spec.head_dim)
        q_THD, k_TGD, v_TGD = qkv.split_with_sizes(head_counts, dim=1)
        if isinstance(self.qk_norm, FullNorms):
            q_THD, k_TGD = self.qk_norm.forward(q_THD, k_TGD)
        if clip is not None:
            q_THD, k_TGD, v_TGD = (x.clamp(min=-clip, max=clip) for x in (q_THD, k_TGD, v_TGD))
        return q_THD, k_TGD, v_TGD


def _head_shards(spec: GqaSpec, group: Group) -> tuple[slice, slice]:
    """(query heads, key-value heads) of this rank; each query head is beside the key-value head it reads."""
    heads = shard_range(spec.num_heads, group.size, group.rank)
    first = group.rank * spec.num_kv_heads // group.size
    return heads, slice(first, first + local_num_kv_heads(spec, group.size))


def _scaled(heads: slice, head_dim: int) -> slice:
    return slice(heads.start * head_dim, heads.stop * head_dim)
