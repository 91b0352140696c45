"""What the tuner tries: for every shape class of every op a launch that reaches it, and configurations to compare."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch

from moeserve_kernels.fused_moe.triton import fused_moe
from moeserve_kernels.kv_cache_write.triton import kv_cache_write
from moeserve_kernels.linear.quantize import quantize_weight
from moeserve_kernels.moe_align.triton import sort_rows
from moeserve_kernels.paged_attention.triton import paged_attention
from moeserve_kernels.rms_norm.triton import rms_norm
from moeserve_kernels.rotary.triton import rotary
from moeserve_kernels.sampling.triton import sample
from moeserve_kernels.silu_and_mul.triton import silu_and_mul
from moeserve_kernels.topk_routing.triton import topk_routing
from moeserve_kernels.tuning import Config, Tuning

Table = dict[str, Config]

HIDDEN_SIZE, WIDTH, NUM_EXPERTS, TOP_K = 2048, 1024, 64, 8
SCALE_BLOCK = 128
TOKENS_OF_PHASE = {"decode": 32, "mixed": 256, "prefill": 4096}
ROWS_OF_PHASE = {"decode": (16,), "mixed": (32, 64), "prefill": (64, 128)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tunable:
    """One class of one op."""

    op: str
    shape_class: str
    candidates: tuple[Config, ...]
    launch: Callable[..., object]
    """Takes a `tuning` and runs the op."""
    partner: str | None = None
    """A class that must have the same BLOCK_M, and takes it from a candidate."""

    def table_with(self, config: Config, table: Tuning) -> Table:
        """The table in which this class has the candidate."""
        changed = {**table, self.shape_class: config}
        if self.partner is not None:
            changed[self.partner] = {**table[self.partner], "BLOCK_M": config["BLOCK_M"]}
        return changed


def candidates(**choices: tuple[int, ...]) -> tuple[Config, ...]:
    """Every combination of the choices."""
    return tuple(dict(zip(choices, values, strict=True)) for values in product(*choices.values()))


def tunables(device: torch.device, *, has_float8: bool) -> Iterator[Tunable]:
    """In an order in which a class comes before its partner."""
    yield from _elementwise(device)
    yield from _routing_and_sampling(device)
    weights = ["half", "int8", *(["float8"] if has_float8 else []), "float32"]
    for name in weights:
        yield from _fused_moe(name, device)
    hidden = _randn(4096, HIDDEN_SIZE, device=device)
    routing = _routing(len(hidden), device)
    launch = partial(fused_moe, hidden, *routing, *_weights("half", device)[0])
    yield Tunable(op="fused_moe", shape_class="combine", launch=launch, candidates=candidates(
        BLOCK_D=(256, 512, 1024, 2048), num_warps=(1, 2, 4, 8)
    ))  # fmt: skip
    yield from _paged_attention(device)


def _randn(*shape: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device=device).to(dtype)


def _elementwise(device: torch.device) -> Iterator[Tunable]:
    x, weight, heads = (_randn(*shape, device=device) for shape in ((1024, 4096), (4096,), (1024, 32, 128)))
    angles = _randn(1024, 64, device=device, dtype=torch.float32)
    slots = torch.arange(1024, device=device)
    cache = torch.empty(64, 16, 8, 128, dtype=torch.bfloat16, device=device)
    warps = (1, 2, 4, 8)
    launches: list[tuple[str, str, Callable[..., object], tuple[Config, ...]]] = [
        ("rms_norm", "hidden", partial(rms_norm, x, weight, 1e-6, x), candidates(BLOCK_R=(1, 2), num_warps=(4, 8, 16))),
        (
            *("rms_norm", "heads", partial(rms_norm, heads, weight[:128], 1e-6)),
            candidates(BLOCK_R=(4, 8, 16, 32), num_warps=warps),
        ),
        (
            "rotary",
            "any",
            partial(rotary, heads, angles, angles, False),
            candidates(BLOCK_H=(4, 8, 16), num_warps=warps),
        ),
        ("silu_and_mul", "any", partial(silu_and_mul, x), candidates(BLOCK_F=(512, 1024, 2048), num_warps=warps)),
        ("kv_cache_write", "any", partial(kv_cache_write, heads[:, :8], cache, slots), candidates(num_warps=warps)),
    ]
    for op, shape_class, launch, choices in launches:
        yield Tunable(op=op, shape_class=shape_class, launch=launch, candidates=choices)


def _routing_and_sampling(device: torch.device) -> Iterator[Tunable]:
    ids = torch.randint(NUM_EXPERTS, (4096,), device=device)
    align = partial(sort_rows, ids, NUM_EXPERTS, tile_rows=64)
    yield Tunable(op="moe_align", shape_class="any", launch=align, candidates=candidates(num_warps=(2, 4, 8)))
    logits = _randn(1024, NUM_EXPERTS, device=device)
    route = partial(topk_routing, logits, top_k=TOP_K, scoring="softmax", renormalize=True)
    choices = candidates(TILE=(256, 512, 1024, 2048), num_warps=(1, 2, 4))
    yield Tunable(op="topk_routing", shape_class="any", launch=route, candidates=choices)
    ones = torch.ones(64, device=device)
    whole = ones.long()
    draw = partial(
        sample,
        _randn(64, 128 << 10, device=device, dtype=torch.float32),
        temperature_R=ones,
        top_k_R=50 * whole,
        top_p_R=0.9 * ones,
        min_p_R=0 * ones,
        seed_R=whole,
        position_R=whole,
    )
    choices = candidates(BLOCK_V=(2048, 4096, 8192), BLOCK_SEARCH=(512, 1024, 2048), num_warps=(8, 16))
    yield Tunable(op="sampling", shape_class="any", launch=draw, candidates=choices)


def _routing(num_tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    weights, ids = torch.rand(num_tokens, NUM_EXPERTS, device=device).topk(TOP_K)
    return weights, ids


def _weights(name: str, device: torch.device) -> tuple[tuple[torch.Tensor, torch.Tensor], dict[str, torch.Tensor]]:
    """(both weights, their scales) of random experts."""
    shapes = ((NUM_EXPERTS, 2 * WIDTH, HIDDEN_SIZE), (NUM_EXPERTS, HIDDEN_SIZE, WIDTH))
    gate_up, down = (_randn(*shape, device=device) / shape[2] ** 0.5 for shape in shapes)
    if name == "int8":
        quantized = [quantize_weight(weight.flatten(0, 1)) for weight in (gate_up, down)]
        values = [narrow.view(shape) for (narrow, _), shape in zip(quantized, shapes, strict=True)]
        scales = [scale.view(shape[:2]) for (_, scale), shape in zip(quantized, shapes, strict=True)]
        return (values[0], values[1]), {"gate_up_scale": scales[0], "down_scale": scales[1]}
    if name == "float8":
        blocks = [(shape[0], shape[1] // SCALE_BLOCK, shape[2] // SCALE_BLOCK) for shape in shapes]
        scales = [torch.ones(*block, device=device) for block in blocks]
        dtype = torch.float8_e4m3fn
        return (gate_up.to(dtype), down.to(dtype)), {"gate_up_scale": scales[0], "down_scale": scales[1]}
    return ((gate_up.float(), down.float()) if name == "float32" else (gate_up, down)), {}


def _fused_moe(name: str, device: torch.device) -> Iterator[Tunable]:
    weights, scales = _weights(name, device)
    phases = {"half": ("decode", "mixed", "prefill"), "float32": ("",)}.get(name, ("decode", "prefill"))
    for phase in phases:
        shape = f"{name}/{phase}" if phase else name
        num_tokens = TOKENS_OF_PHASE.get(phase, 64)
        hidden = _randn(num_tokens, HIDDEN_SIZE, device=device, dtype=weights[0].dtype if not phase else torch.bfloat16)
        routing = _routing(num_tokens, device)
        launch: Callable[..., object] = partial(fused_moe, hidden, *routing, *weights, **scales)  # type: ignore[arg-type]
        sizes: dict[str, tuple[int, ...]] = {
            "BLOCK_N": (64, 128, 256) if phase else (32, 64),
            "BLOCK_K": {"float8": (SCALE_BLOCK,), "float32": (32,)}.get(name, (64, 128)),
            "GROUP_M": (8,),
            "num_warps": (4, 8),
            "num_stages": (2, 3, 4) if phase else (2,),
        }
        rows = candidates(BLOCK_M=ROWS_OF_PHASE.get(phase, (16, 32)), **sizes)
        gate_up, down = f"gate_up/{shape}", f"down/{shape}"
        yield Tunable(op="fused_moe", shape_class=gate_up, launch=launch, candidates=rows, partner=down)
        yield Tunable(op="fused_moe", shape_class=down, launch=launch, candidates=candidates(**sizes))


def _paged_attention(device: torch.device) -> Iterator[Tunable]:
    kinds: dict[str, tuple[torch.dtype, int, int, int, int]] = {
        "half": (torch.bfloat16, 32, 8, 128, 128),
        "half/wide": (torch.bfloat16, 16, 4, 256, 256),
        "half/latent": (torch.bfloat16, 16, 1, 576, 512),
        "float32": (torch.float32, 32, 8, 128, 128),
    }
    for name, (dtype, num_heads, num_kv_heads, width, value_width) in kinds.items():
        for phase, num_requests, query_len in (("prefill", 4, 2048), ("decode", 64, 1)):
            key_cache = _randn(num_requests * 128, 16, num_kv_heads, width, device=device, dtype=dtype)
            is_latent = value_width < width
            options: dict[str, Any] = {
                "query_start_loc": torch.arange(num_requests + 1, device=device) * query_len,
                "seq_lens_R": torch.full((num_requests,), 2048, device=device),
                "block_tables_RB": torch.randperm(num_requests * 128, device=device).view(num_requests, 128),
                "max_query_len": query_len,
                "max_seq_len": 2048,
                "softmax_scale": width**-0.5,
            }
            q = _randn(num_requests * query_len, num_heads, width, device=device, dtype=dtype)
            value_cache = key_cache[..., :value_width] if is_latent else key_cache.clone()
            launch = partial(paged_attention, q, key_cache, value_cache, **options)
            rows = (16, 32, 64, 128) if phase == "prefill" else (16, 64)
            sizes: dict[str, tuple[int, ...]] = {"BLOCK_M": rows, "BLOCK_L": (16, 32, 64, 128)}
            if phase == "decode":
                sizes["CHUNK"] = (256, 512, 1024)
            sizes |= {"num_warps": (4, 8), "num_stages": (1, 2, 3)}
            yield Tunable(
                op="paged_attention", shape_class=f"{phase}/{name}", launch=launch, candidates=candidates(**sizes)
            )
            if (phase, name) == ("decode", "half"):
                warps = candidates(num_warps=(1, 2, 4, 8))
                yield Tunable(op="paged_attention", shape_class="join", launch=launch, candidates=warps)
