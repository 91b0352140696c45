"""The frontend as a process of its own: how it is started, and what it does when started.

Its orders come as one JSON line on standard input (not on the command line, where a key could be read by anyone).
When all replicas have come it prints the address and writes a byte to its owner's pipe.
"""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

from moeserve.config import Config, config_from_dict
from moeserve_launch.logs import configure_logging
from moeserve_launch.preflight import ServableModel


@dataclasses.dataclass(frozen=True, slots=True)
class FrontendProcess:
    """A running frontend, seen from the process that started it."""

    process: subprocess.Popen[bytes]
    ready_fd: int

    @staticmethod
    def start(config: Config, model: ServableModel, *, owner_pid: int, replica_bind_host: str) -> "FrontendProcess":
        """Start it in a session of its own, so that signals to ranks or terminal do not reach it.

        It ends when `owner_pid` does, or on SIGTERM.
        """
        ready_fd, write_fd = os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-m", "moeserve", "frontend"],
            stdin=subprocess.PIPE,
            start_new_session=True,
            pass_fds=(write_fd,),
        )
        os.close(write_fd)
        os.set_blocking(ready_fd, False)
        orders = {
            "config": dataclasses.asdict(config),
            "model_folder": str(model.folder),
            "max_model_len": model.max_model_len,
            "owner_pid": owner_pid,
            "replica_bind_host": replica_bind_host,
            "ready_fd": write_fd,
        }
        assert process.stdin is not None
        process.stdin.write(json.dumps(orders).encode())
        process.stdin.close()
        return FrontendProcess(process, ready_fd)

    def was_ready(self) -> bool:
        """Whether all replicas had come at least once; asked once, when ranks have failed."""
        try:
            return os.read(self.ready_fd, 1) != b""
        except BlockingIOError:
            return False

    def stop(self, *, timeout_s: float = 5.0) -> int:
        """Ask it to end its streams and leave; returns its exit code."""
        self.process.terminate()
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


def run_from_stdin() -> int:
    """Body of the frontend process; returns when its owner is gone or it was told to leave."""
    from moeserve.server.frontend import run_frontend

    configure_logging("frontend")
    orders = json.loads(sys.stdin.read())
    config = config_from_dict(orders["config"])

    def on_ready() -> None:
        print(_greeting(config), flush=True)
        os.write(orders["ready_fd"], b"1")
        os.close(orders["ready_fd"])

    run_frontend(
        config,
        model_folder=Path(orders["model_folder"]),
        max_model_len=orders["max_model_len"],
        owner_pid=orders["owner_pid"],
        replica_host=orders["replica_bind_host"],
        on_ready=on_ready,
    )
    return 0


def _greeting(config: Config) -> str:
    parallel, server = config.parallel, config.server
    url = f"http://{server.host}:{server.port}"
    name = config.model.served_names[0]
    body = json.dumps({"model": name, "prompt": "The captain said", "max_tokens": 40})
    key = "-H 'Authorization: Bearer KEY' " if server.api_key else ""
    return (
        f"\nmoeserve: {name} is served at {url}/v1 on {parallel.world_size} rank(s): "
        f"tp {parallel.tensor_parallel_size} x dp {parallel.data_parallel_size}\n"
        f"try:  curl {url}/v1/completions {key}-H 'Content-Type: application/json' -d '{body}'\n"
        f"      moeserve chat --url {url}        API page: {url}/docs\n"
    )
