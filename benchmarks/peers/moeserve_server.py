"""moeserve itself, from this working tree."""

import sys
from importlib.metadata import version
from pathlib import Path

from benchmarks.harness.machine import cache_folder
from benchmarks.peers.system import HttpSystem, Placement, Variant, start_http_system
from moeserve.testing.server import free_ports

_KV_CACHE = "512M"


class MoeservePeer:
    """Started with the flags that a user would give."""

    def __init__(self) -> None:
        self.version = f"moeserve {version('moeserve')}"
        self._is_warm = False

    def prepare(self, variant: Variant, checkpoint: Path) -> None:
        """A first start compiles the kernels of this machine; a user pays that once, and no figure contains it."""
        if not self._is_warm:
            log = cache_folder() / "peers" / "moeserve-first-start.log"
            plain = Variant(name="first start", peer=variant.peer, num_cores=1)
            self.start(plain, Placement(checkpoint=checkpoint, cores=(0,), log=log)).process.stop()
            self._is_warm = True

    def start(self, variant: Variant, placement: Placement) -> HttpSystem:
        port, engine_port = free_ports(2)
        command = [sys.executable, "-m", "moeserve", "serve", str(placement.checkpoint), "--port", str(port)]
        command += ["--set", f"server.engine_port={engine_port}", "--kv-cache-memory", _KV_CACHE]
        return start_http_system(
            [*command, "--served-model-name", "model", *variant.flags],
            placement,
            port=port,
            model="model",
            extra_body={"stream_options": {"continuous_usage_stats": True}},
        )
