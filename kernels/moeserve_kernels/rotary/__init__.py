"""Rotary position embedding of query and key heads."""

from moeserve_kernels.rotary.op import rotary

__all__ = ["rotary"]
