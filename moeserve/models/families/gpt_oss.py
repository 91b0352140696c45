"""gpt-oss: attention sinks, alternating windows, biases everywhere, clamped SwiGLU, interleaved fused experts."""

from collections.abc import Mapping
from typing import Any

from moeserve.models.families.family import CheckpointNames, Family
from moeserve.models.families.parts import check_router, read_gqa, read_layer_types
from moeserve.models.raw_config import RawConfig
from moeserve.models.spec import ActivationSpec, LayerSpec, MoeSpec, RouterSpec

_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "tie_word_embeddings": False,
    "attention_bias": True,
    "num_experts_per_tok": 4,
    "num_local_experts": 128,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}


def _read_layers(config: RawConfig) -> tuple[LayerSpec, ...]:
    router = RouterSpec(
        num_experts=config.whole("num_local_experts"),
        top_k=config.whole("num_experts_per_tok"),
        scoring="topk_softmax",
        renormalize=False,
        gate_bias=True,
    )
    moe = MoeSpec(
        router=check_router(config, router),
        expert_intermediate_size=config.whole("intermediate_size"),
        activation=ActivationSpec(
            kind="swiglu_clamped", alpha=config.number("swiglu_alpha"), limit=config.number("swiglu_limit")
        ),
        expert_bias=True,
    )
    bias = config.flag("attention_bias")
    alternating = tuple(
        "full_attention" if i % 2 else "sliding_attention" for i in range(config.whole("num_hidden_layers"))
    )
    return tuple(
        LayerSpec(
            attention=read_gqa(config, layer_type=layer_type, qkv_bias=bias, o_bias=bias, sinks=True),
            mlp=moe,
            sliding_window=config.whole_or_none("sliding_window") if layer_type == "sliding_attention" else None,
        )
        for layer_type in read_layer_types(config, default=alternating)
    )


GPT_OSS = Family(
    names=CheckpointNames(renamed={"moe.gate.": "mlp.router."}, interleaved_experts=True),
    defaults=_DEFAULTS,
    aliases={"num_experts": "num_local_experts"},
    read_layers=_read_layers,
)
