"""The frontend as a process: ports, signals, and the end of its owner."""

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from moeserve.config import ConfigError, config_from_dict
from moeserve.server.frontend import Frontend
from moeserve.testing.fake_engine import FakeEngineSettings, run_fake_engine
from moeserve.testing.server import free_ports
from moeserve.tokenizer import Tokenizer

PROGRAM = """
import sys
from pathlib import Path
from moeserve.config import config_from_dict
from moeserve.server.frontend import run_frontend
folder, port, engine_port, owner = sys.argv[1:]
run_frontend(
    config_from_dict({"server": {"port": int(port), "engine_port": int(engine_port)}}),
    model_folder=Path(folder), max_model_len=512, owner_pid=int(owner) or None,
    on_ready=lambda: print("ready", flush=True),
)
assert not {"torch", "transformers"} & set(sys.modules)
print("left", flush=True)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendProcess:
    process: subprocess.Popen[str]
    url: str
    engine_address: str

    def read_line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@contextmanager
def start(folder: Path, owner_pid: int = 0) -> Iterator[FrontendProcess]:
    port, engine_port = free_ports(2)
    command = [sys.executable, "-c", PROGRAM, str(folder), str(port), str(engine_port), str(owner_pid)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield FrontendProcess(
            process=process, url=f"http://127.0.0.1:{port}", engine_address=f"tcp://127.0.0.1:{engine_port}"
        )
    finally:
        process.kill()
        process.communicate(timeout=10.0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_open_streams_and_the_process(
    tokenizer_folder: Path, tokenizer: Tokenizer, number: signal.Signals
) -> None:
    with start(tokenizer_folder) as frontend:
        settings = FakeEngineSettings(
            frontend_address=frontend.engine_address, vocab_size=tokenizer.vocab_size, step_time_s=0.01
        )
        with run_fake_engine(settings):
            assert frontend.read_line() == "ready"
            body = {"prompt": "hi", "max_tokens": 500, "stream": True}
            with httpx.stream("POST", f"{frontend.url}/v1/completions", json=body, timeout=30.0) as stream:
                lines = stream.iter_lines()
                next(lines)
                frontend.process.send_signal(number)
                events = [line for line in lines if line]
            assert "shutting down" in events[-1]
            assert events[-1].startswith('data: {"error"')
            assert frontend.read_line() == "left"
            assert frontend.process.wait(10.0) == 0


def test_the_end_of_the_owner_ends_the_frontend(tokenizer_folder: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with start(tokenizer_folder, owner.pid) as frontend:
        owner.kill()
        # Nobody waits for it yet, so it stays a zombie: dead all the same.
        assert frontend.read_line() == "left"
        assert frontend.process.wait(10.0) == 0
    owner.communicate(timeout=10.0)


@pytest.mark.parametrize("name", ["port", "engine_port"])
def test_a_busy_port_is_named(tokenizer_folder: Path, name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = dict(zip(("port", "engine_port"), free_ports(2), strict=True))
        ports[name] = taken.getsockname()[1]
        config = config_from_dict({"server": ports})
        with pytest.raises(ConfigError, match=rf"server\.{name}: cannot listen on .*{ports[name]}.*in use"):
            Frontend(config, model_folder=tokenizer_folder, max_model_len=512)
        with socket.create_server(("127.0.0.1", ports["port"] if name == "engine_port" else ports["engine_port"])):
            pass  # the other port was given back


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot read the tokenizer in"):
        Frontend(config_from_dict({}), model_folder=tmp_path, max_model_len=512)
