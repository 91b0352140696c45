"""The MoE layer: router -> dispatch -> experts -> combine, with the shared experts beside them."""

from typing import Any

import torch

from moeserve.experts.dispatcher import ExpertDispatcher
from moeserve.experts.placement_tables import PlacementTables
from moeserve.experts.store import ExpertStore
from moeserve.layers.moe.experts import Experts
from moeserve.layers.moe.router import Router
from moeserve.layers.moe.shared_expert import SharedExpert
from moeserve.models.parameters import ParameterReader
from moeserve.models.spec import MoeSpec
from moeserve.parallel import ParallelContext
from moeserve_placement import ExpertPlacement


class MoeLayer:
    """One MoE layer on one rank.

    `tables` and `experts.store` belong to one placement epoch: they are replaced together, between two steps.
    """

    def __init__(
        self,
        *,
        router: Router,
        dispatcher: ExpertDispatcher[Any],
        tables: PlacementTables,
        experts: Experts,
        shared_expert: SharedExpert | None,
    ) -> None:
        self.router = router
        self.dispatcher = dispatcher
        self.tables = tables
        self.experts = experts
        self.shared_expert = shared_expert

    def forward(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        """[T, D] whole on every tp rank. Collective over the EP group: every rank comes, also with T = 0."""
        weights_TK, expert_ids_TK = self.router.forward(hidden_TD)
        rows, record = self.dispatcher.dispatch(hidden_TD, weights_TK, expert_ids_TK, self.tables)
        output_RD = self.experts.forward(rows)
        partial_TD = None if self.shared_expert is None else self.shared_expert.forward(hidden_TD)
        return self.dispatcher.combine(output_RD, record, partial_TD)


def load_moe_layer(
    spec: MoeSpec,
    reader: ParameterReader,
    prefix: str,
    placement: ExpertPlacement,
    moe_layer: int,
    *,
    parallel: ParallelContext,
    dispatcher: ExpertDispatcher[Any],
) -> MoeLayer:
    """Read this rank's part of the layer named `prefix` (`layers.3.moe`).

    moe_layer: index among the MoE layers, the placement's layer axis.
    """
    rank, device = parallel.layout.rank, parallel.device
    store = ExpertStore.load(spec, reader, f"{prefix}.experts", placement, moe_layer, rank=rank, device=device)
    return MoeLayer(
        router=Router.load(spec.router, reader, f"{prefix}.gate", device),
        dispatcher=dispatcher,
        tables=PlacementTables.build(placement, moe_layer, rank=rank, device=device),
        experts=Experts(store, spec.activation),
        shared_expert=SharedExpert.load(spec, reader, prefix, parallel) if spec.shared_intermediate_size else None,
    )
