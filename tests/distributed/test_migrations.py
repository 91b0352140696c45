"""Experts migrate while requests are answered: every token stays what one rank without migrations gives."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeserve.config import ParallelConfig
from moeserve.engine.placement_messages import LoadReport, unpack_array
from moeserve.testing.checkpoints import write_tiny_checkpoint
from moeserve.testing.migrating_engine import Engine, OneRank, run_engine
from moeserve.testing.placements import random_successor

pytestmark = pytest.mark.distributed

NUM_REQUESTS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3_moe")


@pytest.fixture(scope="module")
def one_rank(folder: Path) -> OneRank:
    return OneRank(folder)


def random_split(shape: tuple[int, ...], seed: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Uneven, and some replicas take hardly anything."""
    return np.random.default_rng(seed).random(shape) ** 4 + 1e-6


LAYOUTS = [
    pytest.param(2, 1, 0, id="tp2"),
    pytest.param(1, 2, 3, id="dp2: all-gather, redundant experts"),
    pytest.param(1, 4, 5, id="dp4: all-to-all, redundant experts"),
    pytest.param(2, 2, 2, id="tp2 x dp2, redundant experts"),
]


def serve_and_migrate(engine: Engine, one_rank: OneRank, *, num_migrations: int) -> None:
    """Migrate without pause, with requests coming and going, until so many migrations were committed among tokens."""
    driver, num_among_tokens = engine.driver, 0
    while num_among_tokens < num_migrations:
        while engine.num_sent < len(engine.frontend.ended) + NUM_REQUESTS:
            engine.send()
        target = random_successor(driver.placement, seed=driver.last_change_id)
        split_LP = random_split(target.physical_to_logical_LP.shape, driver.last_change_id)
        change_id = driver.stage(target, split_LP)
        driver.wait_staged(change_id)
        was_busy = engine.is_busy
        driver.commit(change_id, target)
        num_among_tokens += was_busy and engine.is_busy
    one_rank.check(engine.finish())


@pytest.mark.parametrize(("tp_size", "dp_size", "num_redundant"), LAYOUTS)
def test_tokens_are_those_without_migrations(
    folder: Path, one_rank: OneRank, tp_size: int, dp_size: int, num_redundant: int
) -> None:
    parallel = ParallelConfig(
        tensor_parallel_size=tp_size, data_parallel_size=dp_size, num_redundant_experts=num_redundant
    )
    with run_engine(folder, parallel) as engine:
        serve_and_migrate(engine, one_rank, num_migrations=12)
        # An engine that sleeps commits too, and wakes with the new placement.
        target = random_successor(engine.driver.placement, seed=99)
        change_id = engine.driver.stage(target)
        engine.driver.wait_staged(change_id)
        assert len(engine.driver.commit(change_id, target)) == parallel.world_size
        engine.send()
        one_rank.check(engine.finish())


def test_replayed_decodes_see_migrations(folder: Path, one_rank: OneRank) -> None:
    parallel = ParallelConfig(tensor_parallel_size=1, data_parallel_size=2, num_redundant_experts=3)
    with run_engine(folder, parallel, replays_decodes=True) as engine:
        serve_and_migrate(engine, one_rank, num_migrations=6)


def test_loads_are_told_by_phase_and_window(folder: Path) -> None:
    parallel = ParallelConfig(tensor_parallel_size=2, data_parallel_size=2)
    with run_engine(folder, parallel) as engine:
        shapes = [ready.shape for ready in engine.driver.ready]
        for _ in range(2 * NUM_REQUESTS):
            engine.send()
        engine.finish()
        # The step behind a window hands it over; here that is one which a change wakes the engine for.
        target = random_successor(engine.driver.placement, seed=0)
        change_id = engine.driver.stage(target)
        engine.driver.wait_staged(change_id)
        engine.driver.commit(change_id, target)
        reports = [news for news in engine.frontend.heard_of_placement if isinstance(news, LoadReport)]
    assert all(shape == shapes[0] for shape in shapes)
    shape = shapes[0]
    assert (shape.num_layers, shape.moe_layer_ids, shape.num_logical_experts, shape.top_k) == (2, [0, 1], 8, 2)
    assert (shape.num_physical_by_rank, shape.node_of_rank, shape.num_spare_places) == ([2] * 4, [0] * 4, 1)
    assert shape.expert_bytes == 3 * 24 * 32 * 4
    assert {report.dp_rank for report in reports} == {0, 1}
    for report in reports:
        prefill_LE, decode_LE = (unpack_array(load, "<i8", 8) for load in (report.prefill_load, report.decode_load))
        assert prefill_LE.sum(axis=1).tolist() == [2 * report.num_prefill_tokens] * 2
        assert decode_LE.sum(axis=1).tolist() == [2 * report.num_decode_tokens] * 2
        assert report.expert_s is not None
        assert 0.0 < report.expert_s < report.step_s
        assert report.step_s <= report.end_s - report.start_s + 1e-5  # Unix times as floats have microseconds
        assert report.num_steps > 0
    for dp_rank in range(2):
        ends = [(report.start_s, report.end_s) for report in reports if report.dp_rank == dp_rank]
        assert all(before[1] <= after[0] for before, after in pairwise(ends))
        assert sum(report.num_decode_tokens for report in reports if report.dp_rank == dp_rank) > 0


@pytest.mark.parametrize(("tp_size", "dp_size", "num_redundant"), [LAYOUTS[2], LAYOUTS[3]])
def test_processes_as_ranks(folder: Path, one_rank: OneRank, tp_size: int, dp_size: int, num_redundant: int) -> None:
    parallel = ParallelConfig(
        tensor_parallel_size=tp_size, data_parallel_size=dp_size, num_redundant_experts=num_redundant
    )
    with run_engine(folder, parallel, as_processes=True) as engine:
        serve_and_migrate(engine, one_rank, num_migrations=4)
