"""Every head by a matrix of its own: the absorbed projections of latent attention."""

from moeserve_kernels.head_linear.op import head_linear
from moeserve_kernels.head_linear.packed import PackedHeads, pack_heads

__all__ = ["PackedHeads", "head_linear", "pack_heads"]
