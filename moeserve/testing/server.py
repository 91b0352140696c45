"""A server started as a user would start it, for tests and benchmarks: real processes, real ports."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

READY_SIGN = "is served at"


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now; all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for probe in sockets:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in sockets]
    finally:
        for probe in sockets:
            probe.close()


@dataclass(slots=True)
class RunningServer:
    """A started server and what it has printed so far (both streams)."""

    process: subprocess.Popen[str]
    url: str
    lines: list[str] = field(default_factory=list)
    _ready: threading.Event = field(default_factory=threading.Event)
    _reader: threading.Thread | None = None

    def start_reading(self) -> None:
        self._reader = threading.Thread(target=self._read, daemon=True, name="read-server-output")
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if READY_SIGN in line:
                self._ready.set()
        self._ready.set()

    def wait_ready(self, timeout_s: float) -> None:
        """Return when the server printed its address; raises RuntimeError with its output when it did not."""
        came = self._ready.wait(timeout_s)
        if not came or not any(READY_SIGN in line for line in self.lines):
            raise RuntimeError(f"the server is not ready after {timeout_s} s; it said:\n" + "\n".join(self.lines))

    def wait_exit(self, timeout_s: float) -> int:
        """Exit code, with all output read; raises subprocess.TimeoutExpired."""
        code = self.process.wait(timeout_s)
        if self._reader is not None:
            self._reader.join(timeout_s)
        return code

    def processes(self) -> list[psutil.Process]:
        """Everything the server runs as now: itself, its frontend and its ranks."""
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    def ranks(self) -> list[psutil.Process]:
        """The rank processes, in no particular order."""
        return [p for p in self.processes() if "TORCHELASTIC_RUN_ID" in p.environ() and "frontend" not in p.cmdline()]

    def stop(self, timeout_s: float = 20.0) -> int:
        """End it as Ctrl-C would, and whatever is left by force; returns the exit code."""
        left = self.processes() if self.process.poll() is None else []
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            return self.wait_exit(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()
        finally:
            for process in left:
                if process.is_running():
                    process.kill()


@contextmanager
def running_server(
    *words: str, launcher: Sequence[str] = (), ready_timeout_s: float = 120.0, environ: dict[str, str] | None = None
) -> Iterator[RunningServer]:
    """`moeserve serve WORDS` on free ports, ready to answer; stopped at the end.

    launcher: words between the interpreter and `-m moeserve`, such as those of torchrun. WORDS win over the free ports.
    """
    server = start_server(*words, launcher=launcher, environ=environ)
    try:
        server.wait_ready(ready_timeout_s)
        yield server
    finally:
        server.stop()


def start_server(
    *words: str, launcher: Sequence[str] = (), environ: dict[str, str] | None = None, cwd: Path | None = None
) -> RunningServer:
    """Start without waiting; the caller stops it."""
    port, engine_port = free_ports(2)
    ports = ("--port", str(port), "--set", f"server.engine_port={engine_port}")
    command = [sys.executable, *launcher, "-m", "moeserve", "serve", *ports, *words]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **(environ or {})},
        cwd=cwd,
        start_new_session=True,
    )
    server = RunningServer(process, f"http://127.0.0.1:{port}")
    server.start_reading()
    return server
