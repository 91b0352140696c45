"""Turns, rounds and failures of a comparison, with made-up systems whose processes only note their state."""

import os
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.load import Load, LoadTimes
from benchmarks.harness.server import ServerFailedError
from benchmarks.peers.plan import Comparison
from benchmarks.peers.runner import Checkpoint, Runner
from benchmarks.peers.system import PeerUnavailableError, Variant

SHORT = Load(name="short", num_clients=1, prompt_tokens=4, output_tokens=2)
LONG = Load(name="long", num_clients=2, prompt_tokens=4, output_tokens=2)
CHECKPOINT = Checkpoint(folder=Path("nowhere"), vocab_size=64, num_bytes=0, text="none")
A, B, C = (Variant(name=name, peer=name, num_cores=1) for name in "abc")
ALL = Comparison(key="all", name="all", variants=(A, B, C), loads=(SHORT, LONG))


@dataclass
class _FakeWorld:
    """All that happened, and what shall fail."""

    runs: list[tuple[str, str]] = field(default_factory=list)
    prompts: dict[tuple[str, str], list[list[list[int]]]] = field(default_factory=dict)
    awake: set[str] = field(default_factory=set)
    running: set[str] = field(default_factory=set)
    fails: dict[str, Exception] = field(default_factory=dict)
    """By what is done: `prepare a`, `start b`, `short c`."""

    def check(self, what: str) -> None:
        if what in self.fails:
            raise self.fails[what]


class _FakeProcess:
    def __init__(self, name: str, world: _FakeWorld) -> None:
        self._name, self._world = name, world
        world.running.add(name)
        world.awake.add(name)

    def pause(self) -> None:
        self._world.awake.discard(self._name)

    @contextmanager
    def awake(self) -> Any:
        self._world.awake.add(self._name)
        try:
            yield
        finally:
            self.pause()

    def stop(self) -> None:
        self.pause()
        self._world.running.discard(self._name)


class _FakeSystem:
    ready_s = 1.5

    def __init__(self, name: str, world: _FakeWorld) -> None:
        self._name, self._world = name, world
        self.process = _FakeProcess(name, world)

    def run(self, load: Load, prompts: Sequence[Sequence[int]]) -> LoadTimes:
        assert self._world.awake == {self._name}
        self._world.check(f"{load.name} {self._name}")
        if load.name != "warm-up":
            self._world.runs.append((self._name, load.name))
            self._world.prompts.setdefault((self._name, load.name), []).append([list(prompt) for prompt in prompts])
        return LoadTimes(seconds=1.0, token_times=((0.5, 1.0),) * load.num_requests)


class _FakePeer:
    version = "1"

    def __init__(self, world: _FakeWorld) -> None:
        self._world = world

    def prepare(self, variant: Variant, checkpoint: Path) -> None:
        self._world.check(f"prepare {variant.name}")

    def start(self, variant: Variant, placement: Any) -> Any:
        self._world.check(f"start {variant.name}")
        return _FakeSystem(variant.name, self._world)


def _run(world: _FakeWorld, num_rounds: int = 3) -> Runner:
    cores = os.sched_getaffinity(0)
    runner = Runner({name: _FakePeer(world) for name in "abc"}, CHECKPOINT, num_rounds=num_rounds)
    runner.prepare([ALL])
    runner.run(ALL)
    assert not world.running
    assert os.sched_getaffinity(0) == cores
    return runner


def test_systems_take_turns_and_the_first_of_a_round_changes() -> None:
    world = _FakeWorld()
    record = _run(world).record
    first_of_each_load = [name for name, _ in world.runs[::3]]
    assert first_of_each_load == ["a", "a", "b", "b", "c", "c"]
    for start in range(0, len(world.runs), 3):
        assert {name for name, _ in world.runs[start : start + 3]} == {"a", "b", "c"}
        assert len({load for _, load in world.runs[start : start + 3]}) == 1
    assert [row.round_index for row in record.measurements if (row.system, row.load) == ("b", "long")] == [0, 1, 2]
    assert record.ready_s == {"a": 1.5, "b": 1.5, "c": 1.5}
    assert record.failures == {}


def test_all_get_the_same_prompts_and_new_ones_every_round() -> None:
    world = _FakeWorld()
    runner = _run(world)
    runner.run(ALL)
    for load in ALL.loads:
        of_a, of_b = world.prompts["a", load.name], world.prompts["b", load.name]
        assert of_a == of_b
        assert len({str(prompts) for prompts in of_a}) == 6


@pytest.mark.parametrize("stage", ["prepare", "start", "warm-up", "short"])
def test_a_system_that_fails_has_no_figures_and_the_others_go_on(stage: str) -> None:
    world = _FakeWorld(fails={f"{stage} b": PeerUnavailableError("no compiler")})
    record = _run(world).record
    assert record.failures == {"b": "no compiler"}
    systems = [row.system for row in record.measurements]
    assert (systems.count("a"), systems.count("b"), systems.count("c")) == (6, 0, 6)


def test_figures_of_before_a_failure_are_kept_and_no_later_ones_are_made_up() -> None:
    world = _FakeWorld(fails={"long a": ServerFailedError("ended with exit code -9")})
    record = _run(world).record
    assert [(row.load, row.round_index) for row in record.measurements if row.system == "a"] == [("short", 0)]
    assert record.failures == {"a": "ended with exit code -9"}


def test_a_system_that_needs_more_cores_or_memory_than_there_are_is_told() -> None:
    world = _FakeWorld()
    many = Variant(name="a", peer="a", num_cores=4096)
    runner = Runner({"a": _FakePeer(world)}, CHECKPOINT, num_rounds=1)
    runner.run(Comparison(key="x", name="x", variants=(many,), loads=(SHORT,)))
    assert "needs 4096 cores" in runner.record.failures["a"]
    huge = Checkpoint(folder=Path("nowhere"), vocab_size=64, num_bytes=2**60, text="none")
    runner = Runner({"b": _FakePeer(world)}, huge, num_rounds=1)
    runner.run(Comparison(key="x", name="x", variants=(B,), loads=(SHORT,)))
    assert "GiB of memory are free" in runner.record.failures["b"]
    assert world.runs == []
