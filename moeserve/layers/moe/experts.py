"""The experts of one layer on this rank: rows with local expert ids in, weighted sums out."""

import torch

from moeserve.experts.dispatcher import ExpertInput
from moeserve.experts.store import ExpertStore
from moeserve.models.spec import ActivationSpec
from moeserve_kernels import fused_moe


class Experts:
    """Computes rows through the expert store; knows neither ranks nor transport."""

    def __init__(self, store: ExpertStore, activation: ActivationSpec) -> None:
        self.store = store
        self.activation = activation

    def forward(self, rows: ExpertInput) -> torch.Tensor:
        """[R, D] in the dtype of the rows."""
        return fused_moe(
            rows.hidden_RD,
            rows.weights_RK,
            rows.expert_ids_RK,
            self.store.experts,
            activation=self.activation.kind,
            alpha=self.activation.alpha,
            limit=self.activation.limit,
        )
