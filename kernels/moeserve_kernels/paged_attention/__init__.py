"""Variable-length causal attention over the paged KV cache."""

from moeserve_kernels.paged_attention.op import paged_attention

__all__ = ["paged_attention"]
