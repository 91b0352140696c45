"""The MoE kernel library: one folder an op, each with an oracle.

`op.py` validates and chooses the backend, `reference.py` is the same in plain loops, for tests and benchmarks. Axis
letters are those of the whole project: T tokens, D model width, F expert width, E experts, p experts held here, K
top-k, R rows, N KV blocks, S tokens a block, H query heads, G key-value heads, V vocabulary (or the width of a value
head).
"""

from moeserve_kernels.attention_inputs import attention_inputs
from moeserve_kernels.fused_moe import ExpertRecord, ExpertShape, PackedExperts, fused_moe, make_record, pack_experts
from moeserve_kernels.head_linear import PackedHeads, head_linear, pack_heads
from moeserve_kernels.kv_cache_write import kv_cache_write
from moeserve_kernels.linear import PackedLinear, Quantization, linear, pack_linear
from moeserve_kernels.moe_align import moe_align
from moeserve_kernels.paged_attention import paged_attention
from moeserve_kernels.rms_norm import rms_norm
from moeserve_kernels.rotary import rotary
from moeserve_kernels.sampling import apply_penalties, filter_logits, gumbel_noise, sample
from moeserve_kernels.silu_and_mul import silu_and_mul
from moeserve_kernels.topk_routing import topk_routing

__all__ = [
    "ExpertRecord",
    "ExpertShape",
    "PackedExperts",
    "PackedHeads",
    "PackedLinear",
    "Quantization",
    "apply_penalties",
    "attention_inputs",
    "filter_logits",
    "fused_moe",
    "gumbel_noise",
    "head_linear",
    "kv_cache_write",
    "linear",
    "make_record",
    "moe_align",
    "pack_experts",
    "pack_heads",
    "pack_linear",
    "paged_attention",
    "rms_norm",
    "rotary",
    "sample",
    "silu_and_mul",
    "topk_routing",
]
