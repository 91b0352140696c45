"""Mixtral: every layer is an MoE layer; one sliding window for all layers, or none."""

from collections.abc import Mapping
from typing import Any

from moeserve.models.families.family import CheckpointNames, Family
from moeserve.models.families.parts import check_router, read_gqa
from moeserve.models.raw_config import RawConfig
from moeserve.models.spec import LayerSpec, MoeSpec, RouterSpec

_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
}


def _read_layers(config: RawConfig) -> tuple[LayerSpec, ...]:
    router = RouterSpec(
        num_experts=config.whole("num_local_experts"),
        top_k=config.whole("num_experts_per_tok"),
        scoring="softmax",
        renormalize=True,
    )
    layer = LayerSpec(
        attention=read_gqa(config),
        mlp=MoeSpec(router=check_router(config, router), expert_intermediate_size=config.whole("intermediate_size")),
        sliding_window=config.whole_or_none("sliding_window"),
    )
    return (layer,) * config.whole("num_hidden_layers")


MIXTRAL = Family(
    names=CheckpointNames(moe_blocks=("block_sparse_moe", "mlp"), expert_projections=("w1", "w3", "w2")),
    defaults=_DEFAULTS,
    aliases={"num_experts": "num_local_experts"},
    read_layers=_read_layers,
)
