"""Root-mean-square normalisation, with or without adding a residual first."""

from moeserve_kernels.rms_norm.op import rms_norm

__all__ = ["rms_norm"]
