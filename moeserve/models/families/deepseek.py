"""DeepSeek-V2 and V3: latent attention, shared experts, leading dense layers, routing limited to the best groups."""

from collections.abc import Callable, Mapping
from typing import Any

from moeserve.models.families.family import CheckpointNames, Family
from moeserve.models.families.parts import check_router
from moeserve.models.families.rope import read_rope
from moeserve.models.raw_config import RawConfig
from moeserve.models.spec import DenseMlpSpec, LayerSpec, MlaSpec, MoeSpec, RouterSpec

_COMMON_DEFAULTS: Mapping[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_interleave": True,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_layer_freq": 1,
}
_V2_DEFAULTS: Mapping[str, Any] = {
    **_COMMON_DEFAULTS,
    "vocab_size": 102400,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "moe_intermediate_size": 1407,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "eos_token_id": 2,
    "first_k_dense_replace": 0,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_method": "greedy",
}
_V3_DEFAULTS: Mapping[str, Any] = {
    **_COMMON_DEFAULTS,
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "max_position_embeddings": 4096,
    "eos_token_id": 1,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}


def _layers_reader(read_router: Callable[[RawConfig], RouterSpec]) -> Callable[[RawConfig], tuple[LayerSpec, ...]]:
    def read_layers(config: RawConfig) -> tuple[LayerSpec, ...]:
        if config.flag("mlp_bias"):
            raise config.refuse("mlp_bias", "false")
        expert_width = config.whole("moe_intermediate_size")
        num_shared = config.whole_or_none("n_shared_experts", at_least=0) or 0
        moe = MoeSpec(
            router=check_router(config, read_router(config)),
            expert_intermediate_size=expert_width,
            shared_intermediate_size=num_shared * expert_width,
        )
        dense = DenseMlpSpec(intermediate_size=config.whole("intermediate_size"))
        first_moe, every = config.whole("first_k_dense_replace", at_least=0), config.whole("moe_layer_freq")
        attention = _read_attention(config)
        return tuple(
            LayerSpec(attention=attention, mlp=moe if i >= first_moe and i % every == 0 else dense)
            for i in range(config.whole("num_hidden_layers"))
        )

    return read_layers


def _read_attention(config: RawConfig) -> MlaSpec:
    nope_dim, rope_dim = config.whole("qk_nope_head_dim"), config.whole("qk_rope_head_dim")
    reading = read_rope(config, rotary_dim=rope_dim, interleaved=config.flag("rope_interleave"))
    return MlaSpec(
        num_heads=config.whole("num_attention_heads"),
        q_lora_rank=config.whole_or_none("q_lora_rank"),
        kv_lora_rank=config.whole("kv_lora_rank"),
        qk_nope_head_dim=nope_dim,
        qk_rope_head_dim=rope_dim,
        v_head_dim=config.whole("v_head_dim"),
        softmax_scale=(nope_dim + rope_dim) ** -0.5 * reading.logit_factor,
        rope=reading.rope,
        bias=config.flag("attention_bias"),
    )


def _read_v2_router(config: RawConfig) -> RouterSpec:
    """`norm_topk_prob` has no effect: it is false in all published checkpoints, and transformers does not read it."""
    config.choice("scoring_func", "softmax")
    grouped = config.choice("topk_method", "greedy", "group_limited_greedy") == "group_limited_greedy"
    return RouterSpec(
        num_experts=config.whole("n_routed_experts"),
        top_k=config.whole("num_experts_per_tok"),
        scoring="softmax",
        renormalize=False,
        scaling_factor=config.number("routed_scaling_factor"),
        num_groups=config.whole("n_group") if grouped else 1,
        num_selected_groups=config.whole("topk_group") if grouped else 1,
    )


def _read_v3_router(config: RawConfig) -> RouterSpec:
    config.choice("scoring_func", "sigmoid")
    config.choice("topk_method", "noaux_tc")
    return RouterSpec(
        num_experts=config.whole("n_routed_experts"),
        top_k=config.whole("num_experts_per_tok"),
        scoring="sigmoid",
        renormalize=config.flag("norm_topk_prob"),
        scaling_factor=config.number("routed_scaling_factor"),
        num_groups=config.whole_or_none("n_group") or 1,
        num_selected_groups=config.whole_or_none("topk_group") or 1,
        group_score="top2_sum",
        correction_bias=True,
    )


_RENAMED = {
    "attention.q_a_norm.": "self_attn.q_a_layernorm.",
    "attention.kv_a_norm.": "self_attn.kv_a_layernorm.",
    "attention.kv_a_proj.": "self_attn.kv_a_proj_with_mqa.",
    "moe.shared_expert.": "mlp.shared_experts.",
    "moe.gate.correction_bias": "mlp.gate.e_score_correction_bias",
}
_ALIASES = {"num_experts": "n_routed_experts", "num_local_experts": "n_routed_experts"}

DEEPSEEK_V2 = Family(
    names=CheckpointNames(renamed=_RENAMED),
    defaults=_V2_DEFAULTS,
    aliases=_ALIASES,
    read_layers=_layers_reader(_read_v2_router),
)
DEEPSEEK_V3 = Family(
    names=CheckpointNames(renamed=_RENAMED, has_draft_layers=True),
    defaults=_V3_DEFAULTS,
    aliases=_ALIASES,
    read_layers=_layers_reader(_read_v3_router),
)
