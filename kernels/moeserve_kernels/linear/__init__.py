"""x W^T + b over weights packed for the machine, whole or as int8."""

from moeserve_kernels.linear.op import linear
from moeserve_kernels.linear.packed import PackedLinear, pack_linear
from moeserve_kernels.linear.quantize import Quantization

__all__ = ["PackedLinear", "Quantization", "linear", "pack_linear"]
