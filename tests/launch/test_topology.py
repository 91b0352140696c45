"""What a rank reads from torchrun's environment, and how many threads it takes."""

import os

import pytest

from moeserve.config import ParallelConfig
from moeserve_launch.topology import FRONTEND_IS_RUNNING, RankEnvironment, set_single_host_network, threads_per_rank

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "x",
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
}


def test_without_torchrun_there_is_no_rank() -> None:
    assert RankEnvironment.from_environ({"RANK": "0"}) is None


def test_ranks_of_several_hosts_reach_the_frontend_at_the_first_host() -> None:
    place = RankEnvironment.from_environ(TORCHRUN)
    assert place is not None
    assert (place.rank, place.local_rank, place.restart_count, place.frontend_is_running) == (3, 1, 0, False)
    assert not place.is_single_host
    assert (place.replica_host, place.replica_bind_host) == ("node0", "0.0.0.0")


def test_ranks_of_one_host_stay_on_loopback() -> None:
    place = RankEnvironment.from_environ(TORCHRUN | {"LOCAL_WORLD_SIZE": "4", FRONTEND_IS_RUNNING: "1"})
    assert place is not None
    assert place.is_single_host
    assert place.frontend_is_running
    assert (place.replica_host, place.replica_bind_host) == ("127.0.0.1", "127.0.0.1")


@pytest.mark.parametrize("local_world_size", [1, 2, 3, 64])
def test_ranks_never_take_more_threads_than_cores_together(local_world_size: int) -> None:
    cores = len(os.sched_getaffinity(0))
    threads = threads_per_rank(ParallelConfig(), local_world_size=local_world_size)
    assert threads >= 1
    assert threads * local_world_size <= max(cores, local_world_size)


def test_a_given_number_of_threads_is_taken() -> None:
    assert threads_per_rank(ParallelConfig(threads_per_rank=5), local_world_size=2) == 5


def test_the_users_choice_of_network_stays() -> None:
    environ = {"GLOO_SOCKET_IFNAME": "eth0"}
    set_single_host_network(environ)
    assert environ == {"GLOO_SOCKET_IFNAME": "eth0"}
