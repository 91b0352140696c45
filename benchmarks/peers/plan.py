"""What is compared with what: systems, their variants, and the loads of each comparison."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from benchmarks.harness.load import Load
from benchmarks.peers.llama_cpp import LlamaCppPeer
from benchmarks.peers.moeserve_server import MoeservePeer
from benchmarks.peers.system import Peer, Variant
from benchmarks.peers.transformers_generate import TransformersPeer
from benchmarks.peers.vllm_cpu import VllmPeer

OURS = "moeserve"
ONE_CLIENT = Load(name="1 client", num_clients=1, prompt_tokens=128, output_tokens=64)
EIGHT_CLIENTS = Load(name="8 clients", num_clients=8, prompt_tokens=128, output_tokens=64)
MANY_CLIENTS = Load(name="32 clients", num_clients=32, prompt_tokens=128, output_tokens=64)
PREFILL = Load(name="prefill", num_clients=1, prompt_tokens=2048, output_tokens=1)
LOADS = (ONE_CLIENT, EIGHT_CLIENTS, MANY_CLIENTS, PREFILL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Variants that take turns in one run, the loads they take, and which of them is ours."""

    key: str
    name: str
    variants: tuple[Variant, ...]
    loads: tuple[Load, ...]

    @property
    def ours(self) -> Variant:
        return self.variants[0]

    def only(self, peers: Collection[str]) -> "Comparison":
        return replace(self, variants=tuple(variant for variant in self.variants if variant.peer in peers))


def all_peers() -> Mapping[str, Peer]:
    """By the name that a variant gives."""
    return {
        OURS: MoeservePeer(),
        "vllm": VllmPeer(),
        "llama.cpp": LlamaCppPeer(),
        "transformers": TransformersPeer(),
    }


def _bf16(num_cores: int) -> tuple[Variant, ...]:
    where = "1 core" if num_cores == 1 else f"{num_cores} cores"
    names = {OURS: OURS, "vllm": "vLLM", "llama.cpp": "llama.cpp bf16", "transformers": "transformers"}
    return tuple(Variant(name=f"{name}, {where}", peer=peer, num_cores=num_cores) for peer, name in names.items())


ONE_CORE = Comparison(key="one-core", name="bf16, one core", variants=_bf16(1), loads=LOADS)
TWO_CORES = Comparison(key="two-cores", name="bf16, two cores", variants=_bf16(2), loads=LOADS)
ONE_RANK = ONE_CORE.ours
TWO_RANKS = (
    Variant(name="moeserve -tp 2", peer=OURS, num_cores=2, flags=("-tp", "2")),
    Variant(name="moeserve -dp 2", peer=OURS, num_cores=2, flags=("-dp", "2")),
)
RANKS = Comparison(
    key="ranks",
    name="two ranks and one, bf16",
    variants=(*TWO_RANKS, ONE_RANK),
    loads=(ONE_CLIENT, MANY_CLIENTS),
)
EIGHT_BITS = Comparison(
    key="int8",
    name="eight-bit weights, one core",
    variants=(
        Variant(name="moeserve int8", peer=OURS, num_cores=1, weights="int8", flags=("--quantization", "int8")),
        Variant(name="llama.cpp q8_0", peer="llama.cpp", num_cores=1, weights="q8_0"),
    ),
    loads=(ONE_CLIENT, EIGHT_CLIENTS),
)
QUICK = Comparison(
    key="quick",
    name="bf16, one core, small model",
    variants=tuple(variant for variant in ONE_CORE.variants if variant.peer in {OURS, "transformers"}),
    loads=(ONE_CLIENT, EIGHT_CLIENTS),
)
PLAN = (ONE_CORE, TWO_CORES, RANKS, EIGHT_BITS)
