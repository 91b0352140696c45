"""The experts of one rank: permute, two grouped projections, unpermute and weigh."""

from moeserve_kernels.fused_moe.op import fused_moe

__all__ = ["fused_moe"]
