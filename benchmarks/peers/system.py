"""A variant of a system (its weights, cores and flags), what can start it, and one that speaks HTTP."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.harness.load import Endpoint, Load, LoadTimes, drive
from benchmarks.harness.server import ServerProcess

START_TIMEOUT_S = 400.0


class PeerUnavailableError(RuntimeError):
    """A system cannot be set up or started here; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One system in one configuration."""

    name: str
    peer: str
    num_cores: int
    weights: str = "bf16"
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a variant is started: what it serves, on which cores, and where its log goes."""

    checkpoint: Path
    cores: tuple[int, ...]
    log: Path


class System(Protocol):
    """A variant that is ready for loads."""

    process: ServerProcess
    ready_s: float
    """From the start of the process to its first answer."""

    def run(self, load: Load, prompts: Sequence[Sequence[int]]) -> LoadTimes:
        """Raises RuntimeError or an OSError when it does not give what the load asks for."""
        ...


class Peer(Protocol):
    """Something that serves checkpoints."""

    version: str

    def prepare(self, variant: Variant, checkpoint: Path) -> None:
        """Set up what `start` needs, at the first call; raises PeerUnavailableError."""
        ...

    def start(self, variant: Variant, placement: Placement) -> System:
        """Raises PeerUnavailableError or ServerFailedError, and then leaves nothing running."""
        ...


class HttpSystem:
    """A started server of the completions API."""

    def __init__(self, process: ServerProcess, endpoint: Endpoint) -> None:
        """Waits until the server answers; ends it and raises when it does not."""
        self.process = process
        self._endpoint = endpoint
        try:
            process.wait_healthy(f"{endpoint.url}/health", timeout_s=START_TIMEOUT_S)
            first = Load(name="first", num_clients=1, prompt_tokens=8, output_tokens=1)
            self.run(first, first.prompts(vocab_size=256, seed=0))
        except BaseException:
            process.stop()
            raise
        self.ready_s = process.seconds_since_start

    def run(self, load: Load, prompts: Sequence[Sequence[int]]) -> LoadTimes:
        return drive(self._endpoint, load, prompts)


def start_http_system(
    command: Sequence[str],
    placement: Placement,
    *,
    port: int,
    model: str,
    environ: Mapping[str, str] | None = None,
    extra_body: Mapping[str, object] | None = None,
) -> HttpSystem:
    """Start a server that will listen on `port` of this host."""
    process = ServerProcess.start(command, log=placement.log, cores=placement.cores, environ=environ or {})
    return HttpSystem(process, Endpoint(url=f"http://127.0.0.1:{port}", model=model, extra_body=extra_body or {}))
