"""One DP replica's engine: schedule, execute, update. Blocking and single-threaded; who calls it owns the time."""

from collections.abc import Callable, Iterable
from typing import Protocol

from moeserve.engine.messages import AddRequest
from moeserve.engine.outputs import ModelRunnerOutput, ReplicaStats, RequestOutput, SchedulerOutput
from moeserve.engine.scheduler import Scheduler
from moeserve.ids import RequestId


class StepExecutor(Protocol):
    """Runs the model for one step on all ranks of a DP replica."""

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Block until the step is done.

        With dp > 1 the replicas agree first: where any of them has tokens, all run (perhaps without tokens of their
        own); where none has, nothing runs and `engine_is_idle` is set. So every replica must keep stepping until then.
        """
        ...

    def commit_change(self, change_id: int) -> None:
        """Vote for this change of the expert placement from the next step on, until it is committed."""
        ...

    def drop_change(self, change_id: int) -> None:
        """Withdraw the vote for this change and any before it, with the next step and for ever."""
        ...


class EngineCore:
    """A scheduler and the model it decides for."""

    def __init__(self, scheduler: Scheduler, executor: StepExecutor, clock: Callable[[], float]) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._clock = clock
        self._answers: list[RequestOutput] = []
        self.engine_is_idle = False
        """Whether the last step found no tokens in the whole engine."""
        self.last_step_s = 0.0

    @property
    def has_unfinished(self) -> bool:
        """Whether some request still waits for its end: `step()` must be called."""
        return bool(self._answers) or self._scheduler.has_unfinished

    def add(self, message: AddRequest) -> None:
        """Take a request. One that can never run is answered, with an error, by the next step."""
        answer = self._scheduler.add_request(message)
        if answer is not None:
            self._answers.append(answer)

    def abort(self, request_ids: Iterable[RequestId]) -> None:
        """End requests without another word about them; unknown ids are ignored."""
        self._scheduler.abort(request_ids)

    def commit_change(self, change_id: int) -> None:
        """Every rank has staged this change of the expert placement: the next steps shall commit it."""
        self._executor.commit_change(change_id)

    def drop_change(self, change_id: int) -> None:
        """Never commit this change of the expert placement, unless that has happened."""
        self._executor.drop_change(change_id)

    def step(self) -> list[RequestOutput]:
        """One step, empty if there is no work; returns the news of it."""
        start = self._clock()
        output = self._scheduler.schedule()
        result = self._executor.execute(output)
        assert not (result.engine_is_idle and output.num_scheduled_tokens), "an engine with tokens is not idle"
        news = self._scheduler.update(output, result)
        self.engine_is_idle = result.engine_is_idle
        self.last_step_s = self._clock() - start
        answers, self._answers = self._answers, []
        return answers + news

    def stats(self) -> ReplicaStats:
        return self._scheduler.stats()
