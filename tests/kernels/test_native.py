"""The builder of the native kernels, with a small library in place of the real one; and every instruction set."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

import moeserve_kernels
from moeserve_kernels.native import NativeUnavailable, build, builder, load
from moeserve_kernels.native.toolchain import Isa

SOURCES = {
    "native/library.cpp": '#include "bindings.inc"\nint main_part() { return square(2); }\n',
    "square/cpu.h": "int square(int x);\n",
    "square/cpu.cpp": '#include "square/cpu.h"\nint square(int x) { return x * x; }\n',
    "square/cpu_binding.h": '#include "square/cpu.h"\n',
    "cube/cpu.cpp": "int cube(int x) { return x * x * x; }\n",
}
"""A library of three objects that compile at once."""

needs_compiler = pytest.mark.skipif(
    not (shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler"
)


class Workshop:
    """The small library's sources and cache, and a compiler that notes what it compiles."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sources, self.cache = folder / "sources", folder / "cache" / "moeserve" / "native"
        self._log, self._compiler = folder / "log", folder / "compiler"
        for name, text in SOURCES.items():
            self.write(name, text)
        self.wrap_compiler("")
        monkeypatch.setattr(builder, "_SOURCES", self.sources)
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        monkeypatch.setenv("CXX", str(self._compiler))
        monkeypatch.setenv("MAX_JOBS", "2")

    def write(self, name: str, text: str) -> None:
        path = self.sources / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def wrap_compiler(self, preamble: str) -> None:
        """`preamble`: shell commands that run before each call of the real compiler."""
        real = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
        self._compiler.write_text(f'#!/bin/sh\necho "$@" >> {self._log}\n{preamble}\nexec {real} "$@"\n')
        self._compiler.chmod(0o755)

    def compiled(self) -> list[str]:
        """The sources compiled since the last call, sorted."""
        calls = self._log.read_text().splitlines() if self._log.exists() else []
        self._log.unlink(missing_ok=True)
        words = [call.split() for call in calls]
        return sorted(str(Path(w[w.index("-c") + 1]).relative_to(self.sources)) for w in words if "-c" in w)


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    return Workshop(tmp_path, monkeypatch)


EVERYTHING = ["cube/cpu.cpp", "native/library.cpp", "square/cpu.cpp"]


@needs_compiler
def test_a_build_compiles_what_has_changed_and_nothing_else(workshop: Workshop) -> None:
    first = build()
    assert workshop.compiled() == EVERYTHING
    assert build() == first
    assert workshop.compiled() == []
    workshop.write("cube/cpu.cpp", "int cube(int x) { return x * (x * x); }\n")
    second = build()
    assert second != first
    assert workshop.compiled() == ["cube/cpu.cpp"]
    workshop.write("square/cpu.h", "int square(int number);\n")
    assert build() not in (first, second)
    assert workshop.compiled() == EVERYTHING, "a header may be included anywhere"
    assert build(isa="generic") not in (first, second)
    assert workshop.compiled() == EVERYTHING
    assert [path.name for path in workshop.cache.iterdir() if path.is_dir()] == [], "no temporary folder is left"


@needs_compiler
def test_one_of_several_builders_compiles_and_the_others_wait(workshop: Workshop) -> None:
    told: list[tuple[int, int, int]] = []

    def build_one(number: int) -> Path:
        return build(on_progress=lambda done, total: told.append((number, done, total)))

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(build_one, range(4)))) == 1
    assert workshop.compiled() == EVERYTHING
    assert len({number for number, _, _ in told}) == 1, "only who compiles tells of it"
    assert [(done, total) for _, done, total in told] == [(0, 3), (1, 3), (2, 3), (3, 3)]


@needs_compiler
def test_a_complaint_of_the_compiler_is_told_in_one_line_and_mended_later(workshop: Workshop) -> None:
    workshop.write("cube/cpu.cpp", "int cube(int x) { return cubic(x); }\n")
    with pytest.raises(NativeUnavailable, match=r"failed: .*cube/cpu\.cpp:1.* error: .*cubic") as caught:
        build()
    assert "\n" not in str(caught.value)
    assert not list(workshop.cache.glob("*.so"))
    workshop.compiled()
    workshop.write("cube/cpu.cpp", SOURCES["cube/cpu.cpp"])
    assert build().exists()
    assert "native/library.cpp" not in workshop.compiled(), "what was compiled before the complaint is kept"


@needs_compiler
def test_who_may_not_build_is_told_that_nothing_is_there(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "is_loaded", lambda: False)
    with pytest.raises(NativeUnavailable, match=r"there is no .*moeserve_"):
        load(may_build=False)
    assert workshop.compiled() == []


@needs_compiler
def test_an_interrupt_ends_the_compilers(workshop: Workshop, tmp_path: Path) -> None:
    """One file takes for ever; the builder is interrupted once its compiler has told its process id."""
    pipe = tmp_path / "pid"
    os.mkfifo(pipe)
    workshop.wrap_compiler(f'case "$*" in *cube/cpu.cpp*) echo $$ > {pipe}; exec sleep 3600;; esac')
    pids: list[int] = []

    def interrupt(done: int, total: int) -> None:
        if done == 1:
            pids.append(int(pipe.read_text()))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(on_progress=interrupt)
    assert len(pids) == 1
    assert not psutil.pid_exists(pids[0])
    assert not list(workshop.cache.glob("*.so"))


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda patch: patch.setenv("CXX", "/nowhere/c++"), "/nowhere/c\\+\\+ cannot be run: .*No such file"),
        (lambda patch: patch.setenv("CXX", "false"), "false failed: exit code 1"),
        (lambda patch: (patch.delenv("CXX"), patch.setenv("PATH", "/nowhere")), "no C\\+\\+ compiler was found"),
    ],
    ids=["not there", "broken", "none"],
)
def test_without_a_compiler_the_reason_is_told(
    break_it: Callable[[pytest.MonkeyPatch], Any], words: str, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it(monkeypatch)
    with pytest.raises(NativeUnavailable, match=words) as caught:
        build()
    assert "\n" not in str(caught.value)


@needs_compiler
def test_a_cache_that_cannot_be_written_is_named(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    with pytest.raises(NativeUnavailable, match=r"cannot be built in /dev/null/moeserve/native: .*Not a directory"):
        build()


TESTS_OF_KERNELS = [
    path
    for path in sorted(Path(__file__).parent.glob("test_*.py"))
    if path.name != Path(__file__).name and "backend: Backend" in path.read_text()
]
RUN_TESTS = """
import sys
import pytest
import torch
from moeserve_kernels import native
native.load(isa=sys.argv[1])
assert torch.ops.moeserve.native_isa() == sys.argv[1]
sys.exit(pytest.main(["-q", "-x", "-k", "cpu", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""


@needs_compiler
@pytest.mark.timeout(600)
@pytest.mark.parametrize("isa", ["avx2", "generic"])
def test_other_instruction_sets_pass_the_same_tests(isa: Isa) -> None:
    """Compiled for less than this machine has; each library needs a process of its own.

    Their workspaces hold -1.7e38 wherever a kernel has not written (MALLOC_PERTURB_, in glibc).
    """
    if isa == "avx2" and "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("the machine has no AVX2")
    kernels = Path(moeserve_kernels.__path__[0]).parent
    run = subprocess.run(
        [sys.executable, "-c", RUN_TESTS, isa, *map(str, TESTS_OF_KERNELS)],
        env={**os.environ, "PYTHONPATH": str(kernels), "OMP_NUM_THREADS": "1", "MALLOC_PERTURB_": "1"},
        cwd=kernels.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout
