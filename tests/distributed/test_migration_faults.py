"""Whatever goes wrong with a migration: tokens, placement and spare places stay as they were; the next one works."""

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeserve.config import ParallelConfig
from moeserve.engine.placement_messages import ChangeFailed, ChangeStaged, CommitChange
from moeserve.experts.migration import staging
from moeserve.testing.checkpoints import write_tiny_checkpoint
from moeserve.testing.faulty_source import Fault, faulty_source
from moeserve.testing.migrating_engine import Engine, OneRank, run_engine
from moeserve_placement import ExpertPlacement

pytestmark = pytest.mark.distributed

REFUSED = "127.0.0.1:1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3_moe")


@pytest.fixture(scope="module")
def one_rank(folder: Path) -> OneRank:
    return OneRank(folder)


@pytest.fixture(scope="module", params=[(2, 1), (1, 2)], ids=["tp2", "dp2"])
def engine(request: pytest.FixtureRequest, folder: Path) -> Iterator[Engine]:
    tp_size, dp_size = request.param
    parallel = ParallelConfig(tensor_parallel_size=tp_size, data_parallel_size=dp_size, num_redundant_experts=1)
    with run_engine(folder, parallel) as running:
        yield running


@pytest.fixture(autouse=True)
def nothing_is_left_behind(engine: Engine, one_rank: OneRank) -> Iterator[None]:
    """Requests run through each fault; behind it the one spare place of every layer is free for a migration."""
    for _ in range(4):
        engine.send()
    yield
    driver = engine.driver
    target = swap_across(driver.placement)
    change_id = driver.stage(target)
    assert all(staged.num_bytes > 0 for staged in driver.wait_staged(change_id))
    assert len(driver.commit(change_id, target)) == 2
    engine.send()
    one_rank.check(engine.finish())


def swap_across(placement: ExpertPlacement, *, num_swaps: int = 1, layer: int = 1) -> ExpertPlacement:
    """The first experts of the two ranks that the other lacks change places, in one layer."""
    table_LP = placement.physical_to_logical_LP.copy()
    ranks = [placement.rank_slice(rank) for rank in range(2)]
    held = [set(table_LP[layer, places].tolist()) for places in ranks]
    only = [
        [p for p in range(places.start, places.stop) if table_LP[layer, p] not in held[1 - rank]]
        for rank, places in enumerate(ranks)
    ]
    for one, other in list(zip(*only, strict=False))[:num_swaps]:
        table_LP[layer, [one, other]] = table_LP[layer, [other, one]]
    return dataclasses.replace(placement, physical_to_logical_LP=table_LP, epoch=placement.epoch + 1)


def refuse(engine: Engine, target: ExpertPlacement | None = None, **order: Any) -> set[str]:
    """Order a change that must fail somewhere; returns what the ranks that failed gave as reasons."""
    driver = engine.driver
    change_id = driver.stage(target or swap_across(driver.placement), **order)
    answers = driver.wait_answers(change_id)
    driver.drop(change_id)
    assert not driver.committed(change_id)
    reasons = {answer.reason for answer in answers.values() if isinstance(answer, ChangeFailed)}
    assert reasons
    return reasons


def serve_on(engine: Engine) -> None:
    """Have steps run, those of one more request among them."""
    engine.send()
    engine.finish()


def all_start_with(reasons: set[str], what: str) -> bool:
    return all(reason.startswith(what) for reason in reasons)


def test_a_source_that_is_gone(engine: Engine) -> None:
    reasons = refuse(engine, addresses=[REFUSED, REFUSED])
    assert all_start_with(reasons, "dead source: rank ")


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("flips a bit", "corrupt record: expert "),
        ("sends another size", "corrupt record: expert "),
        ("dies half way", "dead source: rank "),
    ],
)
def test_a_source_that_fails_on_the_way(engine: Engine, fault: Fault, reason: str) -> None:
    with ExitStack() as stack:
        sources = [stack.enter_context(faulty_source(address, fault)) for address in engine.driver.addresses]
        assert all_start_with(refuse(engine, addresses=sources), reason)


def test_one_rank_that_fails_is_enough(engine: Engine) -> None:
    """The other rank has staged the change by then, and frees it when its leader withdraws."""
    driver = engine.driver
    with faulty_source(driver.addresses[0], "flips a bit") as source:
        change_id = driver.stage(swap_across(driver.placement), addresses=[source, driver.addresses[1]])
        answers = driver.wait_answers(change_id)
    assert isinstance(answers[0], ChangeStaged)
    assert isinstance(answers[1], ChangeFailed)
    driver.drop(change_id)


def test_a_source_that_says_nothing(engine: Engine) -> None:
    with ExitStack() as stack:
        sources = [stack.enter_context(faulty_source(address, "says nothing")) for address in engine.driver.addresses]
        assert all_start_with(refuse(engine, addresses=sources, timeout_s=0.3), "too late: ")


def test_copies_that_are_too_slow(engine: Engine) -> None:
    assert all_start_with(refuse(engine, bytes_per_s=1000.0, timeout_s=0.3), "too late: ")


def test_an_abort_stops_slow_copies(engine: Engine) -> None:
    driver = engine.driver
    change_id = driver.stage(swap_across(driver.placement), bytes_per_s=100.0, timeout_s=1000.0)
    driver.drop(change_id)
    answers = driver.wait_answers(change_id).values()
    assert {answer.reason for answer in answers if isinstance(answer, ChangeFailed)} == {
        "aborted: the change was withdrawn"
    }
    assert len(answers) == 2


def test_no_spare_place(engine: Engine) -> None:
    target = swap_across(engine.driver.placement, num_swaps=2)
    assert refuse(engine, target) == {
        f"no spare place: rank {rank} has 1 in layer 1, the change needs 2" for rank in range(2)
    }


def test_out_of_memory(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def receive(*args: Any, **kwargs: Any) -> bytearray:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(staging, "_receive_record", receive)
        assert all_start_with(refuse(engine), "out of memory: expert ")


def test_changes_that_cannot_be(engine: Engine) -> None:
    driver = engine.driver
    shape = driver.placement.physical_to_logical_LP.shape
    stale = dataclasses.replace(swap_across(driver.placement), epoch=driver.placement.epoch)
    assert all_start_with(refuse(engine, stale), "bad change: epoch ")
    assert all_start_with(refuse(engine, split_LP=np.zeros(shape)), "bad change: the split gives no place a share of ")
    assert all_start_with(refuse(engine, split_LP=np.full(shape, np.nan)), "bad change: the split must be finite")
    assert all_start_with(refuse(engine, split_LP=np.ones((1, 1))), "bad change: ")


def test_the_epochs_of_migrations_that_came_to_nothing_are_left_out(engine: Engine) -> None:
    driver = engine.driver
    later = dataclasses.replace(swap_across(driver.placement), epoch=driver.placement.epoch + 3)
    change_id = driver.stage(later)
    driver.wait_staged(change_id)
    assert len(driver.commit(change_id, later)) == 2


def test_a_change_waits_for_the_one_before_it(engine: Engine) -> None:
    driver = engine.driver
    staged = driver.stage(swap_across(driver.placement))
    driver.wait_staged(staged)
    late = refuse(engine, timeout_s=0.2)
    assert late == {"too late: the change before it was neither committed nor withdrawn in time"}


def test_a_withdrawn_change_is_never_committed(engine: Engine) -> None:
    driver = engine.driver
    change_id = driver.stage(swap_across(driver.placement))
    driver.wait_staged(change_id)
    driver.drop(change_id)
    for dp_rank in range(engine.frontend.dp_size):
        engine.frontend.send(dp_rank, CommitChange(change_id=change_id))
    serve_on(engine)
    assert not driver.committed(change_id)


@pytest.mark.parametrize("engine", [pytest.param((1, 2), id="dp2")], indirect=True)
def test_the_vote_of_one_replica_commits_nothing(engine: Engine) -> None:
    driver = engine.driver
    change_id = driver.stage(swap_across(driver.placement))
    driver.wait_staged(change_id)
    engine.frontend.send(0, CommitChange(change_id=change_id))
    serve_on(engine)
    assert not driver.committed(change_id)
    driver.drop(change_id)


def test_a_change_of_the_split_alone(engine: Engine) -> None:
    """Nothing is copied, and the epoch stays."""
    driver = engine.driver
    change_id = driver.stage(
        driver.placement, np.random.default_rng(0).random(driver.placement.physical_to_logical_LP.shape)
    )
    assert [staged.num_bytes for staged in driver.wait_staged(change_id)] == [0, 0]
    driver.commit(change_id, driver.placement)
