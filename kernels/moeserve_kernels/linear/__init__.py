"""x W^T + b, at full speed on CPUs without half-precision instructions too."""

from moeserve_kernels.linear.op import linear

__all__ = ["linear"]
