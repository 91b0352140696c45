"""What the leader says arrives, and an orphan does not wait for ever."""

import pytest

from moeserve.engine.outputs import CachedRequestData, NewRequestData, SchedulerOutput
from moeserve.engine.sampling_params import SamplingParams
from moeserve.ids import BlockId, RequestId, StepId
from moeserve.parallel import ParallelContext
from moeserve.testing.thread_ranks import run_thread_ranks
from moeserve.worker import channel as channel_module
from moeserve.worker.channel import (
    FollowerChannel,
    LeaderChannel,
    ParentDiedError,
    RunStep,
    Stop,
    ToFollower,
    open_channel,
)
from moeserve.worker.hosts import Host, address_towards


def full_step() -> RunStep:
    """Every field of every value is away from its default."""
    params = SamplingParams(
        max_tokens=9,
        temperature=0.5,
        logit_bias={3: -1.5},
        seed=-(2**63),
        stop=("a", "\u00e4"),
        stop_token_ids=(4,),
        logprobs=0,
        n=2,
    )
    new = NewRequestData(
        request_id=RequestId("new"),
        token_ids=[1, 2],
        num_prompt_tokens=1,
        sampling_params=params,
        block_ids=[BlockId(7)],
        num_computed_tokens=1,
    )
    cached = CachedRequestData(
        request_id=RequestId("old"), new_token_ids=[5], new_block_ids=[BlockId(8)], num_computed_tokens=3
    )
    output = SchedulerOutput(
        step_id=StepId(4),
        new_requests=[new],
        cached_requests=[cached],
        num_scheduled_tokens={RequestId("old"): 1, RequestId("new"): 2},
        finished_request_ids=[RequestId("gone")],
    )
    return RunStep(output=output, votes_stop=True, commit_vote=8, dropped_change=7)


def test_messages_arrive_whole_and_in_order_at_every_follower() -> None:
    leader = LeaderChannel()
    followers = [FollowerChannel(leader.add_follower("127.0.0.1")) for _ in range(2)]
    messages = [
        full_step(),
        RunStep(output=SchedulerOutput(step_id=StepId(5)), votes_stop=False),
        Stop(),
    ]
    for message in messages:
        leader.send(message)
    for follower in followers:
        received = [follower.receive() for _ in messages]
        assert received == messages
        # The order of the requests is the order of the batch's rows.
        assert isinstance(received[0], RunStep)
        assert list(received[0].output.num_scheduled_tokens) == ["old", "new"]
    leader.close()
    for follower in followers:
        follower.close()


def test_what_was_sent_before_closing_still_arrives() -> None:
    leader = LeaderChannel()
    follower = FollowerChannel(leader.add_follower("127.0.0.1"))
    leader.send(Stop())
    leader.close()
    assert follower.receive() == Stop()
    follower.close()


def test_an_orphan_stops_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    leader = LeaderChannel()
    follower = FollowerChannel(leader.add_follower("127.0.0.1"))
    monkeypatch.setattr(channel_module.os, "getppid", lambda: 1)
    with pytest.raises(ParentDiedError, match="died"):
        follower.receive()
    follower.close()
    leader.close()


def test_ranks_of_one_host_talk_over_loopback() -> None:
    host = Host(name="a", ipv4=["10.0.0.1", "172.17.0.1"])
    assert address_towards(host, this=host) == "127.0.0.1"


def test_an_address_that_both_hosts_have_leads_nowhere() -> None:
    """Container bridges have the same address on every host. Here the one address left is reached over loopback."""
    this = Host(name="a", ipv4=["172.17.0.1"])
    peer = Host(name="b", ipv4=["172.17.0.1", "127.9.9.9"])
    assert address_towards(peer, this=this).startswith("127.")


@pytest.mark.parametrize(("tp_size", "dp_size"), [(1, 2), (3, 1), (2, 2)])
def test_followers_hear_their_own_leader(tp_size: int, dp_size: int) -> None:
    def talk(parallel: ParallelContext) -> list[ToFollower]:
        output = SchedulerOutput(step_id=StepId(parallel.layout.dp_rank))
        messages: list[ToFollower] = [RunStep(output=output, votes_stop=False), Stop()]
        channel = open_channel(parallel)
        if isinstance(channel, LeaderChannel):
            for message in messages:
                channel.send(message)
            received = messages
        else:
            received = [channel.receive() for _ in messages]
        channel.close()
        return received

    results = run_thread_ranks(talk, tp_size=tp_size, dp_size=dp_size)
    for rank, received in enumerate(results):
        first = received[0]
        assert isinstance(first, RunStep)
        assert first.output.step_id == rank // tp_size
        assert received[1] == Stop()
