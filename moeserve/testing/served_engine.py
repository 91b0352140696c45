"""A frontend in a thread, real uvicorn and all, before a fake engine: what the tests of the API talk to."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moeserve.config import SchedulerConfig, config_from_dict
from moeserve.engine.outputs import SchedulerOutput
from moeserve.server.frontend import Frontend
from moeserve.testing.fake_engine import FakeEngineSettings, FakeReplica, run_fake_engine
from moeserve.testing.fake_model import NextToken
from moeserve.testing.server import free_ports

_START_TIMEOUT_S = 30.0
_STEP_TIMEOUT_S = 30.0


def wait_until(condition: Callable[[], bool], *, timeout_s: float = 20.0) -> None:
    """Return when `condition` holds; for what another thread or process does without saying so."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"it did not come true within {timeout_s} s"
        time.sleep(0.005)


class StepGate:
    """Holds the steps of a fake engine while closed, and lets a test wait for one to come."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self._reached = threading.Event()

    def __call__(self, output: SchedulerOutput) -> None:
        if output.num_scheduled_tokens and not self._open.is_set():
            self._reached.set()
            assert self._open.wait(_STEP_TIMEOUT_S), "nobody opened the gate"

    def close(self) -> None:
        self._reached.clear()
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def wait_reached(self) -> None:
        """Return when a step with tokens waits at the closed gate."""
        assert self._reached.wait(_STEP_TIMEOUT_S), "no step came"


@dataclass(slots=True, kw_only=True)
class RunningFrontend:
    """`frontend` serves at `url`; replicas reach it at `engine_address`."""

    frontend: Frontend
    url: str
    engine_address: str
    ready: threading.Event
    replicas: Sequence[FakeReplica] = field(default_factory=list)

    def wait_ready(self) -> None:
        assert self.ready.wait(_START_TIMEOUT_S), "the replicas did not come"


@contextmanager
def run_frontend_in_thread(
    model_folder: Path, settings: Mapping[str, Mapping[str, Any]] | None = None, *, max_model_len: int = 512
) -> Iterator[RunningFrontend]:
    """A frontend without replicas. `settings` is config by section; ports are chosen here."""
    port, engine_port = free_ports(2)
    sections = {name: dict(values) for name, values in (settings or {}).items()}
    sections.setdefault("server", {}).update(port=port, engine_port=engine_port)
    ready = threading.Event()
    frontend = Frontend(
        config_from_dict(sections), model_folder=model_folder, max_model_len=max_model_len, on_ready=ready.set
    )
    thread = threading.Thread(target=frontend.run, name="frontend", daemon=True)
    thread.start()
    try:
        yield RunningFrontend(
            frontend=frontend,
            url=f"http://127.0.0.1:{port}",
            engine_address=f"tcp://127.0.0.1:{engine_port}",
            ready=ready,
        )
    finally:
        frontend.stop()
        thread.join(_START_TIMEOUT_S)
        assert not thread.is_alive(), "the frontend did not stop"


@contextmanager
def serve_fake_engine(
    model_folder: Path,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    vocab_size: int,
    num_blocks: int = 256,
    max_model_len: int = 512,
    eos_token_ids: tuple[int, ...] = (),
    scheduler: SchedulerConfig | None = None,
    next_token: NextToken | None = None,
    on_step: Callable[[SchedulerOutput], None] | None = None,
) -> Iterator[RunningFrontend]:
    """Frontend and replicas in this process, ready; `data_parallel_size` of the settings says how many."""
    with run_frontend_in_thread(model_folder, settings, max_model_len=max_model_len) as running:
        engine_settings = FakeEngineSettings(
            frontend_address=running.engine_address,
            dp_size=(settings or {}).get("parallel", {}).get("data_parallel_size", 1),
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
            scheduler=scheduler or SchedulerConfig(),
        )
        with run_fake_engine(engine_settings, next_token=next_token, on_step=on_step) as replicas:
            running.replicas = replicas
            running.wait_ready()
            yield running
