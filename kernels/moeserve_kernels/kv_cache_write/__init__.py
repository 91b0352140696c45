"""Writing the keys, values or latents of a step into the paged KV cache."""

from moeserve_kernels.kv_cache_write.op import kv_cache_write

__all__ = ["kv_cache_write"]
