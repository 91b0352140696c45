"""From logits to token ids: penalties, filters, and noise that knows nothing of the batch."""

from moeserve_kernels.sampling.op import apply_penalties, sample
from moeserve_kernels.sampling.torch_impl import filter_logits, gumbel_noise

__all__ = ["apply_penalties", "filter_logits", "gumbel_noise", "sample"]
