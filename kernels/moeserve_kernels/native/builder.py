"""Compiles the native kernels for this machine and loads them.

Every `<op>/cpu.cpp` is plain C++ without torch headers and compiles in seconds; `library.cpp` alone sees torch. Objects
and libraries lie in `$XDG_CACHE_HOME/moeserve/native` under a digest of everything that goes into them, so a build is
made once for a machine, and after a change only of what has changed.
"""

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from moeserve_kernels.native.toolchain import Isa, NativeUnavailable, Toolchain

Progress = Callable[[int, int], None]
"""Called with the number of files compiled and of files to compile."""

_SOURCES = Path(__file__).resolve().parents[1]


def is_loaded() -> bool:
    """Whether this process has the native kernels."""
    return hasattr(torch.ops.moeserve, "native_isa")


def load(*, isa: Isa = "native", may_build: bool = True, on_progress: Progress | None = None) -> None:
    """Load the kernels into this process, built first where the cache has none. Does nothing if they are loaded.

    may_build: false where somebody else has built them, or has failed to. Raises NativeUnavailable.
    """
    if is_loaded():
        return
    build = _Build.plan(isa)
    if may_build:
        build.ensure(on_progress)
    elif not build.library.exists():
        raise NativeUnavailable(f"there is no {build.library}")
    try:
        torch.ops.load_library(build.library)
    except OSError as error:
        raise NativeUnavailable(f"{build.library} cannot be loaded: {error}") from error


def build(*, isa: Isa = "native", on_progress: Progress | None = None) -> Path:
    """The library for this machine, compiled unless the cache has it. One process builds, others wait for it.

    Raises NativeUnavailable without a compiler, or when it fails.
    """
    plan = _Build.plan(isa)
    plan.ensure(on_progress)
    return plan.library


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """A file to compile, and the object that it becomes."""

    path: Path
    object: Path

    @property
    def sees_torch(self) -> bool:
        return self.path.name == "library.cpp"

    def arguments(self, toolchain: Toolchain, made: Path, work: Path) -> tuple[str, ...]:
        """Of the compiler, to make the object as `made`; `work` holds generated files."""
        torch_flags = _torch_flags() if self.sees_torch else ()
        include = ("-I", str(_SOURCES), "-I", str(work))
        return (*toolchain.flags, *include, *torch_flags, "-c", str(self.path), "-o", str(made))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Build:
    """What goes into a library, and where it lies."""

    toolchain: Toolchain
    sources: list[_Source]
    library: Path

    @staticmethod
    def plan(isa: Isa) -> "_Build":
        toolchain, cache = Toolchain.find(isa), _cache_folder()
        identity = (*toolchain.identity, torch.__version__)
        headers = _contents(sorted(_SOURCES.glob("*/*.h")))
        # The file with torch's headers takes longest: it goes first.
        paths = [_SOURCES / "native" / "library.cpp", *sorted(_SOURCES.glob("*/cpu.cpp"))]
        paths += sorted(path for path in _SOURCES.glob("native/*.cpp") if path not in paths)
        digests = [_digest(*identity, *headers, *_contents([path])) for path in paths]
        objects = (cache / f"{p.parent.name}_{p.stem}_{d}.o" for p, d in zip(paths, digests, strict=True))
        return _Build(
            toolchain=toolchain,
            sources=[_Source(path=path, object=target) for path, target in zip(paths, objects, strict=True)],
            library=cache / f"moeserve_{_digest(*digests)}.so",
        )

    def ensure(self, on_progress: Progress | None) -> None:
        """Compile unless somebody has; waits while somebody does."""
        cache = self.library.parent
        if self.library.exists():
            return
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with (cache / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not self.library.exists():
                    self._compile(on_progress or _ignore)
        except OSError as error:
            raise NativeUnavailable(f"the native kernels cannot be built in {cache}: {error}") from error

    def _compile(self, on_progress: Progress) -> None:
        """Objects that are not in the cache, side by side, then the library; each appears whole or not at all."""
        missing = [source for source in self.sources if not source.object.exists()]
        with tempfile.TemporaryDirectory(dir=self.library.parent) as folder:
            work = Path(folder)
            bindings = sorted(_SOURCES.glob("*/cpu_binding.h"))
            (work / "bindings.inc").write_text("".join(f'#include "{p.relative_to(_SOURCES)}"\n' for p in bindings))
            made = [work / source.object.name for source in missing]
            jobs = [
                source.arguments(self.toolchain, target, work) for source, target in zip(missing, made, strict=True)
            ]

            def keep(index: int) -> None:
                made[index].rename(missing[index].object)
                on_progress(index + 1, len(missing))

            on_progress(0, len(missing))
            self.toolchain.run_all(jobs, keep)
            library = work / self.library.name
            torch_libraries = f"-L{Path(torch.__file__).parent / 'lib'}"
            objects = [str(source.object) for source in self.sources]
            link = ("-shared", "-fopenmp", torch_libraries, "-lc10", "-ltorch_cpu", "-o", str(library))
            self.toolchain.run([*objects, *link])
            library.rename(self.library)


def _ignore(done: int, total: int) -> None:
    """Nobody watches the build."""


def _torch_flags() -> tuple[str, ...]:
    include = Path(torch.__file__).parent / "include"
    return (
        # Bindings do little: optimising torch's headers takes most of the build and gains nothing.
        "-O1",
        f"-isystem{include}",
        f"-isystem{include / 'torch' / 'csrc' / 'api' / 'include'}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    )


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "moeserve" / "native"


def _contents(paths: list[Path]) -> list[str]:
    """Names and texts."""
    return [part for path in paths for part in (str(path.relative_to(_SOURCES)), path.read_text())]


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
