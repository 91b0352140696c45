"""The gated activation of most MLPs: silu(gate) * up."""

from moeserve_kernels.silu_and_mul.op import silu_and_mul

__all__ = ["silu_and_mul"]
