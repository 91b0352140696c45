"""A whole engine without a model: real replica loops over ZeroMQ around fake executors, in threads or in a process.

`run_fake_engine(settings)` serves in this process; `python -m moeserve.testing.fake_engine '{"frontend_address": ...}'`
is the same in a process of its own, which can be killed like the ranks of a real engine.
"""

import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import msgspec

from moeserve.config import SchedulerConfig
from moeserve.engine.core import EngineCore
from moeserve.engine.messages import ReplicaReady
from moeserve.engine.outputs import SchedulerOutput
from moeserve.engine.replica_loop import ReplicaLoop
from moeserve.engine.scheduler import Scheduler
from moeserve.ids import DpRank
from moeserve.testing.fake_model import NextToken, hashed_token
from moeserve.testing.fakes import FakeAgreement, FakeExecutor, PeerEndedError

_JOIN_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeEngineSettings:
    """What can be said in JSON about a fake engine."""

    frontend_address: str
    dp_size: int = 1
    num_blocks: int = 1024
    block_size: int = 16
    max_model_len: int = 2048
    vocab_size: int = 4096
    eos_token_ids: tuple[int, ...] = ()
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    step_time_s: float = 0.0
    """Each step with tokens takes at least so long."""
    agreement_timeout_s: float = 30.0


class FakeReplica:
    """One DP replica in a thread; an error of its loop is kept for whoever stops it."""

    def __init__(
        self,
        settings: FakeEngineSettings,
        dp_rank: DpRank,
        agreement: FakeAgreement | None,
        *,
        next_token: NextToken | None = None,
        on_step: Callable[[SchedulerOutput], None] | None = None,
    ) -> None:
        self.scheduler = Scheduler(
            settings.scheduler,
            num_blocks=settings.num_blocks,
            block_size=settings.block_size,
            max_model_len=settings.max_model_len,
            eos_token_ids=settings.eos_token_ids,
        )
        self.executor = FakeExecutor(
            block_size=settings.block_size,
            next_token=next_token or hashed_token(settings.vocab_size),
            agree=None if agreement is None else partial(agreement.total, dp_rank),
            on_step=on_step or _sleeper(settings.step_time_s),
        )
        ready = ReplicaReady(
            dp_rank=dp_rank,
            incarnation=uuid.uuid4().hex,
            num_blocks=settings.num_blocks,
            block_size=settings.block_size,
            max_model_len=settings.max_model_len,
        )
        self.error: BaseException | None = None
        self._agreement = agreement
        self._loop = ReplicaLoop(
            EngineCore(self.scheduler, self.executor, time.monotonic),
            frontend_address=settings.frontend_address,
            dp_rank=dp_rank,
            dp_size=settings.dp_size,
            incarnation=ready.incarnation,
            ready=ready,
        )
        self._thread = threading.Thread(target=self.run, name=f"fake-replica-{dp_rank}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def ask_to_stop(self) -> None:
        self._loop.stop()

    def join(self, timeout_s: float | None = _JOIN_TIMEOUT_S) -> None:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), f"{self._thread.name} did not stop"

    def run(self) -> None:
        """What the thread does; may be called instead of `start()`."""
        try:
            self._loop.run()
        except PeerEndedError:
            pass  # stopped, or the peer holds the error
        except BaseException as error:  # noqa: BLE001 - handed to the owner, who raises it
            self.error = error
        finally:
            if self._agreement is not None:
                self._agreement.end()


@contextmanager
def run_fake_engine(
    settings: FakeEngineSettings,
    *,
    next_token: NextToken | None = None,
    on_step: Callable[[SchedulerOutput], None] | None = None,
) -> Iterator[list[FakeReplica]]:
    """Replicas in threads, from here to the end of the block; raises the first error of a loop."""
    agreement = (
        FakeAgreement(settings.dp_size, timeout_s=settings.agreement_timeout_s) if settings.dp_size > 1 else None
    )
    replicas = [
        FakeReplica(settings, DpRank(dp_rank), agreement, next_token=next_token, on_step=on_step)
        for dp_rank in range(settings.dp_size)
    ]
    for replica in replicas:
        replica.start()
    try:
        yield replicas
    finally:
        for replica in replicas:
            replica.ask_to_stop()
        for replica in replicas:
            replica.join()
    for replica in replicas:
        if replica.error is not None:
            raise replica.error


def _sleeper(step_time_s: float) -> Callable[[SchedulerOutput], None] | None:
    if step_time_s == 0.0:
        return None

    def sleep(output: SchedulerOutput) -> None:
        if output.num_scheduled_tokens:
            time.sleep(step_time_s)

    return sleep


def main() -> None:
    settings = msgspec.json.decode(sys.argv[1], type=FakeEngineSettings)
    with run_fake_engine(settings) as replicas:
        for replica in replicas:
            replica.join(timeout_s=None)


if __name__ == "__main__":
    main()
