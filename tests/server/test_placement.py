"""Online placement from end to end but for the experts: a frontend, real sockets, ranks that only say what they do."""

from pathlib import Path

import numpy as np
import pytest

from moeserve.engine.placement_messages import AbortStaging, ChangeFailed, FromMigrator, StageChange
from moeserve.testing.fake_migrators import FakeMigrators
from moeserve.testing.served_engine import wait_until
from moeserve.testing.served_placement import (
    NUM_EXPERTS,
    NUM_LAYERS,
    SKEWED_LE,
    START,
    ServedPlacement,
    serve_placement,
)


@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_a_lasting_skew_is_followed_by_one_migration_that_gains(tokenizer_folder: Path, dp_size: int) -> None:
    with serve_placement(tokenizer_folder, dp_size=dp_size) as server:
        server.serve(SKEWED_LE, 4)
        wait_until(lambda: server.ranks.held.epoch == 1)
        server.wait_for_state("settling")
        server.serve_until("observing", SKEWED_LE)
        (act,) = server.acts()
        assert (act["action"], act["outcome"]["state"]) == ("migrate", "kept")
        assert act["outcome"]["realised_share"] > 0.25 * act["prediction"]["gain_share"] > 0
        shown = server.show()["map"]
        assert shown["epoch"] == 1
        assert [layer["physical_to_logical"] for layer in shown["layers"]] == server.ranks.held.table_LP.tolist()
        load = server.http.get("/v1/placement/load", params={"window": 0.02}).json()
        assert load["balancedness_worst"] > 0.9
        metrics = server.metrics()
        assert metrics["epoch"] == 1
        assert metrics["moves_total"] == act["prediction"]["num_moves"]
        assert metrics['change_seconds_count{kind="migration",stage="stage"}'] == 1
        assert metrics['change_seconds_count{kind="migration",stage="commit"}'] == 1


def migrate(server: ServedPlacement) -> None:
    """Let a skew last until it is followed, and the gain is measured."""
    server.serve(SKEWED_LE, 4)
    wait_until(lambda: server.ranks.held.epoch == 1)
    server.wait_for_state("settling")


def test_a_rank_that_cannot_stage_leaves_the_old_map_and_frees_the_others(tokenizer_folder: Path) -> None:
    with serve_placement(tokenizer_folder, placement={"hold_off_s": 3600.0}) as server:

        def fail_on_rank_2(rank: int, order: StageChange) -> FromMigrator | None:
            if rank == 2 and order.moves:
                return ChangeFailed(rank=rank, change_id=order.change_id, reason="out of memory: 3 records")
            return server.ranks.stage(rank, order) if rank != 3 or not order.moves else None

        server.ranks.on_stage = fail_on_rank_2
        server.serve(SKEWED_LE, 4)
        wait_until(lambda: server.show()["failures"] == {"out of memory": 1})
        (act,) = server.acts()
        assert act["outcome"]["state"] == "aborted"
        assert "out of memory: 3 records (rank 2)" in act["outcome"]["reason"]
        wait_until(
            lambda: {rank for rank, each in server.ranks.received if isinstance(each, AbortStaging)} == {0, 1, 2, 3}
        )
        shown = server.show()
        assert (shown["state"], shown["map"]["epoch"]) == ("observing", 0)
        assert server.ranks.held.epoch == 0
        assert server.metrics()['failures_total{reason="out of memory"}'] == 1
        server.serve(SKEWED_LE)
        assert "held off" in server.show()["reason"]


def test_ranks_that_start_again_begin_with_their_own_map(tokenizer_folder: Path) -> None:
    with serve_placement(tokenizer_folder) as server:
        assert server.order("freeze").json()["frozen"]
        assert server.order("thaw").status_code == 200
        migrate(server)
        assert server.order("freeze").status_code == 200
        failed_orders = len(server.ranks.received)
        again = FakeMigrators(server.running.engine_address, START, dp_size=2, num_spare_places=16)
        with again.running():
            wait_until(lambda: (server.show()["map"] or {"epoch": None})["epoch"] == 0)
            shown = server.show()
            assert (shown["state"], shown["frozen"], shown["controller"]["plan_id"]) == ("observing", True, None)
            assert shown["reason"] == "ranks started again: they hold epoch 0"
            (act,) = server.acts()
            assert (act["action"], act["outcome"]["state"]) == ("migrate", "unmeasured")
            server.ranks, former = again, server.ranks
            server.serve(SKEWED_LE)
            assert server.show()["reason"] == "frozen"
            assert not again.received
            assert len(former.received) == failed_orders
            # The loads of the life before count: one window more is enough for a plan.
            assert server.order("thaw").status_code == 200
            server.serve(SKEWED_LE)
            wait_until(lambda: again.held.epoch == 2)
        assert server.show()["failures"] == {}
        assert server.metrics()['changes_total{kind="migration"}'] == 2


def test_ranks_that_start_again_during_a_migration_hold_it_off(tokenizer_folder: Path) -> None:
    """It may be what killed them: trying at once would kill them again."""
    with serve_placement(tokenizer_folder, placement={"hold_off_s": 3600.0}) as server:
        server.ranks.on_stage = lambda rank, order: server.ranks.stage(rank, order) if rank == 3 else None
        server.serve(SKEWED_LE, 4)
        wait_until(lambda: (server.show()["change"] or {"waiting_for_ranks": []})["waiting_for_ranks"] == [0, 1, 2])
        again = FakeMigrators(server.running.engine_address, START, dp_size=2, num_spare_places=16)
        with again.running():
            wait_until(lambda: server.show()["failures"] == {"ranks started again": 1})
            server.ranks = again
            server.serve(SKEWED_LE)
            shown = server.show()
            assert (shown["state"], shown["map"]["epoch"], shown["change"]) == ("observing", 0, None)
            assert shown["reason"].startswith("held off for ")
            (act,) = server.acts()
            assert act["outcome"] == act["outcome"] | {"state": "aborted", "reason": "ranks started again"}
            assert not any(isinstance(message, StageChange) for _, message in again.received)


def test_without_spare_places_only_splits_follow(tokenizer_folder: Path) -> None:
    with serve_placement(tokenizer_folder, num_spare_places=0) as server:
        # Rank 0 holds experts 0 to 4 and is the fullest; second replicas of 0 to 3 lie on rank 3.
        weight_E = np.where(np.arange(NUM_EXPERTS) == 4, 4.0, 1.0)
        weight_E[0] = 6.0
        server.serve(np.tile(weight_E / weight_E.sum(), (NUM_LAYERS, 1)), 6)
        wait_until(lambda: server.ranks.held.split_LP[0, :4].sum() < 1.0)
        assert server.ranks.held.epoch == 0
        assert not server.acts()
        wait_until(lambda: server.show()["change"] is None)
        shown = [layer["split"] for layer in server.show()["map"]["layers"]]
        assert shown == pytest.approx(server.ranks.held.split_LP, abs=1e-4)
        assert server.metrics()['changes_total{kind="split"}'] >= 1


def test_an_error_in_placement_leaves_the_server_and_the_map(tokenizer_folder: Path) -> None:
    with serve_placement(tokenizer_folder) as server:
        migrate(server)
        held = server.ranks.held
        server.running.frontend.placement._lives.live.controller.observe = None  # type: ignore[union-attr]
        server.ranks.report(server.rng.multinomial(20_000, SKEWED_LE))
        server.wait_for_state("stopped")
        shown = server.show()
        assert "TypeError" in shown["reason"]
        assert [layer["physical_to_logical"] for layer in shown["map"]["layers"]] == held.table_LP.tolist()
        assert server.order("plan").status_code == 409
        assert server.http.get("/health").status_code == 200
