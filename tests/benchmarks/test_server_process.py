"""A benchmark's server process: on its cores, paused and continued, ended with its children, its last words told."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.harness.server import ServerFailedError, ServerProcess

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; print('child', flush=True); signal.pause()"])
child.wait()
"""


def _start(code: str, log: Path, *, pipes: bool = False) -> ServerProcess:
    core = max(os.sched_getaffinity(0))
    return ServerProcess.start([sys.executable, "-c", code], log=log, cores=[core], environ={"WORD": "x"}, pipes=pipes)


def _read_line(process: ServerProcess) -> bytes:
    assert process.process.stdout is not None
    return process.process.stdout.readline()


@pytest.fixture
def family(tmp_path: Path) -> Iterator[ServerProcess]:
    """A process and its child, both running."""
    process = _start(PARENT, tmp_path / "log", pipes=True)
    try:
        assert _read_line(process) == b"child\n"
        yield process
    finally:
        process.stop()


def test_all_of_it_runs_on_the_cores_it_was_given(family: ServerProcess) -> None:
    tree = family.tree()
    assert len(tree) == 2
    assert {tuple(one.cpu_affinity()) for one in tree} == {(max(os.sched_getaffinity(0)),)}
    assert tree[0].environ()["WORD"] == "x"


def test_paused_all_of_it_is_stopped_and_awake_it_runs(family: ServerProcess) -> None:
    family.pause()
    assert {one.status() for one in family.tree()} == {psutil.STATUS_STOPPED}
    with family.awake():
        assert psutil.STATUS_STOPPED not in {one.status() for one in family.tree()}
    assert {one.status() for one in family.tree()} == {psutil.STATUS_STOPPED}


def test_stop_leaves_nothing_even_when_paused(family: ServerProcess) -> None:
    tree = family.tree()
    family.pause()
    family.stop()
    assert not [one for one in tree if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def test_a_server_that_ends_tells_its_last_words(tmp_path: Path) -> None:
    process = _start("print('loading'); raise SystemExit('no such model')", tmp_path / "log")
    with pytest.raises(ServerFailedError, match=r"exit code 1; it said: loading \| no such model|no such model"):
        process.wait_healthy("http://127.0.0.1:9/health", timeout_s=60.0)


def test_a_server_that_never_answers_is_given_up(tmp_path: Path) -> None:
    process = _start("import signal; signal.pause()", tmp_path / "log")
    try:
        with pytest.raises(ServerFailedError, match="not ready after 0 s"):
            process.wait_healthy("http://127.0.0.1:9/health", timeout_s=0.2)
    finally:
        process.stop()
