"""How much of a step is not the model: the scheduler of the leader and the frontend, while 32 clients stream.

The frontend's share is its processor time over the wall time of the load. The scheduler's is the share of the leader's
samples (py-spy, which reads the process from outside) whose stack lies in the engine loop and not in the execution of
the step. On one core both delay the step by as much.
"""

import re
import subprocess
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.harness.load import Load
from benchmarks.harness.machine import cache_folder
from benchmarks.harness.server import ServerProcess
from benchmarks.peers.environment import Environment, pip_install
from benchmarks.peers.system import PeerUnavailableError, System

_SAMPLES_PER_S = 250
_MOST_SECONDS = 600
_LOOP = re.compile(r"\brun \([^)]*replica_loop\.py")
_MODEL = re.compile(r"\bexecute \([^)]*worker\.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Shares of a step; they add up."""

    scheduler: float
    frontend: float
    num_samples: int
    seconds: float

    @property
    def share(self) -> float:
        return self.scheduler + self.frontend

    @property
    def text(self) -> str:
        return (
            f"With 32 clients on one rank and one core the scheduler takes {self.scheduler:.1%} of a step and the "
            f"frontend {self.frontend:.1%} ({self.num_samples:,} samples and processor time of {self.seconds:.0f} s)."
        )


class Profiler:
    """py-spy in an environment of its own."""

    def __init__(self) -> None:
        self._environment = Environment(cache_folder() / "peers" / "py-spy")

    def prepare(self) -> None:
        """Raises PeerUnavailableError."""
        self._environment.ensure([pip_install("py-spy>=0.4")])

    def measure(self, system: System, load: Load, prompts: list[list[int]]) -> Overhead:
        """Run the load on a running one-rank server; raises PeerUnavailableError where the samples tell nothing."""
        frontend, leader = _frontend_and_leader(system.process)
        with tempfile.TemporaryDirectory() as folder:
            stacks = Path(folder) / "stacks"
            recorder = self._record(leader.pid, stacks)
            start, busy_s = time.perf_counter(), _cpu_s(frontend)
            system.run(load, prompts)
            seconds, busy_s = time.perf_counter() - start, _cpu_s(frontend) - busy_s
            said = _finish(recorder)
            if not stacks.exists():
                raise PeerUnavailableError(f"py-spy wrote no samples; it said: {said}")
            num_samples, outside = share_outside_model(stacks.read_text().splitlines())
        return Overhead(scheduler=outside, frontend=busy_s / seconds, num_samples=num_samples, seconds=seconds)

    def _record(self, pid: int, stacks: Path) -> "subprocess.Popen[str]":
        command = [str(self._environment.folder / "bin" / "py-spy"), "record", "--nonblocking", "--format", "raw"]
        command += ["--pid", str(pid), "--rate", str(_SAMPLES_PER_S), "--duration", str(_MOST_SECONDS)]
        return subprocess.Popen(
            [*command, "--output", str(stacks)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )


def share_outside_model(lines: Iterable[str]) -> tuple[int, float]:
    """(samples of the engine loop, share of them that is not in the model) from py-spy's `frame;frame count` lines.

    Raises PeerUnavailableError when no sample is in the loop or none in the model: then the names have changed.
    """
    in_loop = in_model = 0
    for line in lines:
        stack, _, count = line.rpartition(" ")
        if _LOOP.search(stack):
            in_loop += int(count)
            in_model += int(count) if _MODEL.search(stack) else 0
    if not in_model:
        raise PeerUnavailableError(f"{in_loop} samples of the engine loop, none of the model's execution")
    return in_loop, 1 - in_model / in_loop


def _finish(recorder: "subprocess.Popen[str]") -> str:
    """Interrupted, py-spy writes what it has."""
    recorder.send_signal(2)
    try:
        return recorder.communicate(timeout=60)[1].strip()[-200:]
    except subprocess.TimeoutExpired:
        recorder.kill()
        return recorder.communicate()[1].strip()[-200:]


def _frontend_and_leader(process: ServerProcess) -> tuple[psutil.Process, psutil.Process]:
    tree = process.tree()
    frontends = [one for one in tree if "frontend" in one.cmdline()]
    leaders = [one for one in tree if one.environ().get("RANK") == "0" and one not in frontends]
    if len(frontends) != 1 or len(leaders) != 1:
        raise PeerUnavailableError(f"expected a frontend and a rank, found {len(frontends)} and {len(leaders)}")
    return frontends[0], leaders[0]


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system
