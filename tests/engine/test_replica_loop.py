"""Replica loops over real ZeroMQ sockets, around fake executors: what they say, when they sleep, how they end."""

import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import msgspec
import pytest

from moeserve.config import SchedulerConfig
from moeserve.engine.messages import AbortRequests, AddRequest, ReplicaReady, StartWave, StepOutputs, WaveStarted
from moeserve.engine.outputs import FinishReason, SchedulerOutput
from moeserve.engine.placement_messages import CommitChange, DropChange
from moeserve.engine.sampling_params import SamplingParams
from moeserve.ids import DpRank, RequestId, WaveId
from moeserve.testing.fake_engine import FakeEngineSettings, FakeReplica, run_fake_engine
from moeserve.testing.fake_frontend import FakeFrontend, listening_frontend
from moeserve.testing.fake_model import generate, hashed_token

TIMEOUT_S = 20.0
VOCAB_SIZE = 50


def request(name: str, prompt: list[int], **params: int) -> AddRequest:
    return AddRequest(
        request_id=RequestId(name), prompt_token_ids=prompt, sampling_params=SamplingParams(seed=0, **params)
    )


def alone(message: AddRequest) -> list[int]:
    return generate(message.prompt_token_ids, message.sampling_params, hashed_token(VOCAB_SIZE))[0]


def settings_for(frontend: FakeFrontend, **changes) -> FakeEngineSettings:
    return FakeEngineSettings(
        frontend_address=frontend.address, dp_size=frontend.dp_size, **{"vocab_size": VOCAB_SIZE, **changes}
    )


def test_a_request_is_answered_token_by_token_and_the_last_word_is_an_idle_state() -> None:
    num_steps = []
    with (
        listening_frontend() as frontend,
        run_fake_engine(settings_for(frontend, num_blocks=8, max_model_len=99), on_step=num_steps.append),
    ):
        frontend.wait_for_ready()
        message = request("only", [1, 2, 3], max_tokens=5)
        frontend.send(0, message)
        frontend.receive_until_step(5)
    ready, *steps = frontend.heard
    assert isinstance(ready, ReplicaReady)
    assert (ready.dp_rank, ready.num_blocks, ready.block_size, ready.max_model_len) == (0, 8, 16, 99)
    assert all(isinstance(step, StepOutputs) for step in steps), "a replica without peers starts no waves"
    assert [len(step.outputs) for step in steps] == [1, 1, 1, 1, 1, 0]
    assert len(num_steps) == 6, "and then it sleeps"
    assert frontend.outputs == {"only": alone(message)}
    assert (steps[-1].stats.num_running, steps[-1].stats.num_free_blocks) == (0, 8)


def test_steps_that_change_nothing_are_not_told() -> None:
    num_steps = []
    with listening_frontend() as frontend:
        settings = settings_for(frontend, scheduler=SchedulerConfig(max_num_batched_tokens=100))
        with run_fake_engine(settings, on_step=num_steps.append):
            frontend.wait_for_ready()
            frontend.send(0, request("long", [1] * 1000, max_tokens=1))
            frontend.receive_until_step(10)
    first, last, idle = frontend.heard[1:]
    assert [step.stats.step_id for step in (first, last, idle)] == [0, 9, 10]
    assert len(num_steps) == 11


def test_an_abort_frees_the_blocks_without_a_word() -> None:
    with listening_frontend() as frontend, run_fake_engine(settings_for(frontend, num_blocks=128)):
        frontend.wait_for_ready()
        frontend.send(0, AbortRequests(request_ids=[RequestId("never seen")]))
        frontend.send(0, request("gone", [1, 2, 3], max_tokens=2000))
        frontend.receive_until(lambda: "gone" in frontend.outputs)
        frontend.send(0, AbortRequests(request_ids=[RequestId("gone")]))
        frontend.receive_until(lambda: frontend.stats[0].num_running == 0)
        assert frontend.stats[0].num_free_blocks == 128
        assert frontend.ended == {}
        message = request("next", [4], max_tokens=3)
        frontend.send(0, message)
        frontend.receive_until_ended(RequestId("next"))
        assert frontend.outputs["next"] == alone(message)


def test_a_request_that_can_never_run_is_answered_with_an_error() -> None:
    with listening_frontend() as frontend, run_fake_engine(settings_for(frontend, max_model_len=10)):
        frontend.wait_for_ready()
        frontend.send(0, request("large", [1] * 9, max_tokens=2))
        frontend.receive_until_ended(RequestId("large"))
        (answer,) = frontend.heard[-1].outputs
        assert (answer.finish_reason, answer.new_token_ids) == (FinishReason.ERROR, [])
        assert "more than the context of 10 tokens" in answer.error


def fail(output: SchedulerOutput) -> None:
    if output.num_scheduled_tokens:
        raise RuntimeError("the model broke")


def serve_to_the_end(frontend: FakeFrontend, frame: bytes, on_step: Callable[[SchedulerOutput], None]) -> None:
    """Send a frame to the last replica and wait until all loops have ended by themselves."""
    with run_fake_engine(settings_for(frontend), on_step=on_step) as replicas:
        frontend.wait_for_ready()
        frontend.send_frame(frontend.dp_size - 1, frame)
        if frontend.dp_size > 1:
            assert isinstance(frontend.receive(), WaveStarted)
        for replica in replicas:
            replica.join()


@pytest.mark.parametrize("dp_size", [1, 2])
def test_an_error_of_the_model_ends_the_loops_with_that_error(dp_size: int) -> None:
    frame = msgspec.msgpack.encode(request("any", [1]))
    with listening_frontend(dp_size) as frontend, pytest.raises(RuntimeError, match="the model broke"):
        serve_to_the_end(frontend, frame, fail)


def test_a_message_that_cannot_be_read_ends_the_loop() -> None:
    with listening_frontend() as frontend, pytest.raises(msgspec.DecodeError):
        serve_to_the_end(frontend, b"\xc1", fail)


def test_an_idle_loop_is_stopped_from_a_signal_handler() -> None:
    with listening_frontend() as frontend:
        replica = FakeReplica(settings_for(frontend), DpRank(0), None)
        main_thread = threading.main_thread().ident
        assert main_thread is not None
        previous = signal.signal(signal.SIGUSR1, lambda *_: replica.ask_to_stop())
        try:

            def interrupt() -> None:
                frontend.wait_for_ready()
                signal.pthread_kill(main_thread, signal.SIGUSR1)

            thread = threading.Thread(target=interrupt)
            thread.start()
            replica.run()
            thread.join(TIMEOUT_S)
        finally:
            signal.signal(signal.SIGUSR1, previous)
    assert replica.error is None
    replica.ask_to_stop()  # once more, after the end


def test_peers_step_along_and_later_waves_have_later_numbers() -> None:
    with listening_frontend(dp_size=3) as frontend, run_fake_engine(settings_for(frontend)):
        frontend.wait_for_ready()
        for number, dp_rank in enumerate([1, 0, 1]):
            message = request(f"request {number}", [dp_rank], max_tokens=4)
            frontend.send(dp_rank, message)
            frontend.receive_until_step(5 * number + 4)  # four steps with a token, and the one that finds none
            assert frontend.outputs[message.request_id] == alone(message)
    waves = [(message.dp_rank, message.wave_id) for message in frontend.heard if isinstance(message, WaveStarted)]
    assert waves == [(1, 0), (0, 1), (1, 2)]


@pytest.mark.parametrize("seed", range(6))
def test_random_traffic_over_several_replicas_never_hangs(seed: int) -> None:
    """Requests and aborts at random moments of waves; tiny pools; every request but the aborted ones is complete."""
    rng = random.Random(seed)
    dp_size = rng.choice([2, 3])
    jitter = random.Random(seed + 1)
    with listening_frontend(dp_size) as frontend:
        settings = settings_for(frontend, num_blocks=6, block_size=4, agreement_timeout_s=TIMEOUT_S)
        with run_fake_engine(settings, on_step=lambda _: time.sleep(jitter.choice([0.0, 0.0, 0.0005]))):
            frontend.wait_for_ready()
            expected, aborted = {}, set()
            for number in range(30):
                message = request(f"{number}", [rng.randrange(3)] * rng.randint(1, 8), max_tokens=rng.randint(1, 12))
                dp_rank = rng.randrange(dp_size)
                frontend.send(dp_rank, message)
                expected[message.request_id] = alone(message)
                if rng.random() < 0.2:
                    frontend.send(dp_rank, AbortRequests(request_ids=[message.request_id]))
                    aborted.add(message.request_id)
                if rng.random() < 0.4:  # let the wave come to its end, or nearly
                    frontend.receive_until(lambda: frontend.ended.keys() | aborted >= expected.keys())
                while frontend.router.poll(rng.choice([0, 0, 1, 3])):
                    frontend.receive()
            frontend.receive_until(lambda: frontend.ended.keys() | aborted >= expected.keys())
            frontend.receive_until(lambda: all(s.num_free_blocks == 6 for s in frontend.stats.values()))
    for request_id in expected.keys() - aborted:
        assert frontend.outputs[request_id] == expected[request_id]


def test_a_fake_engine_in_a_process_of_its_own_can_be_killed_and_replaced() -> None:
    with listening_frontend(dp_size=2) as frontend:
        incarnations = set()
        for number in range(2):
            arguments = [sys.executable, "-m", "moeserve.testing.fake_engine"]
            with subprocess.Popen([*arguments, msgspec.json.encode(settings_for(frontend)).decode()]) as process:
                try:
                    frontend.wait_for_ready()
                    message = request(f"request {number}", [1, 2], max_tokens=3)
                    frontend.send(1, message)
                    frontend.receive_until_ended(message.request_id)
                    assert frontend.outputs[message.request_id] == alone(message)
                finally:
                    process.kill()
            frontend.receive_until(lambda: not frontend.router.poll(0))
            incarnations |= {heard.incarnation for heard in frontend.heard if isinstance(heard, ReplicaReady)}
        assert len(incarnations) == 4


def test_a_start_for_another_wave_wakes_nobody() -> None:
    num_steps = []
    with listening_frontend(dp_size=2) as frontend, run_fake_engine(settings_for(frontend), on_step=num_steps.append):
        frontend.wait_for_ready()
        frontend.send(0, StartWave(wave_id=WaveId(1)))
        message = request("first", [1], max_tokens=1)
        frontend.send(0, message)
        frontend.receive_until_step(1)
    assert len(num_steps) == 4, "two steps on each of two replicas"


def test_changes_of_the_placement_wake_all_replicas_and_reach_their_executors() -> None:
    with listening_frontend(dp_size=2) as frontend, run_fake_engine(settings_for(frontend)) as replicas:
        frontend.wait_for_ready()
        frontend.send(0, CommitChange(change_id=4))
        frontend.receive_until_step(0)
        assert [replica.executor.committed_changes for replica in replicas] == [[4], []]
        frontend.send(1, DropChange(change_id=4))
        frontend.receive_until_step(1)
        assert [replica.executor.dropped_changes for replica in replicas] == [[], [4]]
    assert [m.wave_id for m in frontend.heard if isinstance(m, WaveStarted)] == [0, 1]
