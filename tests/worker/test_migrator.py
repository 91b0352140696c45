"""The threads beside the steps: what a stranger says does not end them, and an end is never quiet."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from moeserve.engine.placement_messages import MigratorReady, PlacementShape, migrator_identity
from moeserve.experts.migration.holdings import Holdings
from moeserve.experts.migration.places import RankPlaces
from moeserve.experts.migration.record_format import (
    RecordHeader,
    RecordRequest,
    checksum,
    pack_record,
    receive_exactly,
    receive_frame,
    send_frame,
)
from moeserve.experts.migration.record_server import RecordServer
from moeserve.experts.migration.slot import ChangeSlot
from moeserve.experts.store import ExpertStore
from moeserve.models.parameters import DictReader
from moeserve.models.spec import MoeSpec
from moeserve.testing.fake_frontend import listening_frontend
from moeserve.testing.tiny_models import random_parameters, tiny_spec
from moeserve.worker.migration.migrator import Migrator
from moeserve_placement import ExpertPlacement

CPU = torch.device("cpu")
TIMEOUT_S = 20.0


@pytest.fixture(scope="module")
def holdings() -> Holdings:
    """Rank 1 of 2: experts 4 to 7."""
    spec = tiny_spec("gpt_oss")
    mlp = spec.layers[0].mlp
    assert isinstance(mlp, MoeSpec)
    placement = ExpertPlacement.identity(num_layers=1, num_logical_experts=8, num_ranks=2)
    reader = DictReader(random_parameters(spec))
    store = ExpertStore.load(mlp, reader, "layers.0.moe.experts", placement, 0, rank=1, device=CPU)
    return Holdings(RankPlaces.in_order(placement, 1), [store])


@contextmanager
def connected(server: RecordServer) -> Iterator[socket.socket]:
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as connection:
        yield connection


def request(logical_id: int, *, layer: int = 0, epoch: int = 0) -> RecordRequest:
    return RecordRequest(layer=layer, logical_id=logical_id, epoch=epoch, bytes_per_s=1e9, timeout_s=0.05)


def go_on() -> None:
    """The socket's own timeout is enough."""


def test_a_server_outlives_strangers_and_serves_what_it_holds(holdings: Holdings) -> None:
    deaths: list[BaseException] = []
    server = RecordServer(holdings, host="127.0.0.1", on_death=deaths.append)
    for greeting in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\x05\0\0\0never", b"\x01\0"):
        with connected(server) as connection:
            connection.sendall(greeting)
    with connected(server) as connection:
        send_frame(connection, request(6))
        header = receive_frame(connection, RecordHeader, go_on)
        data = receive_exactly(connection, header.num_bytes, go_on)
    assert header.checksum == checksum(data)
    assert bytes(data) == pack_record(holdings.stores[0].read_expert(2)).numpy().tobytes()
    server.close()
    assert not deaths


@pytest.mark.parametrize(
    ("unheld", "error"),
    [
        (request(3), "rank 1 does not hold expert 3 of layer 0 in epoch 0"),
        (request(5, layer=1), "rank 1 does not hold expert 5 of layer 1 in epoch 0"),
        (request(99), "rank 1 does not hold expert 99 of layer 0 in epoch 0"),
    ],
)
def test_what_is_not_held_is_refused(holdings: Holdings, unheld: RecordRequest, error: str) -> None:
    server = RecordServer(holdings, host="127.0.0.1", on_death=pytest.fail)
    with connected(server) as connection:
        send_frame(connection, unheld)
        assert receive_frame(connection, RecordHeader, go_on) == RecordHeader(error=error)
    server.close()


def test_a_reader_waits_for_a_source_that_commits_later(holdings: Holdings) -> None:
    """Ranks commit at one step, but the first may ask for an expert of the new placement before the last is there."""
    own = Holdings(holdings.places, holdings.stores)
    placement = own.places.placement
    moved = ExpertPlacement(
        physical_to_logical_LP=placement.physical_to_logical_LP[:, [4, 1, 2, 3, 0, 5, 6, 7]],
        num_logical_experts=8,
        num_ranks=2,
        epoch=1,
    )
    places, _ = own.places.change_to(moved, num_places=5)
    read: list[torch.Tensor] = []

    def reader() -> None:
        read.append(own.read(0, 5, epoch=1, timeout_s=TIMEOUT_S))

    thread = threading.Thread(target=reader)
    thread.start()
    own.replace(places)
    thread.join(TIMEOUT_S)
    assert len(read) == 1


def ready_message(holdings: Holdings) -> MigratorReady:
    shape = PlacementShape(
        num_layers=1,
        moe_layer_ids=[0],
        num_logical_experts=8,
        top_k=2,
        num_physical_by_rank=[4, 4],
        node_of_rank=[0, 0],
        expert_bytes=1,
        num_spare_places=0,
    )
    return MigratorReady(rank=1, incarnation="a", record_address="", shape=shape, placement=b"", epoch=0)


def test_a_migrator_that_dies_says_so(holdings: Holdings) -> None:
    died = threading.Event()
    deaths: list[BaseException] = []

    def on_death(error: BaseException) -> None:
        deaths.append(error)
        died.set()

    with listening_frontend() as frontend:
        migrator = Migrator(
            frontend_address=frontend.address,
            ready=ready_message(holdings),
            holdings=holdings,
            slot=ChangeSlot(),
            device=CPU,
            on_death=on_death,
        )
        assert frontend.receive() == ready_message(holdings)
        frontend.router.send_multipart([migrator_identity(1), b"no message of ours"])
        assert died.wait(TIMEOUT_S)
        migrator.close()
    assert len(deaths) == 1
