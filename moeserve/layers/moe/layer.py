"""The MoE layer: router -> dispatch -> experts -> combine, with the shared experts beside them."""

from time import perf_counter
from typing import Any, Final

import torch

from moeserve.experts.dispatcher import ExpertDispatcher
from moeserve.experts.load_recorder import LayerLoad
from moeserve.experts.placement_tables import PlacementTables
from moeserve.experts.store import ExpertStore
from moeserve.layers.forward_batch import ForwardBatch
from moeserve.layers.moe.experts import Experts
from moeserve.layers.moe.router import Router
from moeserve.layers.moe.shared_expert import SharedExpert
from moeserve.models.parameters import ParameterReader
from moeserve.models.spec import MoeSpec
from moeserve.parallel import ParallelContext
from moeserve_placement import ExpertPlacement


class MoeLayer:
    """One MoE layer on one rank.

    `tables` are those of the placement in force; another one's are copied into them between two steps. `load` counts
    what the router chooses, where it is wanted.
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
        self.tables: Final = tables
        self.experts = experts
        self.shared_expert = shared_expert
        self.load: LayerLoad | None = None

    def forward(self, hidden_TD: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """[T, D] whole on every tp rank. Collective over the EP group: every rank comes, also with T = 0."""
        weights_TK, expert_ids_TK = self._route(hidden_TD, batch)
        start = perf_counter()
        rows, record = self.dispatcher.dispatch(
            hidden_TD,
            weights_TK,
            expert_ids_TK,
            self.tables,
            batch.num_tokens_by_dp_rank,
            has_fixed_shapes=batch.has_fixed_shapes,
        )
        output_RD = self.experts.forward(rows)
        partial_TD = None if self.shared_expert is None else self.shared_expert.forward(hidden_TD)
        output_TD = self.dispatcher.combine(output_RD, record, partial_TD)
        if self.load is not None:
            self.load.add_expert_seconds(perf_counter() - start)
        return output_TD

    def _route(self, hidden_TD: torch.Tensor, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        if self.load is None:
            return self.router.forward(hidden_TD, num_real_tokens_1=batch.num_real_tokens_1)
        num_decode_tokens = batch.num_decode_tokens
        load_E, num_counted_tokens = self.load.first_counter(len(hidden_TD), num_decode_tokens)
        routing = self.router.forward(
            hidden_TD,
            load_E=load_E,
            num_counted_tokens=num_counted_tokens,
            num_real_tokens_1=batch.num_real_tokens_1,
        )
        self.load.count_rest(routing[1], num_decode_tokens)
        return routing


def load_moe_layer(
    spec: MoeSpec,
    reader: ParameterReader,
    prefix: str,
    placement: ExpertPlacement,
    moe_layer: int,
    *,
    parallel: ParallelContext,
    dispatcher: ExpertDispatcher[Any],
    num_spare_places: int = 0,
) -> MoeLayer:
    """Read this rank's part of the layer named `prefix` (`layers.3.moe`).

    moe_layer: index among the MoE layers, the placement's layer axis. num_spare_places: room for experts that migrate.
    """
    rank, device = parallel.layout.rank, parallel.device
    store = ExpertStore.load(
        spec,
        reader,
        f"{prefix}.experts",
        placement,
        moe_layer,
        rank=rank,
        device=device,
        num_spare_places=num_spare_places,
    )
    return MoeLayer(
        router=Router.load(spec.router, reader, f"{prefix}.gate", device),
        dispatcher=dispatcher,
        tables=PlacementTables.build(placement, moe_layer, rank=rank, device=device),
        experts=Experts(store, spec.activation),
        shared_expert=SharedExpert.load(spec, reader, prefix, parallel) if spec.shared_intermediate_size else None,
    )
