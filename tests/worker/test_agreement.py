"""Every rank of an engine learns the same about a step, or none of them steps."""

import pytest

from moeserve.ids import PlacementEpoch
from moeserve.parallel import ParallelContext
from moeserve.testing.thread_ranks import ThreadGroup, run_thread_ranks
from moeserve.worker.agreement import AgreedStep, StepAgreement


@pytest.mark.parametrize(("tp_size", "dp_size"), [(1, 1), (2, 1), (1, 2), (2, 3)])
def test_every_rank_learns_the_same(tp_size: int, dp_size: int) -> None:
    def agree(parallel: ParallelContext) -> list[AgreedStep]:
        agreement = StepAgreement(parallel)
        dp_rank = parallel.layout.dp_rank
        steps = [(10 + dp_rank, False), (0, False), (dp_rank, dp_rank == dp_size - 1)]
        return [
            agreement.agree(n, is_decode=n != 11, votes_stop=vote, placement_epoch=PlacementEpoch(3))
            for n, vote in steps
        ]

    results = run_thread_ranks(agree, tp_size=tp_size, dp_size=dp_size)
    assert all(steps == results[0] for steps in results)
    busy, idle, stopping = results[0]
    assert busy.num_tokens_by_dp_rank == tuple(10 + dp_rank for dp_rank in range(dp_size))
    assert not busy.engine_is_idle
    assert not busy.engine_stops
    assert busy.is_decode == (dp_size == 1)  # one prefill anywhere, and the step is none of decodes
    assert idle.is_decode
    assert idle.engine_is_idle
    assert stopping.engine_stops  # one vote is enough


def test_one_replica_has_nobody_to_ask() -> None:
    def collectives(parallel: ParallelContext) -> list[str]:
        StepAgreement(parallel).agree(1, is_decode=True, votes_stop=False, placement_epoch=PlacementEpoch(0))
        groups = [group for group in (parallel.tp, parallel.dp, parallel.ep) if isinstance(group, ThreadGroup)]
        return [call for group in groups for call in group.calls]

    assert run_thread_ranks(collectives, tp_size=2) == [[], []]


def test_replicas_in_different_epochs_do_not_step() -> None:
    def agree(parallel: ParallelContext) -> None:
        epoch = PlacementEpoch(parallel.layout.dp_rank)
        StepAgreement(parallel).agree(1, is_decode=True, votes_stop=False, placement_epoch=epoch)

    with pytest.raises(AssertionError, match=r"different placement epochs: \[0, 1\]"):
        run_thread_ranks(agree, dp_size=2)


@pytest.mark.parametrize(("tp_size", "dp_size"), [(2, 1), (1, 2), (2, 3)])
def test_a_change_is_committed_when_every_replica_votes_for_it(tp_size: int, dp_size: int) -> None:
    def agree(parallel: ParallelContext) -> list[int]:
        agreement = StepAgreement(parallel)
        dp_rank = parallel.layout.dp_rank
        is_last = dp_rank == dp_size - 1
        votes = [0, 5 if is_last else 0, 5 if is_last else 6, 6]
        return [
            agreement.agree(
                0, is_decode=True, votes_stop=False, placement_epoch=PlacementEpoch(0), commit_vote=vote
            ).committed_change
            for vote in votes
        ]

    # One replica is all of them.
    expected = [0, 5, 5, 6] if dp_size == 1 else [0, 0, 0, 6]
    assert run_thread_ranks(agree, tp_size=tp_size, dp_size=dp_size) == [expected] * (tp_size * dp_size)
