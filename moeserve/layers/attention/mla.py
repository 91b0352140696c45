"""Multi-head latent attention (arXiv 2405.04434): every head reads one cached latent per token.

The up-projections of keys and values are absorbed into the query and the output, so prefill and decode are one path and
the cache holds nothing but latents. Heads are split over the tensor-parallel ranks, latents are the same on all.
"""

from dataclasses import dataclass

import torch

from moeserve.layers.attention.kv_cache import LayerCache, MlaLayerCache
from moeserve.layers.forward_batch import ForwardBatch
from moeserve.layers.linear import Linear, column_linear, row_linear
from moeserve.layers.norm import RmsNorm
from moeserve.layers.rope import Angles
from moeserve.models.parameters import ParameterReader
from moeserve.models.spec import MlaSpec, ModelSpec
from moeserve.parallel import Group, ParallelContext, shard_range
from moeserve_kernels import PackedHeads, head_linear, kv_cache_write, pack_heads, paged_attention, rotary

LATENT_NORM_EPS = 1e-6
"""DeepSeek's latent norms have this epsilon whatever the rest of the model has."""


@dataclass(frozen=True, slots=True)
class _LowRankQuery:
    """Queries through a normalised latent of their own."""

    a_proj: Linear
    norm: RmsNorm
    b_proj: Linear

    def forward(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        return self.b_proj.forward(self.norm.forward(self.a_proj.forward(hidden_TD)))


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaAttention:
    """This rank's heads of one layer."""

    spec: MlaSpec
    sliding_window: int | None
    num_heads: int
    q_proj: Linear | _LowRankQuery
    kv_a_proj: Linear
    kv_a_norm: RmsNorm
    absorbed_key_up: PackedHeads
    """kv_b_proj's key half, transposed: from the part of a query that is not rotated to the space of the latents."""
    value_up: PackedHeads
    """kv_b_proj's value half: from latents to values."""
    o_proj: Linear
    group: Group

    @staticmethod
    def build(spec: ModelSpec, layer_index: int, reader: ParameterReader, parallel: ParallelContext) -> "MlaAttention":
        """Read this rank's heads. Sizes that do not fit `parallel` are refused before (`moeserve.models.layout`)."""
        layer = spec.layers[layer_index]
        attention = layer.attention
        assert isinstance(attention, MlaSpec)
        prefix, device = f"layers.{layer_index}.attention", parallel.device
        heads = shard_range(attention.num_heads, parallel.tp.size, parallel.tp.rank)
        kv_b = _read_heads(
            reader, f"{prefix}.kv_b_proj.weight", heads, attention.qk_nope_head_dim + attention.v_head_dim
        )
        key_up, value_up = kv_b.to(device).split_with_sizes((attention.qk_nope_head_dim, attention.v_head_dim), dim=1)
        v_columns = slice(heads.start * attention.v_head_dim, heads.stop * attention.v_head_dim)
        adds_bias = attention.bias and parallel.tp.rank == 0
        everything = slice(None)
        return MlaAttention(
            spec=attention,
            sliding_window=layer.sliding_window,
            num_heads=heads.stop - heads.start,
            q_proj=_build_query(attention, prefix, heads, reader, device),
            kv_a_proj=column_linear(reader, f"{prefix}.kv_a_proj", everything, device, bias=attention.bias),
            kv_a_norm=RmsNorm.build(reader, f"{prefix}.kv_a_norm", LATENT_NORM_EPS, device),
            absorbed_key_up=pack_heads(key_up.transpose(1, 2)),
            value_up=pack_heads(value_up),
            o_proj=row_linear(reader, f"{prefix}.o_proj", v_columns, device, adds_bias=adds_bias),
            group=parallel.tp,
        )

    def forward(self, hidden_TD: torch.Tensor, batch: ForwardBatch, cache: LayerCache, angles: Angles) -> torch.Tensor:
        """[T, D], summed over the ranks of the group. Writes the latents of the tokens first."""
        assert isinstance(cache, MlaLayerCache)
        key_NSGC, scale_NSG = cache.latent_NS1C, cache.scale_NS1
        latents_T1C = self._latents(hidden_TD, angles).unsqueeze(1)
        kv_cache_write(latents_T1C, key_NSGC, batch.slot_mapping_T, scale_NSG)
        out_THC = paged_attention(
            self._queries(hidden_TD, angles),
            key_NSGC,
            key_NSGC[..., : self.spec.kv_lora_rank],
            query_start_loc=batch.query_start_loc,
            seq_lens_R=batch.seq_lens_R,
            block_tables_RB=batch.block_tables_RB,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            softmax_scale=self.spec.softmax_scale,
            sliding_window=self.sliding_window,
            key_scale_NSG=scale_NSG,
            value_scale_NSG=scale_NSG,
        )
        out_THv = head_linear(out_THC, self.value_up)
        return self.group.all_reduce(self.o_proj.forward(out_THv.flatten(1)))

    def _latents(self, hidden_TD: torch.Tensor, angles: Angles) -> torch.Tensor:
        """[T, C]: what the cache keeps of a token."""
        spec = self.spec
        latent_TC, key_TR = self.kv_a_proj.forward(hidden_TD).split_with_sizes(
            (spec.kv_lora_rank, spec.qk_rope_head_dim), dim=-1
        )
        rotated_T1R = rotary(key_TR.unsqueeze(1), *angles, spec.rope.interleaved)
        return torch.cat([self.kv_a_norm.forward(latent_TC), rotated_T1R.squeeze(1)], dim=-1)

    def _queries(self, hidden_TD: torch.Tensor, angles: Angles) -> torch.Tensor:
        """[T, H, C]: queries in the space of the latents."""
        spec = self.spec
        q_THD = self.q_proj.forward(hidden_TD).view(
            len(hidden_TD), self.num_heads, spec.qk_nope_head_dim + spec.qk_rope_head_dim
        )
        nope_THn, rope_THR = q_THD.split_with_sizes((spec.qk_nope_head_dim, spec.qk_rope_head_dim), dim=-1)
        out_THC = q_THD.new_empty(*q_THD.shape[:2], spec.kv_lora_rank + spec.qk_rope_head_dim)
        absorbed, rotated = out_THC.split_with_sizes((spec.kv_lora_rank, spec.qk_rope_head_dim), dim=-1)
        head_linear(nope_THn, self.absorbed_key_up, out_THo=absorbed)
        rotated.copy_(rotary(rope_THR, *angles, spec.rope.interleaved))
        return out_THC


def _build_query(
    spec: MlaSpec, prefix: str, heads: slice, reader: ParameterReader, device: torch.device
) -> Linear | _LowRankQuery:
    width = spec.qk_nope_head_dim + spec.qk_rope_head_dim
    rows = slice(heads.start * width, heads.stop * width)
    if spec.q_lora_rank is None:
        return column_linear(reader, f"{prefix}.q_proj", rows, device)
    return _LowRankQuery(
        column_linear(reader, f"{prefix}.q_a_proj", slice(None), device, bias=spec.bias),
        RmsNorm.build(reader, f"{prefix}.q_a_norm", LATENT_NORM_EPS, device),
        column_linear(reader, f"{prefix}.q_b_proj", rows, device),
    )


def _read_heads(reader: ParameterReader, name: str, heads: slice, width: int) -> torch.Tensor:
    """[H, width, in] of this rank."""
    weight = reader.read(name, slice(heads.start * width, heads.stop * width))
    return weight.view(heads.stop - heads.start, width, -1)
