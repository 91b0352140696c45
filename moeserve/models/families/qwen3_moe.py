"""Qwen3-MoE: q and k are normalised per head, no shared expert."""

from collections.abc import Mapping
from typing import Any

from moeserve.models.families.family import CheckpointNames, Family
from moeserve.models.families.parts import check_router, read_gqa, read_sparse_layers
from moeserve.models.raw_config import RawConfig
from moeserve.models.spec import DenseMlpSpec, LayerSpec, MoeSpec, RouterSpec

_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "num_experts": 128,
    "norm_topk_prob": False,
}


def _read_layers(config: RawConfig) -> tuple[LayerSpec, ...]:
    router = RouterSpec(
        num_experts=config.whole("num_experts"),
        top_k=config.whole("num_experts_per_tok"),
        scoring="softmax",
        renormalize=config.flag("norm_topk_prob"),
    )
    moe = MoeSpec(router=check_router(config, router), expert_intermediate_size=config.whole("moe_intermediate_size"))
    dense = DenseMlpSpec(intermediate_size=config.whole("intermediate_size"))
    bias = config.flag("attention_bias")
    attention = read_gqa(config, qkv_bias=bias, o_bias=bias, qk_norm="head")
    window = config.whole_or_none("sliding_window") if config.flag("use_sliding_window") else None
    return tuple(
        LayerSpec(attention=attention, mlp=moe if sparse else dense, sliding_window=window)
        for sparse in read_sparse_layers(config)
    )


QWEN3_MOE = Family(
    names=CheckpointNames(),
    defaults=_DEFAULTS,
    aliases={"num_local_experts": "num_experts"},
    read_layers=_read_layers,
)
