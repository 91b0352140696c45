"""The MoE kernel library: one folder an op, each with an oracle.

`op.py` validates and computes, `reference.py` is the same in plain loops, for tests and benchmarks. Axis letters are
those of the whole project: T tokens, D model width, F expert width, E experts, p experts held here, K top-k, R rows,
N KV blocks, S tokens a block, H query heads, G key-value heads, V vocabulary (or the width of a value head).
"""

from moeserve_kernels.fused_moe import fused_moe
from moeserve_kernels.kv_cache_write import kv_cache_write
from moeserve_kernels.linear import linear
from moeserve_kernels.moe_align import moe_align
from moeserve_kernels.paged_attention import paged_attention
from moeserve_kernels.rms_norm import rms_norm
from moeserve_kernels.rotary import rotary
from moeserve_kernels.sampling import apply_penalties, filter_logits, gumbel_noise, sample
from moeserve_kernels.silu_and_mul import silu_and_mul
from moeserve_kernels.topk_routing import topk_routing

__all__ = [
    "apply_penalties",
    "filter_logits",
    "fused_moe",
    "gumbel_noise",
    "kv_cache_write",
    "linear",
    "moe_align",
    "paged_attention",
    "rms_norm",
    "rotary",
    "sample",
    "silu_and_mul",
    "topk_routing",
]
