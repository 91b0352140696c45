"""Router: gate logits to the top-k experts of each token and their weights."""

from moeserve_kernels.topk_routing.op import topk_routing

__all__ = ["topk_routing"]
