"""What a user gets for a mistake, and what is left when a process dies: one line, exit code 1, nothing running."""

import json
import os
import shutil
import signal
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest

from moeserve.testing.server import RunningServer, running_server, start_server

pytestmark = pytest.mark.e2e

ALL_DOWN_S = 10.0


def copy_of(folder: Path, target: Path) -> Path:
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.md"))
    target.chmod(0o755)
    for file in target.iterdir():
        file.chmod(0o644)
    return target


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def edit_header(folder: Path, change: Callable[[dict[str, dict[str, object]]], None]) -> None:
    """Rewrite the header of the checkpoint's one file; the data stays where it is."""
    path = folder / "model.safetensors"
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def rename_a_tensor(header: dict[str, dict[str, object]]) -> None:
    header["model.norm.wait"] = header.pop("model.norm.weight")


def turn_a_tensor(header: dict[str, dict[str, object]]) -> None:
    shape = header["model.layers.0.self_attn.k_proj.weight"]["shape"]
    assert isinstance(shape, list)
    shape.reverse()


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1000)


BROKEN = {
    "missing tensor": (lambda f: edit_header(f, rename_a_tensor), ["model.norm.weight"]),
    "misshaped tensor": (lambda f: edit_header(f, turn_a_tensor), ["model.layers.0.self_attn.k_proj.weight"]),
    "cut file": (cut, ["model.safetensors"]),
    "corrupt header": (lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 64), ["model.safetensors"]),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), ["safetensors"]),
    "unknown architecture": (lambda f: edit_config(f, architectures=["Gpt2LMHeadModel"]), ["Gpt2LMHeadModel"]),
    "config is not JSON": (lambda f: (f / "config.json").write_text("{"), ["config.json"]),
}


def assert_refused_in_one_line(server: RunningServer, words: list[str]) -> None:
    try:
        assert server.wait_exit(60) == 1
    finally:
        server.stop()
    complaints = [line for line in server.lines if "moeserve: error:" in line]
    assert len(complaints) == 1, server.lines
    assert "Traceback" not in "\n".join(server.lines)
    for word in words:
        assert word in complaints[0]


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_checkpoint_is_named_in_one_line(case: str, demo_folder: Path, tmp_path: Path) -> None:
    break_it, words = BROKEN[case]
    folder = copy_of(demo_folder, tmp_path / "model")
    break_it(folder)
    assert_refused_in_one_line(start_server(str(folder), "-tp", "2"), words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("/nowhere/model",), ["/nowhere/model"]),
        (("demo", "-tp", "3"), ["tensor_parallel_size", "3", "4"]),
        (("demo", "-dp", "17"), ["17", "16"]),
        (("demo", "--max-model-len", "4096"), ["max_model_len", "2048", "4096"]),
        (("demo", "--dtype", "int3"), ["dtype", "int3", "bfloat16"]),
        (("demo", "--set", "server.prot=1"), ["server.prot"]),
        (("demo", "--placement-file", "/nowhere.json"), ["/nowhere.json"]),
        (("demo", "-tp", "2", "--kv-cache-memory", "1K"), ["kv_cache_memory", "1024"]),
    ],
)
def test_a_setting_that_cannot_be_is_named_in_one_line(arguments: tuple[str, ...], words: list[str]) -> None:
    assert_refused_in_one_line(start_server(*arguments), words)


def test_a_busy_port_is_named_in_one_line() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        server = start_server("demo", "--set", f"server.engine_port={port}")
        assert_refused_in_one_line(server, [str(port), "in use"])


def gone(processes: list[psutil.Process], timeout_s: float = ALL_DOWN_S) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    return not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_interrupt_ends_everything() -> None:
    with running_server("demo", "-tp", "2") as server:
        processes = server.processes()
        server.process.send_signal(signal.SIGINT)
        assert server.wait_exit(ALL_DOWN_S) == 0
        assert gone(processes)
        assert "Traceback" not in "\n".join(server.lines)


def test_nothing_outlives_a_killed_launcher() -> None:
    with running_server("demo", "-tp", "2") as server:
        processes = server.processes()
        server.process.kill()
        assert gone(processes)


def test_a_dead_frontend_ends_the_server() -> None:
    with running_server("demo", "-tp", "2") as server:
        processes = server.processes()
        (frontend,) = [process for process in processes if "frontend" in process.cmdline()]
        frontend.kill()
        assert server.wait_exit(ALL_DOWN_S) == 1
        assert gone(processes)


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1")


@pytest.mark.parametrize(
    ("layout", "launcher"),
    [
        pytest.param(("-tp", "2"), (), id="tp2"),
        pytest.param(("-dp", "2"), (), id="dp2"),
        pytest.param(("-tp", "2"), TORCHRUN, id="tp2 under a bare torchrun"),
    ],
)
def test_a_killed_rank_does_not_break_a_stream(layout: tuple[str, ...], launcher: tuple[str, ...]) -> None:
    """Sampled output goes on after the restart exactly as it would have without."""
    body = {"model": "demo", "prompt": "The captain", "max_tokens": 400, "ignore_eos": True, "seed": 11}
    with (
        running_server("demo", "--dtype", "float32", *layout, launcher=launcher) as server,
        httpx.Client(timeout=120) as http,
    ):
        expected = http.post(f"{server.url}/v1/completions", json=body).json()["choices"][0]["text"]
        (frontend,) = [process for process in server.processes() if "frontend" in process.cmdline()]
        text, num_chunks = "", 0
        with http.stream("POST", f"{server.url}/v1/completions", json=body | {"stream": True}) as response:
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                text += json.loads(line[6:])["choices"][0]["text"]
                num_chunks += 1
                if num_chunks == 20:
                    server.ranks()[-1].kill()
        assert text == expected
        assert frontend.is_running()
