"""The C++ compiler: which one, with which flags, and processes of it side by side."""

import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

Isa = Literal["native", "avx2", "generic"]

_ISA_FLAGS: dict[Isa, tuple[str, ...]] = {
    "native": ("-march=native",),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "generic": (),
}
_FLAGS = (
    *("-std=c++20", "-O3", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-Wall", "-Wno-psabi"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
)


class NativeUnavailable(RuntimeError):  # noqa: N818 - a state of the machine: torch serves in its place
    """The native kernels cannot be built or loaded here; the message says why in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolchain:
    """A compiler with its flags, and what identifies them."""

    command: str
    flags: tuple[str, ...]
    identity: tuple[str, ...]
    """Of compiler and flags; `-march=native` counts as what it means on this machine."""

    @staticmethod
    def find(isa: Isa) -> "Toolchain":
        """CXX, or the first compiler of the path. Raises NativeUnavailable where there is none that runs."""
        command = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
        if command is None:
            raise NativeUnavailable("no C++ compiler was found (c++, g++ or clang++; CXX names another)")
        flags = (*_FLAGS, *_ISA_FLAGS[isa])
        macros = _run([command, *flags, "-dM", "-E", "-x", "c++", os.devnull], [])
        return Toolchain(command=command, flags=flags, identity=(command, *flags, macros))

    def run(self, arguments: Sequence[str]) -> None:
        """Raises NativeUnavailable with the compiler's first complaint."""
        _run([self.command, *arguments], [])

    def run_all(self, jobs: Sequence[Sequence[str]], on_done: Callable[[int], None]) -> None:
        """Run the compiler with each of the arguments, as many at once as there are cores (or as MAX_JOBS says).

        on_done: called with the index of each job that is done, in their order. Whatever ends this early, a complaint,
        an exception of on_done or an interrupt, ends the processes too. Raises NativeUnavailable.
        """
        running: list[subprocess.Popen[str]] = []
        with ThreadPoolExecutor(_num_jobs()) as pool:
            futures = [pool.submit(_run, [self.command, *arguments], running) for arguments in jobs]
            try:
                for index, future in enumerate(futures):
                    future.result()
                    on_done(index)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for process in running:
                    process.kill()
                raise


def _run(command: list[str], running: list[subprocess.Popen[str]]) -> str:
    """Standard output; the process is added to `running`. Raises NativeUnavailable."""
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    except OSError as error:
        raise NativeUnavailable(f"the C++ compiler {command[0]} cannot be run: {error}") from error
    running.append(process)
    output, complaints = process.communicate()
    if process.returncode != 0:
        lines = [line for line in complaints.splitlines() if line.strip()] or [f"exit code {process.returncode}"]
        reason = next((line for line in lines if "error" in line), lines[-1])
        raise NativeUnavailable(f"the C++ compiler {command[0]} failed: {reason.strip()}")
    return output


def _num_jobs() -> int:
    jobs = os.environ.get("MAX_JOBS", "")
    return int(jobs) if jobs.isdigit() and int(jobs) > 0 else len(os.sched_getaffinity(0))
