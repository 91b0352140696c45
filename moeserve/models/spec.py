"""What a decoder is made of, independent of any checkpoint format: the model spec.

A Hugging Face `config.json` becomes a `ModelSpec` (`moeserve.models.hf_config`), and one decoder is built from it. The
tensors of the decoder have canonical names and full (unsharded) shapes, listed by `canonical_shapes`; a
`ParameterReader` gives slices of them, whatever the checkpoint looks like. No torch here.

Axes: V vocabulary, D model width, H query heads, G key-value heads, F expert (or MLP) width, E logical experts.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding of the first `rotary_dim` dimensions of a head."""

    theta: float
    rotary_dim: int
    interleaved: bool = False
    """Pairs are (0, 1), (2, 3), ... (DeepSeek) rather than (0, rotary_dim / 2), ..."""
    scaling: Literal["none", "linear", "yarn", "llama3"] = "none"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    attention_factor: float = 1.0
    """Cosines and sines are multiplied by it (yarn)."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """Yarn: round the correction range to whole dimensions."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GqaSpec:
    """Grouped-query attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    softmax_scale: float
    rope: RopeSpec
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: Literal["none", "head", "full"] = "none"
    """RMS norm of q and k before rope: per head (Qwen3), or over all heads together (OLMoE)."""
    qkv_clip: float | None = None
    sinks: bool = False
    """A learned logit per head that takes part in the softmax and carries no value (gpt-oss)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaSpec:
    """Multi-head latent attention (DeepSeek): the cache holds one latent of kv_lora_rank + qk_rope_head_dim a token."""

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    softmax_scale: float
    rope: RopeSpec
    bias: bool = False
    """Bias of q_a, kv_a and o projections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSpec:
    """Gate logits to top-k experts and their weights."""

    num_experts: int
    top_k: int
    scoring: Literal["softmax", "sigmoid", "topk_softmax"]
    """softmax/sigmoid over all, then top-k; or top-k of the logits, then softmax over those (gpt-oss)."""
    renormalize: bool
    scaling_factor: float = 1.0
    num_groups: int = 1
    num_selected_groups: int = 1
    """Experts outside the best groups are masked."""
    group_score: Literal["max", "top2_sum"] = "max"
    correction_bias: bool = False
    """A bias per expert that is added to the scores for the choice, not for the weights (DeepSeek-V3)."""
    gate_bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationSpec:
    """What stands between gate-up and down projection.

    silu: silu(gate) * up. swiglu_clamped (gpt-oss): gate clamped above at limit, up clamped to +-limit, then
    gate * sigmoid(alpha * gate) * (up + 1).
    """

    kind: Literal["silu", "swiglu_clamped"] = "silu"
    alpha: float = 1.702
    limit: float = 7.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    router: RouterSpec
    expert_intermediate_size: int
    activation: ActivationSpec = ActivationSpec()
    expert_bias: bool = False
    shared_intermediate_size: int = 0
    """Width of the shared experts together, run by every token; 0: none."""
    shared_gate: bool = False
    """The shared output is scaled by sigmoid of a learned projection (Qwen2-MoE)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseMlpSpec:
    intermediate_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    attention: GqaSpec | MlaSpec
    mlp: DenseMlpSpec | MoeSpec
    sliding_window: int | None = None
    """A token sees itself and the sliding_window - 1 tokens before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    architecture: str
    """The Hugging Face class, e.g. Qwen3MoeForCausalLM."""
    vocab_size: int
    hidden_size: int
    rms_norm_eps: float
    layers: tuple[LayerSpec, ...]
    tie_word_embeddings: bool
    max_position_embeddings: int
    dtype: str
    """The checkpoint's: float32, bfloat16 or float16."""
    eos_token_ids: tuple[int, ...] = ()

    @property
    def moe_layer_ids(self) -> tuple[int, ...]:
        return tuple(i for i, layer in enumerate(self.layers) if isinstance(layer.mlp, MoeSpec))

    @property
    def num_experts(self) -> int:
        """Logical experts of each MoE layer (the same in all)."""
        return next((layer.mlp.router.num_experts for layer in self.layers if isinstance(layer.mlp, MoeSpec)), 0)


def canonical_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor of the decoder with its full shape. Linear weights are [out, in]."""
    hidden = spec.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (spec.vocab_size, hidden)}
    for i, layer in enumerate(spec.layers):
        prefix = f"layers.{i}"
        shapes[f"{prefix}.input_norm.weight"] = (hidden,)
        shapes[f"{prefix}.post_attention_norm.weight"] = (hidden,)
        attention = layer.attention
        part = _gqa_shapes(attention, hidden) if isinstance(attention, GqaSpec) else _mla_shapes(attention, hidden)
        shapes |= {f"{prefix}.attention.{name}": shape for name, shape in part.items()}
        if isinstance(layer.mlp, MoeSpec):
            shapes |= {f"{prefix}.moe.{name}": shape for name, shape in _moe_shapes(layer.mlp, hidden).items()}
        else:
            mlp = _mlp_shapes(layer.mlp.intermediate_size, hidden)
            shapes |= {f"{prefix}.mlp.{name}": shape for name, shape in mlp.items()}
    shapes["final_norm.weight"] = (hidden,)
    if not spec.tie_word_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    return shapes


def _gqa_shapes(spec: GqaSpec, hidden: int) -> dict[str, tuple[int, ...]]:
    q_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "q_proj.weight": (q_width, hidden),
        "k_proj.weight": (kv_width, hidden),
        "v_proj.weight": (kv_width, hidden),
        "o_proj.weight": (hidden, q_width),
    }
    if spec.qkv_bias:
        shapes |= {"q_proj.bias": (q_width,), "k_proj.bias": (kv_width,), "v_proj.bias": (kv_width,)}
    if spec.o_bias:
        shapes["o_proj.bias"] = (hidden,)
    if spec.qk_norm == "head":
        shapes |= {"q_norm.weight": (spec.head_dim,), "k_norm.weight": (spec.head_dim,)}
    elif spec.qk_norm == "full":
        shapes |= {"q_norm.weight": (q_width,), "k_norm.weight": (kv_width,)}
    if spec.sinks:
        shapes["sinks"] = (spec.num_heads,)
    return shapes


def _mla_shapes(spec: MlaSpec, hidden: int) -> dict[str, tuple[int, ...]]:
    q_width = spec.num_heads * (spec.qk_nope_head_dim + spec.qk_rope_head_dim)
    latent = spec.kv_lora_rank + spec.qk_rope_head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "kv_a_proj.weight": (latent, hidden),
        "kv_a_norm.weight": (spec.kv_lora_rank,),
        "kv_b_proj.weight": (spec.num_heads * (spec.qk_nope_head_dim + spec.v_head_dim), spec.kv_lora_rank),
        "o_proj.weight": (hidden, spec.num_heads * spec.v_head_dim),
    }
    if spec.q_lora_rank is None:
        shapes["q_proj.weight"] = (q_width, hidden)
    else:
        shapes |= {
            "q_a_proj.weight": (spec.q_lora_rank, hidden),
            "q_a_norm.weight": (spec.q_lora_rank,),
            "q_b_proj.weight": (q_width, spec.q_lora_rank),
        }
    if spec.bias:
        shapes |= {"kv_a_proj.bias": (latent,), "o_proj.bias": (hidden,)}
        if spec.q_lora_rank is not None:
            shapes["q_a_proj.bias"] = (spec.q_lora_rank,)
    return shapes


def _mlp_shapes(width: int, hidden: int) -> dict[str, tuple[int, ...]]:
    return {
        "gate_proj.weight": (width, hidden),
        "up_proj.weight": (width, hidden),
        "down_proj.weight": (hidden, width),
    }


def _moe_shapes(spec: MoeSpec, hidden: int) -> dict[str, tuple[int, ...]]:
    num_experts, width = spec.router.num_experts, spec.expert_intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "gate.weight": (num_experts, hidden),
        "experts.gate_up_proj": (num_experts, 2 * width, hidden),  # gate rows first, then up rows
        "experts.down_proj": (num_experts, hidden, width),
    }
    if spec.router.gate_bias:
        shapes["gate.bias"] = (num_experts,)
    if spec.router.correction_bias:
        shapes["gate.correction_bias"] = (num_experts,)
    if spec.expert_bias:
        shapes |= {"experts.gate_up_bias": (num_experts, 2 * width), "experts.down_bias": (num_experts, hidden)}
    if spec.shared_intermediate_size:
        shared = _mlp_shapes(spec.shared_intermediate_size, hidden)
        shapes |= {f"shared_expert.{name}": shape for name, shape in shared.items()}
    if spec.shared_gate:
        shapes["shared_gate.weight"] = (1, hidden)
    return shapes
