"""From logits to token ids: penalties, filters, and noise that knows nothing of the batch."""

from moeserve_kernels.sampling.op import apply_penalties, filter_logits, gumbel_noise, sample

__all__ = ["apply_penalties", "filter_logits", "gumbel_noise", "sample"]
