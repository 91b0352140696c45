"""Everything between the projections and attention: norms, rotation, and the write to the KV cache."""

from moeserve_kernels.attention_inputs.op import attention_inputs

__all__ = ["attention_inputs"]
