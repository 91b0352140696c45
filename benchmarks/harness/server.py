"""A server process of a benchmark: on cores of its own, started, paused, continued and ended with all its children."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil

_STOP_TIMEOUT_S = 20.0
_POLL_S = 0.1
_LAST_LINES = 4


class ServerFailedError(RuntimeError):
    """A server that ended or did not answer in time; the text says what it printed last."""


class ServerProcess:
    """One started server. Its output goes to a file."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self._log = log
        self._started_at = time.perf_counter()

    @staticmethod
    def start(
        command: Sequence[str], *, log: Path, cores: Sequence[int], environ: Mapping[str, str], pipes: bool = False
    ) -> "ServerProcess":
        """Start on these cores, in a session of its own. pipes: keep standard input and output for the caller."""
        taskset = shutil.which("taskset")
        pin = [taskset, "-c", ",".join(map(str, cores))] if taskset else []
        # A caller's own thread count would bind a system that takes its threads from its cores.
        inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*pin, *command],
                stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipes else output,
                stderr=output,
                env=inherited | dict(environ),
                start_new_session=True,
            )
        return ServerProcess(process, log)

    @property
    def seconds_since_start(self) -> float:
        return time.perf_counter() - self._started_at

    def wait_healthy(self, url: str, *, timeout_s: float) -> None:
        """Return when `GET url` answers 200; raises ServerFailedError."""
        with httpx.Client(timeout=5.0) as http:
            while self.seconds_since_start < timeout_s:
                self.check_alive()
                with suppress(httpx.TransportError):
                    if http.get(url).status_code == httpx.codes.OK:
                        return
                time.sleep(_POLL_S)
        raise ServerFailedError(f"not ready after {timeout_s:.0f} s; it said: {self.last_words()}")

    def check_alive(self) -> None:
        """Raises ServerFailedError when the process has ended."""
        code = self.process.poll()
        if code is not None:
            raise ServerFailedError(f"ended with exit code {code}; it said: {self.last_words()}")

    def last_words(self) -> str:
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return " | ".join(lines[-_LAST_LINES:])[-600:]

    def tree(self) -> list[psutil.Process]:
        """The process and all its descendants."""
        try:
            root = psutil.Process(self.process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def pause(self) -> None:
        """Take it off the processors without ending it: its memory stays, its connections stay open.

        Returns when all of it has stopped: a busy process does so a little after the signal.
        """
        self._signal(signal.SIGSTOP)
        _wait_until_still(self.tree())

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Run for the length of a `with` block, paused before and after."""
        self.resume()
        try:
            yield
        finally:
            self.pause()

    def stop(self) -> None:
        """End it as Ctrl-C would, then by force whatever is left of it; its memory is free on return."""
        left = self.tree()
        self.resume()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        _wait_until_still(left)

    def _signal(self, number: signal.Signals) -> None:
        for process in self.tree():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)


def _wait_until_still(processes: Sequence[psutil.Process]) -> None:
    """Return when each of them is stopped or has ended, or after a while."""
    deadline = time.perf_counter() + _STOP_TIMEOUT_S
    while any(_runs(process) for process in processes) and time.perf_counter() < deadline:
        time.sleep(_POLL_S / 20)


def _runs(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() not in {psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}
    return False
