"""The placement in force on a rank: what the thread that steps does about it, and the threads beside it.

frontend --StageChange--> migrator --> copies (a thread for each change) <--TCP-- record servers of other ranks
                             |                    v
                          LoadReport         ChangeSlot --votes--> step agreement --commit--> tables of the layers
"""

import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from time import perf_counter

import msgspec

from moeserve.engine.outputs import SchedulerOutput
from moeserve.engine.placement_messages import (
    ChangeCommitted,
    LoadReport,
    MigratorReady,
    PlacementShape,
    pack_array,
)
from moeserve.experts.load_recorder import LoadRecorder, LoadSample
from moeserve.experts.migration.holdings import Holdings
from moeserve.experts.migration.places import RankPlaces
from moeserve.experts.migration.record_server import RecordServer
from moeserve.experts.migration.slot import ChangeSlot
from moeserve.ids import PlacementEpoch
from moeserve.layers.forward_batch import count_decode_tokens
from moeserve.layers.moe.layer import MoeLayer
from moeserve.models.decoder import Decoder
from moeserve.parallel import ParallelContext
from moeserve.worker.hosts import Host, address_towards, exchange, this_host
from moeserve.worker.migration.migrator import Migrator
from moeserve_placement import ExpertPlacement


class OnlinePlacement:
    """For the thread that steps; nothing here waits for another rank or a copy."""

    def __init__(
        self,
        layers: Sequence[MoeLayer],
        holdings: Holdings,
        slot: ChangeSlot,
        migrator: Migrator,
        record_server: RecordServer,
        *,
        recorder: LoadRecorder | None,
    ) -> None:
        """recorder: on ranks that report loads."""
        self._layers = layers
        self._holdings = holdings
        self._slot = slot
        self._migrator = migrator
        self._record_server = record_server
        self._recorder = recorder
        self._rank = holdings.places.rank
        self._dropped_change = 0

    @property
    def epoch(self) -> PlacementEpoch:
        """Of the placement in force."""
        return PlacementEpoch(self._holdings.places.placement.epoch)

    def has_staged(self, change_id: int) -> bool:
        """Whether this rank could commit the change."""
        return self._slot.is_staged(change_id)

    def settle(self, *, committed_change: int, dropped_change: int) -> None:
        """Before a step: put a change in force that all replicas voted for (0: none), and free withdrawn ones."""
        if committed_change:
            start = perf_counter()
            staged = self._slot.take(committed_change)
            for layer, tables in zip(self._layers, staged.tables, strict=True):
                layer.tables.take_over(tables)
            self._holdings.replace(staged.places)
            pause_s = perf_counter() - start
            self._migrator.say(ChangeCommitted(rank=self._rank, change_id=committed_change, pause_s=pause_s))
        if dropped_change > self._dropped_change:
            self._dropped_change = dropped_change
            self._slot.withdraw(dropped_change)

    def measure(self, output: SchedulerOutput) -> AbstractContextManager[None]:
        """Run a step of the engine inside."""
        if self._recorder is None:
            return nullcontext()
        num_decode_tokens = count_decode_tokens(output.num_scheduled_tokens.values())
        num_prefill_tokens = output.total_num_scheduled_tokens - num_decode_tokens
        return self._recorder.step(num_prefill_tokens=num_prefill_tokens, num_decode_tokens=num_decode_tokens)

    def close(self) -> None:
        """End the threads."""
        self._record_server.close()
        self._migrator.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Neighbours:
    """Where the ranks of the engine run."""

    node_of_rank: list[int]
    host_for_records: str
    """This rank's address, for all of them."""


def start_online_placement(
    decoder: Decoder,
    placement: ExpertPlacement,
    parallel: ParallelContext,
    *,
    frontend_address: str,
    window_s: float,
    on_death: Callable[[BaseException], None],
) -> OnlinePlacement:
    """Start the threads and say hello to the frontend; collective over the engine.

    placement: which the decoder was loaded with. on_death: what to do when a thread ends by an error; it is called
    there, and the rank must not go on.
    """
    layers, layout = decoder.moe_layers, parallel.layout
    holdings = Holdings(RankPlaces.in_order(placement, layout.rank), [layer.experts.store for layer in layers])
    slot = ChangeSlot()
    neighbours = _find_neighbours(parallel)
    record_server = RecordServer(holdings, host=neighbours.host_for_records, on_death=on_death)
    migrator = Migrator(
        frontend_address=frontend_address,
        ready=MigratorReady(
            rank=layout.rank,
            incarnation=uuid.uuid4().hex,
            record_address=record_server.address,
            shape=_shape(decoder, placement, holdings, neighbours.node_of_rank),
            placement=pack_array(placement.physical_to_logical_LP, "<i4"),
            epoch=placement.epoch,
        ),
        holdings=holdings,
        slot=slot,
        device=parallel.device,
        on_death=on_death,
    )
    recorder = None
    if layout.is_leader:
        recorder = LoadRecorder(
            num_layers=len(layers),
            num_experts=placement.num_logical_experts,
            device=parallel.device,
            window_s=window_s,
            on_window=lambda sample: migrator.say(_load_report(sample, layout.dp_rank)),
        )
        for layer, load in zip(layers, recorder.layers, strict=True):
            layer.load = load
    return OnlinePlacement(layers, holdings, slot, migrator, record_server, recorder=recorder)


def _find_neighbours(parallel: ParallelContext) -> _Neighbours:
    hosts = [msgspec.json.decode(r, type=Host) for r in exchange(this_host(), parallel.ep, parallel.device)]
    this = hosts[parallel.layout.rank]
    nodes = list(dict.fromkeys(host.name for host in hosts))
    # The way to another host is open to ranks of this one too; with one host nothing leaves it.
    other = next((host for host in hosts if host != this), this)
    return _Neighbours(
        node_of_rank=[nodes.index(host.name) for host in hosts], host_for_records=address_towards(other, this=this)
    )


def _shape(decoder: Decoder, placement: ExpertPlacement, holdings: Holdings, node_of_rank: list[int]) -> PlacementShape:
    stores = holdings.stores
    return PlacementShape(
        num_layers=placement.num_layers,
        moe_layer_ids=list(decoder.spec.moe_layer_ids),
        num_logical_experts=placement.num_logical_experts,
        top_k=decoder.moe_layers[0].router.spec.top_k,
        num_physical_by_rank=placement.num_physical_R.tolist(),
        node_of_rank=node_of_rank,
        expert_bytes=max(store.expert_bytes for store in stores),
        num_spare_places=stores[0].num_places - len(stores[0].logical_ids),
    )


def _load_report(sample: LoadSample, dp_rank: int) -> LoadReport:
    return LoadReport(
        dp_rank=dp_rank,
        start_s=sample.start_s,
        end_s=sample.end_s,
        num_steps=sample.num_steps,
        num_prefill_tokens=sample.num_prefill_tokens,
        num_decode_tokens=sample.num_decode_tokens,
        step_s=sample.step_s,
        expert_s=sample.expert_s,
        prefill_load=pack_array(sample.prefill_load_LE, "<i8"),
        decode_load=pack_array(sample.decode_load_LE, "<i8"),
    )
