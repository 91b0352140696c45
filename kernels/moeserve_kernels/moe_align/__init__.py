"""Permutation of routed rows that puts the rows of an expert side by side."""

from moeserve_kernels.moe_align.op import moe_align

__all__ = ["moe_align"]
