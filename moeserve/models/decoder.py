"""The one decoder: built from a model spec and a parameter reader, run on one batch of tokens at a time."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from moeserve.experts.dispatcher import build_dispatcher
from moeserve.layers.attention import Attention, KVCache, build_attention
from moeserve.layers.embedding import LmHead, VocabEmbedding
from moeserve.layers.forward_batch import ForwardBatch
from moeserve.layers.mlp import DenseMlp
from moeserve.layers.moe.layer import MoeLayer, load_moe_layer
from moeserve.layers.norm import RmsNorm
from moeserve.layers.rope import RotaryEmbedding
from moeserve.models.parameters import ParameterReader
from moeserve.models.spec import ModelSpec, MoeSpec, RopeSpec
from moeserve.parallel import ParallelContext
from moeserve_placement import ExpertPlacement


class Mlp(Protocol):
    """What stands behind attention: a dense MLP or an MoE layer."""

    def forward(self, hidden_TD: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """[T, D], whole on every tp rank."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecoderLayer:
    """Attention and MLP, each with the norm behind it, so that every norm takes in the residual stream."""

    attention: Attention
    rope: RopeSpec
    post_attention_norm: RmsNorm
    mlp: Mlp
    next_norm: RmsNorm
    """The input norm of the next layer, or the model's final norm."""


def _ignore_progress(layer: int) -> None:
    """Nobody watches the loading."""


class Decoder:
    """A model on this rank: its shard of attention, dense MLPs and vocabulary, and its physical experts."""

    def __init__(
        self,
        spec: ModelSpec,
        parallel: ParallelContext,
        *,
        dtype: torch.dtype,
        embedding: VocabEmbedding,
        first_norm: RmsNorm,
        layers: list[DecoderLayer],
        lm_head: LmHead,
    ) -> None:
        self.spec = spec
        self.parallel = parallel
        self.dtype = dtype
        self.embedding = embedding
        self.first_norm = first_norm
        self.ropes = {layer.rope: RotaryEmbedding.build(layer.rope, parallel.device) for layer in layers}
        self.layers = layers
        self.lm_head = lm_head

    @staticmethod
    @torch.inference_mode()
    def build(
        spec: ModelSpec,
        reader: ParameterReader,
        parallel: ParallelContext,
        placement: ExpertPlacement | None,
        *,
        dtype: torch.dtype,
        num_spare_places: int = 0,
        on_layer_loaded: Callable[[int], None] = _ignore_progress,
    ) -> "Decoder":
        """Read this rank's tensors and no others; no collective runs here.

        placement: of all MoE layers; None for a model without any. dtype: of weights and activations, the reader's
        default. num_spare_places: in each MoE layer, for experts that migrate.
        """
        embedding = VocabEmbedding.build(spec, reader, parallel)
        norm_names = [*(f"layers.{index}.input_norm" for index in range(len(spec.layers))), "final_norm"]
        norms = [RmsNorm.build(reader, name, spec.rms_norm_eps, parallel.device) for name in norm_names]
        build_mlp = _mlp_builder(spec, reader, parallel, placement, num_spare_places=num_spare_places)
        layers = []
        for index, next_norm in enumerate(norms[1:]):
            norm_name = f"layers.{index}.post_attention_norm"
            layers.append(
                DecoderLayer(
                    attention=build_attention(spec, index, reader, parallel),
                    rope=spec.layers[index].attention.rope,
                    post_attention_norm=RmsNorm.build(reader, norm_name, spec.rms_norm_eps, parallel.device),
                    mlp=build_mlp(index),
                    next_norm=next_norm,
                )
            )
            on_layer_loaded(index)
        assert embedding.weight_vD.dtype == dtype, "the reader's default dtype is not the decoder's"
        return Decoder(
            spec,
            parallel,
            dtype=dtype,
            embedding=embedding,
            first_norm=norms[0],
            layers=layers,
            lm_head=LmHead.build(spec, reader, parallel, embedding),
        )

    @property
    def moe_layers(self) -> list[MoeLayer]:
        """In order, the placement's layer axis."""
        return [layer.mlp for layer in self.layers if isinstance(layer.mlp, MoeLayer)]

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv_cache: KVCache) -> torch.Tensor:
        """Hidden states [T, D] behind the final norm, the same on all tp ranks of the replica.

        All ranks of the engine run the step together, also those whose replica has no token in it; without a token
        anywhere nothing runs.
        """
        if not any(batch.num_tokens_by_dp_rank):
            return torch.empty(0, self.spec.hidden_size, dtype=self.dtype, device=self.parallel.device)
        angles = {spec: rope.angles(batch.positions_T) for spec, rope in self.ropes.items()}
        residual_TD = self.embedding.forward(batch.token_ids_T)
        hidden_TD = self.first_norm.forward(residual_TD)
        for index, layer in enumerate(self.layers):
            hidden_TD = layer.attention.forward(hidden_TD, batch, kv_cache.layer(index), angles[layer.rope])
            hidden_TD, residual_TD = layer.post_attention_norm.forward_add(hidden_TD, residual_TD)
            hidden_TD = layer.mlp.forward(hidden_TD, batch)
            hidden_TD, residual_TD = layer.next_norm.forward_add(hidden_TD, residual_TD)
        return hidden_TD

    @torch.inference_mode()
    def compute_logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """[N, V] float32, the whole vocabulary on every tp rank; N is the same on all of them, and may be 0."""
        return self.lm_head.forward(hidden_ND)


def _mlp_builder(
    spec: ModelSpec,
    reader: ParameterReader,
    parallel: ParallelContext,
    placement: ExpertPlacement | None,
    *,
    num_spare_places: int,
) -> Callable[[int], Mlp]:
    """Reads the MLP of a layer by its index; all MoE layers share one dispatcher."""
    moe_layer_of = {index: moe_layer for moe_layer, index in enumerate(spec.moe_layer_ids)}
    top_k = max((layer.mlp.router.top_k for layer in spec.layers if isinstance(layer.mlp, MoeSpec)), default=1)
    dispatcher = build_dispatcher(parallel, top_k=top_k)

    def build(index: int) -> Mlp:
        mlp, prefix = spec.layers[index].mlp, f"layers.{index}"
        if not isinstance(mlp, MoeSpec):
            width = mlp.intermediate_size
            return DenseMlp.build(reader, f"{prefix}.mlp", intermediate_size=width, parallel=parallel)
        assert placement is not None, "an MoE layer needs a placement"
        assert placement.num_layers == len(moe_layer_of)
        assert placement.num_ranks == parallel.layout.world_size
        return load_moe_layer(
            mlp,
            reader,
            f"{prefix}.moe",
            placement,
            moe_layer_of[index],
            parallel=parallel,
            dispatcher=dispatcher,
            num_spare_places=num_spare_places,
        )

    return build
