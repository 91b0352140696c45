"""OLMoE: q and k are normalised over all heads together, and q, k and v may be clipped."""

from collections.abc import Mapping
from typing import Any

from moeserve.models.families.family import CheckpointNames, Family
from moeserve.models.families.parts import check_router, read_gqa
from moeserve.models.raw_config import RawConfig
from moeserve.models.spec import LayerSpec, MoeSpec, RouterSpec

_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 50304,
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "eos_token_id": 50279,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "num_experts_per_tok": 8,
    "num_experts": 64,
    "norm_topk_prob": False,
}


def _read_layers(config: RawConfig) -> tuple[LayerSpec, ...]:
    router = RouterSpec(
        num_experts=config.whole("num_experts"),
        top_k=config.whole("num_experts_per_tok"),
        scoring="softmax",
        renormalize=config.flag("norm_topk_prob"),
    )
    bias = config.flag("attention_bias")
    layer = LayerSpec(
        attention=read_gqa(
            config, qkv_bias=bias, o_bias=bias, qk_norm="full", qkv_clip=config.number_or_none("clip_qkv")
        ),
        mlp=MoeSpec(router=check_router(config, router), expert_intermediate_size=config.whole("intermediate_size")),
    )
    return (layer,) * config.whole("num_hidden_layers")


OLMOE = Family(
    names=CheckpointNames(),
    defaults=_DEFAULTS,
    aliases={"num_local_experts": "num_experts"},
    read_layers=_read_layers,
)
