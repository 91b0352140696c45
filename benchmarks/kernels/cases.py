"""The cases of the kernel benchmark: shapes of a small MoE model, the work each needs, and who competes."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import torch

from benchmarks.kernels import baselines
from benchmarks.kernels.timing import Call
from moeserve_kernels import (
    Quantization,
    fused_moe,
    linear,
    pack_experts,
    pack_linear,
    paged_attention,
    rms_norm,
    sample,
    silu_and_mul,
    topk_routing,
)
from moeserve_kernels.backend import Backend

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model of which one layer is measured."""

    hidden_size: int
    width: int
    num_experts: int
    top_k: int
    num_heads: int = 16
    num_kv_heads: int = 4
    head_width: int = 128
    vocab_size: int = 50304
    context: int = 1024
    """Tokens that a decode sees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One op on one shape."""

    op: str
    shape: str
    num_bytes: float
    """What must be read and written at least."""
    flops: float
    """Of products; 0 for ops that have none."""
    calls: dict[str, Call]
    """By contender: a backend, or the name of a function of torch."""


class Cases:
    """All cases of one model on one device, made one after another so that only one lies in memory."""

    def __init__(self, shape: Shape, device: torch.device, backends: Sequence[Backend]) -> None:
        self._shape = shape
        self._device = device
        self._backends = backends
        self._generator = torch.Generator(device).manual_seed(0)

    def __iter__(self) -> Iterator[Case]:
        for num_tokens in (1, 8, 64, 512):
            yield self._linear(num_tokens, None)
        yield self._linear(1, "int8")
        yield from self._fused_moe((1, 8, 32, 64, 2048), None)
        yield from self._fused_moe((1, 8), "int8")
        yield self._paged_attention("decode", [1] * 8, self._shape.context)
        yield self._paged_attention("prefill", [self._shape.context], self._shape.context)
        for num_tokens in (8, 512):
            yield self._rms_norm(num_tokens)
            yield self._silu_and_mul(num_tokens)
            yield self._topk_routing(num_tokens)
        yield self._sampling("no filter", top_k=0, top_p=1.0)
        yield self._sampling("top_k 50, top_p 0.9", top_k=50, top_p=0.9)

    def _randn(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator, device=self._device).to(dtype)

    def _linear(self, num_tokens: int, quantization: Quantization | None) -> Case:
        """Eight layers in turn, so that no cache keeps a weight from one call to the next."""
        size = self._shape.hidden_size
        x, weights = self._randn(num_tokens, size), [self._randn(2 * size, size) for _ in range(8)]
        calls: dict[str, Call] = {
            backend: _in_turn(
                linear, [(x, pack_linear(w, quantization=quantization, backend=backend)) for w in weights]
            )
            for backend in self._backends
        }
        return Case(
            op="linear" if quantization is None else f"linear {quantization}",
            shape=f"{num_tokens} x {size} x {2 * size}",
            num_bytes=2 * size * size * (2 if quantization is None else 1) + 2 * num_tokens * 3 * size,
            flops=2 * num_tokens * size * 2 * size,
            calls=calls,
        )

    def _fused_moe(self, tokens: Sequence[int], quantization: Quantization | None) -> Iterator[Case]:
        """Eight routings in turn, so that a few tokens do not find their experts in a cache."""
        shape = self._shape
        gate_up = self._randn(shape.num_experts, 2 * shape.width, shape.hidden_size) / shape.hidden_size**0.5
        down = self._randn(shape.num_experts, shape.hidden_size, shape.width) / shape.width**0.5
        experts = {b: pack_experts(gate_up, down, quantization=quantization, backend=b) for b in self._backends}
        expert_bytes = 3 * shape.hidden_size * shape.width * (2 if quantization is None else 1)
        for num_tokens in tokens:
            routings = [self._routing(num_tokens) for _ in range(8)]
            calls: dict[str, Call] = {
                b: _in_turn(fused_moe, [(*routing, experts[b]) for routing in routings]) for b in self._backends
            }
            if quantization is None:
                whole = [(*routing, gate_up, down) for routing in routings]
                calls["grouped_mm"] = _in_turn(baselines.grouped_mm_moe, whole)
            yield Case(
                op="fused_moe" if quantization is None else f"fused_moe {quantization}",
                shape=f"{num_tokens} tokens, top {shape.top_k} of {shape.num_experts}",
                num_bytes=statistics.mean(len(ids.unique()) for _, _, ids in routings) * expert_bytes
                + 2 * 2 * num_tokens * shape.hidden_size,
                flops=2 * num_tokens * shape.top_k * 3 * shape.hidden_size * shape.width,
                calls=calls,
            )

    def _routing(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(hidden states, weights, expert ids)"""
        scores = self._randn(num_tokens, self._shape.num_experts, dtype=torch.float32)
        weights, ids = scores.softmax(dim=-1).topk(self._shape.top_k)
        return self._randn(num_tokens, self._shape.hidden_size), weights, ids

    def _paged_attention(self, phase: str, query_lens: list[int], context: int) -> Case:
        shape, num_requests = self._shape, len(query_lens)
        blocks = context // BLOCK_SIZE
        cache = (num_requests * blocks, BLOCK_SIZE, shape.num_kv_heads, shape.head_width)
        key_cache, value_cache = self._randn(*cache), self._randn(*cache)
        q = self._randn(sum(query_lens), shape.num_heads, shape.head_width)
        tables = torch.randperm(num_requests * blocks, generator=self._generator, device=self._device)
        options: dict[str, Any] = {
            "query_start_loc": torch.tensor([0, *query_lens], device=self._device).cumsum(0),
            "seq_lens_R": torch.full((num_requests,), context, device=self._device),
            "block_tables_RB": tables.view(num_requests, blocks),
            "max_query_len": max(query_lens),
            "max_seq_len": context,
            "softmax_scale": shape.head_width**-0.5,
        }
        calls: dict[str, Call] = {
            backend: partial(paged_attention, q, key_cache, value_cache, **options, backend=backend)
            for backend in self._backends
        }
        calls["sdpa"] = baselines.sdpa(q, key_cache, value_cache, options["block_tables_RB"])
        seen = context if phase == "decode" else (context + 1) / 2
        return Case(
            op=f"paged_attention {phase}",
            shape=f"{num_requests} requests of {context}, {shape.num_heads}/{shape.num_kv_heads} heads",
            num_bytes=2 * (2 * key_cache.numel() + 2 * q.numel()),
            flops=4 * len(q) * seen * shape.num_heads * shape.head_width,
            calls=calls,
        )

    def _rms_norm(self, num_tokens: int) -> Case:
        x, residual = self._randn(num_tokens, self._shape.hidden_size), self._randn(num_tokens, self._shape.hidden_size)
        weight = self._randn(self._shape.hidden_size)
        return Case(
            op="rms_norm",
            shape=f"{num_tokens} x {self._shape.hidden_size}, residual",
            num_bytes=2 * 4 * x.numel(),
            flops=0,
            calls={b: partial(rms_norm, x, weight, 1e-6, residual, backend=b) for b in self._backends},
        )

    def _silu_and_mul(self, num_tokens: int) -> Case:
        x = self._randn(num_tokens, 2 * self._shape.width)
        return Case(
            op="silu_and_mul",
            shape=f"{num_tokens} x {self._shape.width}",
            num_bytes=2 * 1.5 * x.numel(),
            flops=0,
            calls={b: partial(silu_and_mul, x, backend=b) for b in self._backends},
        )

    def _topk_routing(self, num_tokens: int) -> Case:
        logits = self._randn(num_tokens, self._shape.num_experts)
        load = torch.zeros(self._shape.num_experts, dtype=torch.int64, device=self._device)
        options: dict[str, Any] = {
            "top_k": self._shape.top_k, "scoring": "softmax", "renormalize": True, "load_E": load,
        }  # fmt: skip
        return Case(
            op="topk_routing",
            shape=f"{num_tokens} tokens, top {self._shape.top_k} of {self._shape.num_experts}",
            num_bytes=2 * logits.numel() + 12 * num_tokens * self._shape.top_k,
            flops=0,
            calls={b: partial(topk_routing, logits, **options, backend=b) for b in self._backends},
        )

    def _sampling(self, filters: str, *, top_k: int, top_p: float, num_rows: int = 8) -> Case:
        logits = self._randn(num_rows, self._shape.vocab_size, dtype=torch.float32) * 3
        settings = {
            "temperature_R": torch.full((num_rows,), 0.8, device=self._device),
            "top_k_R": torch.full((num_rows,), top_k, device=self._device),
            "top_p_R": torch.full((num_rows,), top_p, device=self._device),
            "min_p_R": torch.zeros(num_rows, device=self._device),
            "seed_R": torch.arange(num_rows, device=self._device),
            "position_R": torch.arange(num_rows, device=self._device),
        }
        return Case(
            op="sampling",
            shape=f"{num_rows} x {self._shape.vocab_size}, {filters}",
            num_bytes=4 * logits.numel(),
            flops=0,
            calls={b: partial(sample, logits, **settings, backend=b) for b in self._backends},
        )


def _in_turn(run: Callable[..., object], arguments: Sequence[tuple[Any, ...]]) -> Call:
    """A call that takes the next arguments each time."""
    endless = cycle(arguments)
    return lambda: run(*next(endless))
