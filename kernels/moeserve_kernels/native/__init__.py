"""Native CPU kernels: compiled once for this machine, kept in the user's cache, loaded as `torch.ops.moeserve`."""

from moeserve_kernels.native.builder import Progress, build, is_loaded, load
from moeserve_kernels.native.toolchain import NativeUnavailable

__all__ = ["NativeUnavailable", "Progress", "build", "is_loaded", "load"]
