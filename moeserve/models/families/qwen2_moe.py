"""Qwen2-MoE (and Qwen1.5-MoE): biases on q, k and v, and a shared expert scaled by a learned gate."""

from collections.abc import Mapping
from typing import Any

from moeserve.models.families.family import CheckpointNames, Family
from moeserve.models.families.parts import check_router, read_gqa, read_layer_types, read_sparse_layers
from moeserve.models.raw_config import RawConfig
from moeserve.models.spec import DenseMlpSpec, LayerSpec, MoeSpec, RouterSpec

_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts_per_tok": 4,
    "num_experts": 60,
    "norm_topk_prob": False,
    "qkv_bias": True,
}


def _read_layers(config: RawConfig) -> tuple[LayerSpec, ...]:
    router = RouterSpec(
        num_experts=config.whole("num_experts"),
        top_k=config.whole("num_experts_per_tok"),
        scoring="softmax",
        renormalize=config.flag("norm_topk_prob"),
    )
    moe = MoeSpec(
        router=check_router(config, router),
        expert_intermediate_size=config.whole("moe_intermediate_size"),
        shared_intermediate_size=config.whole("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    dense = DenseMlpSpec(intermediate_size=config.whole("intermediate_size"))
    layer_types = read_layer_types(config, default=_default_layer_types(config))
    return tuple(
        LayerSpec(
            attention=read_gqa(config, layer_type=layer_type, qkv_bias=config.flag("qkv_bias")),
            mlp=moe if sparse else dense,
            sliding_window=config.whole_or_none("sliding_window") if layer_type == "sliding_attention" else None,
        )
        for layer_type, sparse in zip(layer_types, read_sparse_layers(config), strict=True)
    )


def _default_layer_types(config: RawConfig) -> tuple[str, ...]:
    """Every other one of the first `max_window_layers` layers slides, from the first on, where windows are used."""
    num_sliding = config.whole("max_window_layers", at_least=0) if config.flag("use_sliding_window") else 0
    return tuple(
        "sliding_attention" if i < num_sliding and i % 2 == 0 else "full_attention"
        for i in range(config.whole("num_hidden_layers"))
    )


QWEN2_MOE = Family(
    names=CheckpointNames(renamed={"moe.shared_gate.": "mlp.shared_expert_gate."}),
    defaults=_DEFAULTS,
    aliases={"num_local_experts": "num_experts"},
    read_layers=_read_layers,
)
