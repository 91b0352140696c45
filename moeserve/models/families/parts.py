"""Parts that several families read alike: grouped-query attention, windows, dense layers among MoE layers."""

from typing import Literal

from moeserve.models.families.rope import read_rope
from moeserve.models.raw_config import RawConfig
from moeserve.models.spec import GqaSpec, RouterSpec


def read_gqa(
    config: RawConfig,
    *,
    layer_type: str = "full_attention",
    qkv_bias: bool = False,
    o_bias: bool = False,
    qk_norm: Literal["none", "head", "full"] = "none",
    qkv_clip: float | None = None,
    sinks: bool = False,
) -> GqaSpec:
    """Heads, head size and rope of a layer; a head is hidden_size / num_attention_heads wide unless it says so."""
    num_heads = config.whole("num_attention_heads")
    num_kv_heads = config.whole_or_none("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        raise config.refuse("num_key_value_heads", f"a divisor of the {num_heads} attention heads")
    head_dim = config.whole_or_none("head_dim") or config.whole("hidden_size") // num_heads
    return GqaSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        softmax_scale=head_dim**-0.5,
        rope=read_rope(config, rotary_dim=head_dim, layer_type=layer_type).rope,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        qk_norm=qk_norm,
        qkv_clip=qkv_clip,
        sinks=sinks,
    )


def read_layer_types(config: RawConfig, *, default: tuple[str, ...]) -> tuple[str, ...]:
    """`layer_types`, one for each layer: sliding_attention or full_attention."""
    layer_types = config.texts("layer_types") or default
    if len(layer_types) != config.whole("num_hidden_layers"):
        raise config.refuse("layer_types", f"one for each of the {config.whole('num_hidden_layers')} layers")
    if not set(layer_types) <= {"sliding_attention", "full_attention"}:
        raise config.refuse("layer_types", "a list of sliding_attention and full_attention")
    return layer_types


def read_sparse_layers(config: RawConfig) -> tuple[bool, ...]:
    """Which layers are MoE layers, the Qwen way: every `decoder_sparse_step`th, but none of `mlp_only_layers`."""
    step, dense = config.whole("decoder_sparse_step"), config.wholes("mlp_only_layers")
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(config.whole("num_hidden_layers")))


def check_router(config: RawConfig, router: RouterSpec) -> RouterSpec:
    """`router`, or a ConfigError where the choice cannot be made."""
    if router.top_k > router.num_experts:
        raise config.refuse("num_experts_per_tok", f"at most the number of experts, {router.num_experts}")
    if router.num_experts % router.num_groups:
        raise config.refuse("n_group", f"a divisor of the number of experts, {router.num_experts}")
    if router.num_selected_groups > router.num_groups:
        raise config.refuse("topk_group", f"at most n_group, {router.num_groups}")
    if router.top_k > router.num_experts // router.num_groups * router.num_selected_groups:
        raise config.refuse("num_experts_per_tok", "at most the number of experts in the selected groups")
    return router
