"""The machine and the code that a figure belongs to, and the folder where benchmarks keep what they build."""

import os
import platform
import subprocess
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a reader needs to judge a figure."""

    cpu: str
    num_cores: int
    last_level_cache_bytes: int | None
    memory_gib: int
    system: str
    python: str
    torch: str
    commit: str
    """Short hash of HEAD; a `+` says that tracked files differ from it."""

    @property
    def text(self) -> str:
        return (
            f"{self.cpu}, {self.num_cores} cores, {self.memory_gib} GiB; {self.system}; Python {self.python}, "
            f"torch {self.torch}; commit {self.commit}"
        )


def describe_machine() -> Machine:
    return Machine(
        cpu=_cpu_name(),
        num_cores=len(os.sched_getaffinity(0)),
        last_level_cache_bytes=last_level_cache_bytes(),
        memory_gib=round(psutil.virtual_memory().total / 2**30),
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        torch=version("torch"),
        commit=_commit(),
    )


def cache_folder() -> Path:
    """Checkpoints, environments of peers and their logs; safe to delete, made again when missing."""
    return Path.home() / ".cache" / "moeserve"


def last_level_cache_bytes() -> int | None:
    """Of the cache that core 0 sees; None where the system does not tell."""
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text[:-1]) * units[text[-1]] if text[-1] in units else int(text))
    return max(sizes, default=None)


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    features = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    widest = next((name for name in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if name in features), None)
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name} ({widest})" if widest else name


def _commit() -> str:
    head = _git("rev-parse", "--short", "HEAD")
    return f"{head}+" if head and _git("status", "--porcelain", "--untracked-files=no") else head or "unknown"


def _git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False).stdout.strip()
