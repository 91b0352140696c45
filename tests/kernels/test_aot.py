"""Every tuned configuration compiled for its GPUs, without a GPU: no spills, shared memory fits, tensor cores used.

The launchers run on CPU tensors of serving shapes; each launch is compiled through to machine code instead of started.
"""

import ast
import re
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch

from moeserve_kernels.tuning import Tuning, load_tuning

triton = pytest.importorskip("triton")

MAX_SHARED_BYTES = {80: 99 << 10, 90: 227 << 10, 100: 227 << 10}
"""Of one program. GPUs of compute capability 8.0 have more, but those of 8.6 and 8.9 read the same configurations."""
MATRIX_INSTRUCTION = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    kernel: str
    constants: dict[str, Any]
    ptx: str
    shared_bytes: int
    stack_bytes: int
    """Of one thread: where registers are spilled to."""
    local_bytes: int

    def __str__(self) -> str:
        sizes = {name: x for name, x in self.constants.items() if isinstance(x, bool | int)}
        return f"{self.kernel} {sizes}"


class CompileOnlyDriver:
    """What Triton asks of a driver to compile a launch."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> Any:
        return triton.backends.compiler.GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability

    def get_current_stream(self, device: int) -> int:
        return device


class UsedClasses(dict[str, Any]):
    """A tuning that remembers which of its classes were asked for."""

    def __init__(self, tuning: Tuning) -> None:
        super().__init__(tuning)
        self.used: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.used.add(name)
        return super().__getitem__(name)


@pytest.fixture
def compile_launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[Compiled]]]:
    """Called with a function and a compute capability: everything that the function launches, compiled."""
    from triton.runtime.jit import JITFunction

    run = JITFunction.run
    launched: dict[int, tuple[Any, dict[str, Any]]] = {}

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        made = run(self, *args, grid=grid, warmup=True, **kwargs)
        launched[id(made)] = made, {"kernel": self.__name__, "constants": kwargs}

    parse, parsing = ast.parse, Lock()

    def parse_one_at_a_time(*args: Any, **kwargs: Any) -> ast.AST:
        """CPython 3.11 mixes up how deep it is when two threads build syntax trees (a SystemError)."""
        with parsing:
            return parse(*args, **kwargs)

    def compile_launches(launch: Callable[[], None], capability: int) -> list[Compiled]:
        monkeypatch.setattr(triton.runtime.driver, "_active", CompileOnlyDriver(capability))
        monkeypatch.setattr(JITFunction, "run", record)
        monkeypatch.setattr(ast, "parse", parse_one_at_a_time)
        with ThreadPoolExecutor(2) as pool, triton.AsyncCompileMode(pool):
            launch()
        return [
            Compiled(**what, ptx=made.asm["ptx"], shared_bytes=made.metadata.shared, **_memory(made.asm["cubin"]))
            for made, what in launched.values()
        ]

    def _memory(cubin: bytes) -> dict[str, int]:
        binary = tmp_path / "kernel.cubin"
        binary.write_bytes(cubin)
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        usage = subprocess.run([tool, "--dump-resource-usage", binary], capture_output=True, text=True, check=True)
        found = re.search(r"STACK:(\d+).* LOCAL:(\d+)", usage.stdout)
        assert found, usage.stdout
        return {"stack_bytes": int(found[1]), "local_bytes": int(found[2])}

    with triton.knobs.cache.scope(), triton.knobs.compilation.scope():
        triton.knobs.cache.dir = str(tmp_path / "cache")
        triton.knobs.compilation.always_compile = True
        yield compile_launches


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype)


def launch_rms_norm(tuning: Tuning, _: int) -> None:
    """A hidden row with its residual; heads of a merged projection."""
    from moeserve_kernels.rms_norm.triton import rms_norm

    rms_norm(empty(64, 7168), empty(7168), 1e-6, empty(64, 7168), tuning=tuning)
    rms_norm(empty(64, 48, 128)[:, :32], empty(128), 1e-6, tuning=tuning)


def launch_rotary(tuning: Tuning, _: int) -> None:
    from moeserve_kernels.rotary.triton import rotary

    angles = empty(64, 32, dtype=torch.float32)
    rotary(empty(64, 32, 128), angles, angles, False, tuning=tuning)
    rotary(empty(64, 16, 64), angles, angles, True, tuning=tuning)


def launch_silu_and_mul(tuning: Tuning, _: int) -> None:
    from moeserve_kernels.silu_and_mul.triton import silu_and_mul

    silu_and_mul(empty(64, 4096), tuning=tuning)


def launch_kv_cache_write(tuning: Tuning, capability: int) -> None:
    from moeserve_kernels.kv_cache_write.triton import kv_cache_write

    slots = empty(64, dtype=torch.int64)
    for dtype in cache_dtypes(capability):
        scale = None if dtype == torch.bfloat16 else empty(100, 16, 8, dtype=torch.float32)
        kv_cache_write(empty(64, 8, 128), empty(100, 16, 8, 128, dtype=dtype), slots, scale, tuning=tuning)


def launch_topk_routing(tuning: Tuning, _: int) -> None:
    """As OLMoE, gpt-oss and DeepSeek-V3."""
    from moeserve_kernels.topk_routing.triton import topk_routing

    grouped = {"num_groups": 8, "num_selected_groups": 4, "group_score": "top2_sum"}
    for num_experts, top_k, scoring, options in (
        (64, 8, "softmax", {"renormalize": False}),
        (128, 4, "topk_softmax", {"renormalize": False}),
        (256, 8, "sigmoid", {"renormalize": True, "correction_bias_E": empty(256, dtype=torch.float32), **grouped}),
    ):
        load = empty(num_experts, dtype=torch.int64)
        logits, num_real = empty(64, num_experts), empty(1, dtype=torch.int64)
        for padding in (None, num_real):
            topk_routing(
                logits,
                top_k=top_k,
                scoring=scoring,
                load_E=load,
                num_real_tokens_1=padding,
                **options,
                tuning=tuning,
            )


def launch_sampling(tuning: Tuning, _: int) -> None:
    from moeserve_kernels.sampling.triton import sample

    numbers = dict.fromkeys(("temperature_R", "top_p_R", "min_p_R"), empty(64, dtype=torch.float32))
    integers = dict.fromkeys(("top_k_R", "seed_R", "position_R"), empty(64, dtype=torch.int64))
    sample(empty(64, 151936, dtype=torch.float32), **numbers, **integers, tuning=tuning)


def launch_moe_align(tuning: Tuning, _: int) -> None:
    from moeserve_kernels.moe_align.triton import sort_rows

    sort_rows(empty(512, dtype=torch.int64), 128, tile_rows=64, tuning=tuning)


def launch_fused_moe(tuning: Tuning, capability: int) -> None:
    """halves with the biases and the clamped activation of gpt-oss, which need most registers."""
    from moeserve_kernels.fused_moe.triton import fused_moe

    hidden_size, width, num_experts = 2048, 1024, 8
    weights = {
        torch.bfloat16: {
            "gate_up_bias_p2F": empty(num_experts, 2 * width),
            "down_bias_pD": empty(num_experts, hidden_size),
            "activation": "swiglu_clamped",
        },
        torch.int8: {"gate_up_scale": empty(num_experts, 2 * width), "down_scale": empty(num_experts, hidden_size)},
        torch.float8_e4m3fn: {
            "gate_up_scale": empty(num_experts, 16, 16, dtype=torch.float32),
            "down_scale": empty(num_experts, 16, 8, dtype=torch.float32),
        },
        torch.float32: {},
    }
    if capability < 89:
        del weights[torch.float8_e4m3fn]
    for dtype, options in weights.items():
        for num_tokens in (1, 64, 256):
            hidden = empty(num_tokens, hidden_size, dtype=torch.float32 if dtype == torch.float32 else torch.bfloat16)
            routed = empty(num_tokens, 8, dtype=torch.float32), empty(num_tokens, 8, dtype=torch.int64)
            gate_up = empty(num_experts, 2 * width, hidden_size, dtype=dtype)
            fused_moe(
                hidden, *routed, gate_up, empty(num_experts, hidden_size, width, dtype=dtype), **options, tuning=tuning
            )


def launch_paged_attention(tuning: Tuning, capability: int) -> None:
    """Heads of 128 (with a window and sinks as in gpt-oss, and narrow), of 256, and latents; float32 latents."""
    window = {"sliding_window": 128, "sinks_H": empty(32)}
    for dtype in cache_dtypes(capability):
        options = window if dtype == torch.bfloat16 else {}
        attend(tuning, empty(32, 32, 128), empty(100, 16, 8, 128, dtype=dtype), 128, options)
        attend(tuning, empty(32, 16, 256), empty(100, 16, 8, 256, dtype=dtype), 256, {})
        attend(tuning, empty(32, 16, 576), empty(100, 16, 1, 576, dtype=dtype), 512, {})
    wide = {"dtype": torch.float32}
    attend(tuning, empty(32, 16, 576, **wide), empty(100, 16, 1, 576, **wide), 512, {})


def attend(tuning: Tuning, q: torch.Tensor, key_cache: torch.Tensor, value_width: int, options: dict[str, Any]) -> None:
    """The launches of four prefills, and of decodes. Values of another width than the keys are a view of them."""
    from moeserve_kernels.paged_attention.triton import paged_attention

    is_latent = value_width < key_cache.shape[3]
    value_cache = key_cache[..., :value_width] if is_latent else torch.empty_like(key_cache)
    is_narrow = key_cache.dtype.itemsize == 1
    scale = empty(*key_cache.shape[:3], dtype=torch.float32) if is_narrow else None
    for max_query_len, num_requests in ((8, 4), (1, 32)):
        paged_attention(
            q,
            key_cache,
            value_cache,
            query_start_loc=empty(num_requests + 1, dtype=torch.int64),
            seq_lens_R=empty(num_requests, dtype=torch.int64),
            block_tables_RB=empty(num_requests, 64, dtype=torch.int64),
            max_query_len=max_query_len,
            max_seq_len=1024,
            softmax_scale=0.1,
            key_scale_NSG=scale,
            value_scale_NSG=scale,
            **options,
            tuning=tuning,
        )


def cache_dtypes(capability: int) -> tuple[torch.dtype, torch.dtype]:
    """float8 begins with compute capability 8.9; int8 takes about as many registers."""
    return torch.bfloat16, torch.float8_e4m3fn if capability >= 89 else torch.int8


LAUNCHES = {
    name.removeprefix("launch_"): function for name, function in list(globals().items()) if name.startswith("launch_")
}


@pytest.mark.parametrize("capability", MAX_SHARED_BYTES)
@pytest.mark.parametrize("op", LAUNCHES)
def test_tuned_configurations(op: str, capability: int, compile_launches: Callable[..., list[Compiled]]) -> None:
    tuning = UsedClasses(load_tuning(op, f"sm_{capability}"))
    compiled = compile_launches(partial(LAUNCHES[op], tuning, capability), capability)
    assert compiled
    assert tuning.used == set(tuning), "a class that no launch of this test uses"
    for made in compiled:
        assert (made.stack_bytes, made.local_bytes) == (0, 0), f"{made} spills registers"
        assert made.shared_bytes <= MAX_SHARED_BYTES[capability], f"{made} takes {made.shared_bytes} bytes"
        if _must_use_tensor_cores(made):
            assert MATRIX_INSTRUCTION[capability] in made.ptx, f"{made} lacks {MATRIX_INSTRUCTION[capability]}"


def _must_use_tensor_cores(made: Compiled) -> bool:
    """Products of halves; attention where a tile has the rows that the newer instructions ask for."""
    if made.kernel == "grouped_gemm_kernel":
        return made.constants["BLOCK_K"] >= 64
    return made.kernel == "prefill_kernel" and made.constants["BLOCK_M"] >= 64


def test_every_op_with_a_table_is_compiled() -> None:
    import moeserve_kernels

    tables = Path(moeserve_kernels.__path__[0]).glob("*/tuned.json")
    assert {path.parent.name for path in tables} == set(LAUNCHES)
