"""Runs comparisons: all systems of one are started, and then take turns, load by load and round by round.

Only one of them runs at a time: the others are paused (SIGSTOP), so they hold memory and no processor. Systems are
compared within a round, a minute or two apart, in an order that turns with every round. A system that has failed once
is not tried again.
"""

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from tqdm import tqdm

from benchmarks.harness.load import Load
from benchmarks.harness.machine import cache_folder
from benchmarks.harness.measurement import Measurement, measurement
from benchmarks.peers.plan import Comparison
from benchmarks.peers.system import Peer, PeerUnavailableError, Placement, System, Variant

_FAILURES = (RuntimeError, httpx.HTTPError, OSError, subprocess.SubprocessError)
_WARM_UP = Load(name="warm-up", num_clients=4, prompt_tokens=128, output_tokens=8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What is served."""

    folder: Path
    vocab_size: int
    num_bytes: int
    text: str

    @property
    def bytes_to_serve(self) -> int:
        """Free memory below which no further system is started: weights may be there thrice while they are packed."""
        return 3 * self.num_bytes + 2**30

    @staticmethod
    def read(folder: Path) -> "Checkpoint":
        config = json.loads((folder / "config.json").read_text())
        num_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        text = (
            f"{config['model_type']}, {num_bytes / 1e9:.2f} GB, hidden size {config['hidden_size']}, "
            f"{config['num_hidden_layers']} layers of {config['num_experts']} experts, "
            f"{config['num_experts_per_tok']} a token"
        )
        return Checkpoint(folder=folder, vocab_size=config["vocab_size"], num_bytes=num_bytes, text=text)


@dataclass(slots=True, kw_only=True)
class Record:
    """What a run has found so far."""

    measurements: list[Measurement] = field(default_factory=list)
    ready_s: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    """By system, why it has no (or not all) figures."""
    next_round: int = 0


class Runner:
    """Serves one checkpoint by all systems, on the cores of this process."""

    def __init__(self, peers: Mapping[str, Peer], checkpoint: Checkpoint, *, num_rounds: int) -> None:
        self._peers = peers
        self._checkpoint = checkpoint
        self._num_rounds = num_rounds
        self._cores = sorted(os.sched_getaffinity(0))
        self.record = Record()

    def prepare(self, comparisons: Sequence[Comparison]) -> None:
        """Set up all that they need, before anything is timed; why a variant can't be is in the record."""
        variants = dict.fromkeys(variant for comparison in comparisons for variant in comparison.variants)
        for variant in variants:
            try:
                self._peers[variant.peer].prepare(variant, self._checkpoint.folder)
            except _FAILURES as error:
                self._failed(variant, error)

    def run(self, comparison: Comparison) -> None:
        """Measure every variant that can be started; why another can't is in the record."""
        first_round = self.record.next_round
        self.record.next_round += self._num_rounds
        with ExitStack() as stack:
            systems = self._started(comparison, stack)
            num_runs = len(systems) * len(comparison.loads) * self._num_rounds
            with tqdm(total=num_runs, desc=comparison.name, unit="run") as bar:
                for round_index in range(first_round, first_round + self._num_rounds):
                    self._run_round(comparison.loads, systems, round_index, bar)

    @contextmanager
    def running(self, variant: Variant) -> Iterator[System]:
        """One system, not paused; raises what its start raises."""
        system = self._start(variant)
        try:
            with client_beside(self._cores, variant.num_cores):
                yield system
        finally:
            system.process.stop()

    def _started(self, comparison: Comparison, stack: ExitStack) -> dict[Variant, System]:
        """Paused systems; the stack ends them."""
        systems: dict[Variant, System] = {}
        variants = [variant for variant in comparison.variants if variant.name not in self.record.failures]
        with tqdm(variants, desc=f"Starting for {comparison.name}", unit="system", leave=False) as bar:
            for variant in bar:
                bar.set_postfix_str(variant.name)
                try:
                    system = self._start(variant)
                except _FAILURES as error:
                    self._failed(variant, error)
                    continue
                stack.callback(system.process.stop)
                system.process.pause()
                systems[variant] = system
        return systems

    def _start(self, variant: Variant) -> System:
        if len(self._cores) < variant.num_cores:
            raise PeerUnavailableError(f"needs {variant.num_cores} cores, there are {len(self._cores)}")
        free, needed = psutil.virtual_memory().available, self._checkpoint.bytes_to_serve
        if free < needed:
            raise PeerUnavailableError(f"{free / 2**30:.1f} GiB of memory are free, {needed / 2**30:.1f} are needed")
        name = variant.name.replace(" ", "_").replace(",", "")
        log = cache_folder() / "peers" / "logs" / f"{name}.log"
        cores = tuple(self._cores[-variant.num_cores :])
        placement = Placement(checkpoint=self._checkpoint.folder, cores=cores, log=log)
        system = self._peers[variant.peer].start(variant, placement)
        self.record.ready_s.setdefault(variant.name, system.ready_s)
        try:
            with client_beside(self._cores, variant.num_cores):
                system.run(_WARM_UP, _WARM_UP.prompts(vocab_size=self._checkpoint.vocab_size, seed=0))
        except BaseException:
            system.process.stop()
            raise
        return system

    def _run_round(
        self, loads: Sequence[Load], systems: dict[Variant, System], round_index: int, bar: "tqdm[Any]"
    ) -> None:
        for load in loads:
            prompts = load.prompts(vocab_size=self._checkpoint.vocab_size, seed=round_index)
            turn = round_index % max(1, len(systems))
            for variant in [*systems][turn:] + [*systems][:turn]:
                bar.set_postfix_str(f"{variant.name}: {load.name}")
                system = systems[variant]
                try:
                    with system.process.awake(), client_beside(self._cores, variant.num_cores):
                        times = system.run(load, prompts)
                except _FAILURES as error:
                    self._failed(variant, error)
                    del systems[variant]
                    continue
                self.record.measurements.append(measurement(variant.name, load, round_index, times))
                bar.update()

    def _failed(self, variant: Variant, error: Exception) -> None:
        reason = str(error) or type(error).__name__
        tqdm.write(f"{variant.name}: {reason}")
        self.record.failures[variant.name] = reason


@contextmanager
def client_beside(cores: Sequence[int], num_server_cores: int) -> Iterator[None]:
    """Keep the load generator off the server's cores, the last ones, where others are left."""
    others = cores[:-num_server_cores] or cores
    os.sched_setaffinity(0, others)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
