"""Waves of replicas: every order in which messages, requests and steps can meet, tried exhaustively.

The world is a few replicas that behave like `ReplicaLoop` (and may also hear of waves in the middle of a step, as one
that does not block would), the frontend that relays, and requests that arrive whenever.
A state is explored once; a state in which nothing can happen any more must be the end of all work, not a deadlock.
"""

import copy
from dataclasses import dataclass, field

import pytest

from moeserve.engine.wave import WaveTracker
from moeserve.ids import WaveId


@dataclass
class Replica:
    wave: WaveTracker = field(default_factory=WaveTracker)
    inbox: list[tuple[str, int]] = field(default_factory=list)
    """Messages of the frontend, in order."""
    work: int = 0
    """Steps that its requests still need."""
    voted: int | None = None
    """Its tokens in the agreement it waits in."""
    outcome: int | None = None
    """The sum of an agreement that is over and which it has not seen yet."""

    @property
    def is_in_step(self) -> bool:
        return self.voted is not None or self.outcome is not None

    def state(self) -> tuple:
        next_has_started = self.wave._next_has_started
        return (
            self.wave.wave_id,
            self.wave.is_idle,
            next_has_started,
            *self.inbox,
            self.work,
            self.voted,
            self.outcome,
        )


@dataclass
class World:
    replicas: list[Replica]
    to_frontend: list[tuple[int, int]] = field(default_factory=list)
    """(dp_rank, wave_id) of WaveStarted on its way."""
    num_arrivals: int = 0

    def state(self) -> tuple:
        return (*(r.state() for r in self.replicas), tuple(self.to_frontend), self.num_arrivals)

    def actions(self) -> list[tuple[str, int]]:
        """All that can happen next."""
        found = [("arrive", i) for i in range(len(self.replicas)) if self.num_arrivals > 0]
        found += [("relay", i) for i in range(len(self.to_frontend))]
        for i, replica in enumerate(self.replicas):
            if replica.outcome is not None:
                found.append(("learn", i))
            elif replica.voted is None and (replica.inbox or not replica.wave.is_idle):
                found.append(("turn", i))
            if replica.is_in_step and replica.inbox and replica.inbox[0][0] == "start":
                found.append(("hear", i))
        if all(r.voted is not None for r in self.replicas):
            found.append(("agree", 0))
        return found

    def act(self, action: str, index: int) -> None:
        match action:
            case "arrive":
                self.num_arrivals -= 1
                self.replicas[index].inbox.append(("request", 0))
            case "relay":
                dp_rank, wave_id = self.to_frontend.pop(index)
                for peer in self.replicas:
                    if peer is not self.replicas[dp_rank]:
                        peer.inbox.append(("start", wave_id))
            case "agree":
                total = sum(r.voted or 0 for r in self.replicas)
                for replica in self.replicas:
                    replica.voted, replica.outcome = None, total
            case "hear":
                replica = self.replicas[index]
                replica.wave.start(WaveId(replica.inbox.pop(0)[1]))
            case "learn":
                self.learn(self.replicas[index])
            case "turn":
                self.turn(index)

    def turn(self, dp_rank: int) -> None:
        """Drain messages, then go into the agreement unless idle."""
        replica = self.replicas[dp_rank]
        for kind, wave_id in replica.inbox:
            if kind == "start":
                replica.wave.start(WaveId(wave_id))
                continue
            replica.work += 1
            if replica.wave.work_arrived():
                self.to_frontend.append((dp_rank, replica.wave.wave_id))
        replica.inbox = []
        if not replica.wave.is_idle:
            replica.voted = int(replica.work > 0)

    def learn(self, replica: Replica) -> None:
        total, replica.outcome = replica.outcome, None
        if total == 0:
            replica.wave.end()
        replica.work = max(replica.work - 1, 0)


@pytest.mark.parametrize(("num_replicas", "num_requests"), [(2, 1), (2, 3), (3, 2)])
def test_no_order_of_events_ends_in_a_deadlock(num_replicas: int, num_requests: int) -> None:
    todo = [World([Replica() for _ in range(num_replicas)], num_arrivals=num_requests)]
    seen = {todo[0].state()}
    num_ends = 0
    while todo:
        world = todo.pop()
        actions = world.actions()
        if not actions:
            num_ends += 1
            assert world.num_arrivals == 0
            assert [r.work for r in world.replicas] == [0] * num_replicas, "every request was served"
            assert all(r.wave.is_idle for r in world.replicas), "and everybody sleeps"
            assert len({r.wave.wave_id for r in world.replicas}) == 1, "before the same wave"
        for action in actions:
            after = copy.deepcopy(world)
            after.act(*action)
            if after.state() not in seen:
                seen.add(after.state())
                todo.append(after)
    assert num_ends > 0


def test_a_late_start_does_not_begin_the_next_wave() -> None:
    wave = WaveTracker()
    assert wave.work_arrived()
    wave.end()
    wave.start(WaveId(0))
    assert (wave.wave_id, wave.is_idle) == (1, True)


def test_a_start_ahead_of_us_is_applied_when_we_get_there() -> None:
    wave = WaveTracker()
    wave.start(WaveId(0))
    wave.start(WaveId(1))
    wave.end()
    assert (wave.wave_id, wave.is_idle) == (1, False)
    wave.end()
    assert (wave.wave_id, wave.is_idle) == (2, True)


def test_only_the_request_that_leaves_idle_is_told_to_the_peers() -> None:
    wave = WaveTracker()
    assert [wave.work_arrived(), wave.work_arrived()] == [True, False]
    wave.end()
    wave.start(WaveId(1))
    assert not wave.work_arrived()
