"""transformers' `generate` with all clients' prompts as one batch: no arrivals, no streaming, its friendliest case."""

import json
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from benchmarks.harness.load import Load, LoadTimes
from benchmarks.harness.server import ServerFailedError, ServerProcess
from benchmarks.peers.system import Placement, Variant


class TransformersPeer:
    """The library this project depends on, in a process of its own."""

    def __init__(self) -> None:
        self.version = f"transformers {version('transformers')}"

    def prepare(self, variant: Variant, checkpoint: Path) -> None:
        """Nothing to set up."""

    def start(self, variant: Variant, placement: Placement) -> "GenerateSystem":
        worker = Path(__file__).with_name("generate_worker.py")
        command = [sys.executable, str(worker), str(placement.checkpoint)]
        environ = {"OMP_NUM_THREADS": str(variant.num_cores), "HF_HUB_OFFLINE": "1"}
        process = ServerProcess.start(command, log=placement.log, cores=placement.cores, environ=environ, pipes=True)
        return GenerateSystem(process)


class GenerateSystem:
    """A started worker."""

    def __init__(self, process: ServerProcess) -> None:
        self.process = process
        try:
            self._read()
            self._generate([[1, 2, 3, 4]], 1)
        except BaseException:
            process.stop()
            raise
        self.ready_s = process.seconds_since_start

    def run(self, load: Load, prompts: Sequence[Sequence[int]]) -> LoadTimes:
        """Batches of one prompt a client; all tokens of a batch come at its end."""
        batches = [prompts[first : first + load.num_clients] for first in range(0, len(prompts), load.num_clients)]
        seconds = [self._generate(batch, load.output_tokens) for batch in batches]
        times = [(one,) * load.output_tokens for one in seconds for _ in range(load.num_clients)]
        return LoadTimes(seconds=sum(seconds), token_times=tuple(times))

    def _generate(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> float:
        pipe = self.process.process.stdin
        assert pipe is not None
        pipe.write(json.dumps({"prompts": prompts, "output_tokens": output_tokens}).encode() + b"\n")
        pipe.flush()
        return self._read()

    def _read(self) -> float:
        pipe = self.process.process.stdout
        assert pipe is not None
        line = pipe.readline()
        if not line:
            self.process.process.wait()
            raise ServerFailedError(f"the worker ended; it said: {self.process.last_words()}")
        seconds: float = json.loads(line)["seconds"]
        return seconds
