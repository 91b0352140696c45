"""paged_attention: float64 on odd batches and all KV dtypes, isolation of requests, and rows that know no batch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from moeserve_kernels import native, paged_attention
from moeserve_kernels.backend import Backend
from moeserve_kernels.kv_cache_write.quantize import LARGEST, quantize
from moeserve_kernels.paged_attention.reference import paged_attention_reference

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}
"""Of the norm of the error to the norm of the output: bfloat16 rounds weights and outputs to 1 in 512."""
NARROW = [torch.int8, torch.float8_e4m3fn]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Query and sequence lengths, and the kind of heads."""

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    key_width: int = 6
    value_width: int = 6
    block_size: int = 4
    value_is_key: bool = False
    sliding_window: int | None = None
    has_sinks: bool = False

    def tensors(
        self, generator: torch.Generator, dtype: torch.dtype = torch.float32, cache_dtype: torch.dtype | None = None
    ) -> dict[str, Any]:
        """Arguments of paged_attention; block tables are scattered over a pool, of which much is nobody's and NaN."""
        needed = [-(-seq_len // self.block_size) for seq_len in self.seq_lens]
        num_blocks = sum(needed) + 3
        order = torch.randperm(num_blocks, generator=generator).tolist()
        tables = torch.zeros(len(needed), max(needed, default=0) + 1, dtype=torch.int64)
        owned = torch.zeros(num_blocks, self.block_size, dtype=torch.bool)
        for request, count in enumerate(needed):
            tables[request, :count] = torch.tensor([order.pop() for _ in range(count)])
            positions = torch.arange(self.seq_lens[request])
            owned[tables[request, positions // self.block_size], positions % self.block_size] = True

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        def cache(width: int) -> tuple[torch.Tensor, torch.Tensor | None]:
            values = randn(num_blocks, self.block_size, self.num_kv_heads, width).to(_wide(cache_dtype) or dtype)
            return _poison(*_narrowed(values, cache_dtype), ~owned)

        keys, key_scale = cache(self.key_width)
        values, value_scale = cache(self.value_width)
        if self.value_is_key:
            values, value_scale = keys[..., : self.value_width], key_scale
        return {
            "q_THD": randn(sum(self.query_lens), self.num_heads, self.key_width),
            "key_cache_NSGD": keys,
            "value_cache_NSGV": values,
            "query_start_loc": torch.tensor([0, *self.query_lens]).cumsum(0),
            "seq_lens_R": torch.tensor(self.seq_lens, dtype=torch.int64),
            "block_tables_RB": tables,
            "softmax_scale": 0.4,
            "sliding_window": self.sliding_window,
            "sinks_H": randn(self.num_heads) * 2 if self.has_sinks else None,
            "key_scale_NSG": key_scale,
            "value_scale_NSG": value_scale,
        }


def _wide(cache_dtype: torch.dtype | None) -> torch.dtype | None:
    return torch.float32 if cache_dtype in NARROW else cache_dtype


def _narrowed(values: torch.Tensor, cache_dtype: torch.dtype | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    return quantize(values, cache_dtype) if cache_dtype in NARROW else (values, None)


def _poison(
    values: torch.Tensor, scale: torch.Tensor | None, where_NS: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """NaN in slots that no request may read; integers have none, but their scales do."""
    if values.dtype == torch.float8_e4m3fn:
        values.view(torch.uint8)[where_NS] = 0x7F
    else:
        values[where_NS] = -128 if values.dtype == torch.int8 else torch.nan
    if scale is not None:
        scale[where_NS] = torch.nan
    return values, scale


def _run(tensors: dict[str, Any], backend: Backend) -> torch.Tensor:
    query_lens, seq_lens = tensors["query_start_loc"].diff().tolist(), tensors["seq_lens_R"].tolist()
    lengths = {"max_query_len": max(query_lens, default=0), "max_seq_len": max(seq_lens, default=0)}
    return paged_attention(**tensors, **lengths, backend=backend)


def _check(tensors: dict[str, Any], backend: Backend, tolerance: float | None = None) -> None:
    actual, expected = _run(tensors, backend), paged_attention_reference(**tensors)
    dtype = tensors["q_THD"].dtype
    assert actual.dtype == dtype
    assert actual.shape == expected.shape
    error = (actual.double() - expected).norm()
    assert error <= (tolerance or TOLERANCE[dtype]) * expected.norm()


@pytest.fixture(autouse=True)
def _poisoned_outputs() -> Iterator[None]:
    """torch fills memory that nobody has written with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


SHAPES = {
    "no_requests": Batch(query_lens=(), seq_lens=()),
    "one_token": Batch(query_lens=(1,), seq_lens=(1,)),
    "whole_prefill": Batch(query_lens=(9,), seq_lens=(9,)),
    "chunk_after_a_cached_prefix": Batch(query_lens=(3,), seq_lens=(11,)),
    "last_block_just_full": Batch(query_lens=(2, 1), seq_lens=(8, 4)),
    "decodes_around_tiles_of_keys": Batch(query_lens=(1, 1, 1, 1), seq_lens=(63, 64, 65, 129)),
    "prefills_among_decodes": Batch(query_lens=(1, 5, 1, 2), seq_lens=(6, 5, 2, 9)),
    "one_head_group": Batch(query_lens=(1, 3), seq_lens=(5, 3), num_kv_heads=1),
    "no_sharing": Batch(query_lens=(1, 3), seq_lens=(5, 3), num_kv_heads=4),
    "seven_heads_a_group": Batch(query_lens=(1, 5), seq_lens=(5, 7), num_heads=14),
    "prime_sizes": Batch(query_lens=(1, 7), seq_lens=(31, 13), key_width=17, value_width=13, block_size=5),
    "whole_vectors": Batch(query_lens=(1, 3), seq_lens=(17, 16), key_width=64, value_width=32, block_size=16),
    "latents": Batch(
        query_lens=(1, 4, 1), seq_lens=(66, 6, 9), num_kv_heads=1, key_width=22, value_width=16, value_is_key=True
    ),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window_1": {"sliding_window": 1},
    "window_5": {"sliding_window": 5},
    "window_and_sinks": {"sliding_window": 6, "has_sinks": True},
    "sinks": {"has_sinks": True},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("option", OPTIONS)
def test_against_reference(shape: str, option: str, backend: Backend, generator: torch.Generator) -> None:
    _check(replace(SHAPES[shape], **OPTIONS[option]).tensors(generator), backend)


@pytest.mark.parametrize("shape", ["prefills_among_decodes", "prime_sizes", "whole_vectors", "latents"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("cache_dtype", [*TOLERANCE, *NARROW])
def test_dtypes(
    shape: str, dtype: torch.dtype, cache_dtype: torch.dtype, backend: Backend, generator: torch.Generator
) -> None:
    """Every dtype of queries with every dtype of the cache."""
    batch = replace(SHAPES[shape], sliding_window=20, has_sinks=True)
    _check(batch.tensors(generator, dtype, cache_dtype), backend)


LONG = {
    "decodes_of_one_to_three_chunks": Batch(query_lens=(1,) * 4, seq_lens=(1023, 1024, 1025, 2100), num_heads=2),
    "a_prefill_over_the_edge_of_a_chunk": Batch(query_lens=(40,), seq_lens=(1040,), num_heads=2, num_kv_heads=1),
    "a_window_over_the_edge_of_a_chunk": Batch(
        query_lens=(1, 5), seq_lens=(1100, 1028), num_heads=2, num_kv_heads=1, sliding_window=80, has_sinks=True
    ),
    "latents": Batch(
        query_lens=(1, 2), seq_lens=(1030, 1025), num_kv_heads=1, key_width=22, value_width=16, value_is_key=True
    ),
    "many_queries": Batch(query_lens=(131,), seq_lens=(133,), num_heads=2, num_kv_heads=1),
}


@pytest.mark.parametrize("shape", LONG)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_contexts(shape: str, dtype: torch.dtype, backend: Backend, generator: torch.Generator) -> None:
    _check(LONG[shape].tensors(generator, dtype), backend, 2 * TOLERANCE[dtype])


def test_many_decodes(backend: Backend, generator: torch.Generator) -> None:
    """More than are computed as one group, head by head."""
    seq_lens = tuple(torch.randint(1, 40, (67,), generator=generator).tolist())
    _check(Batch(query_lens=(1,) * 67, seq_lens=seq_lens).tensors(generator), backend)


def test_queries_may_be_a_view(backend: Backend, generator: torch.Generator) -> None:
    """Heads of a merged projection."""
    tensors = SHAPES["prefills_among_decodes"].tensors(generator)
    merged = torch.full((9, 7, 6), torch.nan)
    merged[:, 1:5] = tensors["q_THD"]
    assert torch.equal(_run({**tensors, "q_THD": merged[:, 1:5]}, backend), _run(tensors, backend))


def test_a_value_of_infinity_outside_the_window_is_not_seen(backend: Backend, generator: torch.Generator) -> None:
    """A tile of keys has places that one of its queries sees and another does not."""
    tensors = Batch(query_lens=(1,), seq_lens=(30,), sliding_window=4).tensors(generator)
    block = tensors["block_tables_RB"][0, 25 // 4]
    tensors["key_cache_NSGD"][block, 25 % 4] = tensors["value_cache_NSGV"][block, 25 % 4] = torch.inf
    assert torch.isfinite(_run(tensors, backend)).all()


INVARIANCE = {
    "plain": Batch(query_lens=(1, 7, 1, 2, 70), seq_lens=(33, 19, 140, 9, 90), num_heads=6),
    "window_and_sinks": Batch(
        query_lens=(1, 7, 1, 70), seq_lens=(33, 19, 140, 90), sliding_window=21, has_sinks=True, num_kv_heads=1
    ),
    "latents": Batch(
        query_lens=(1, 7, 1, 40), seq_lens=(33, 19, 140, 90), num_kv_heads=1, key_width=22, value_width=16,
        value_is_key=True,
    ),
    "many_short_and_a_long_one": Batch(query_lens=(*(1,) * 40, 3), seq_lens=(*range(1, 40), 1100, 1030)),
}  # fmt: skip


def _of_request(tensors: dict[str, Any], request: int, first: int, stop: int, seq_len: int) -> dict[str, Any]:
    """One request alone: some of its queries, the last of which is its token seq_len - 1."""
    start = int(tensors["query_start_loc"][request])
    return {
        **tensors,
        "q_THD": tensors["q_THD"][start + first : start + stop],
        "query_start_loc": torch.tensor([0, stop - first]),
        "seq_lens_R": torch.tensor([seq_len]),
        "block_tables_RB": tensors["block_tables_RB"][request : request + 1],
    }


@pytest.mark.parametrize("shape", INVARIANCE)
@pytest.mark.parametrize(
    ("dtype", "cache_dtype"), [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, torch.int8)]
)
def test_a_row_knows_no_batch(
    shape: str, dtype: torch.dtype, cache_dtype: torch.dtype | None, generator: torch.Generator
) -> None:
    """To the bit, natively: alone as in the batch, in chunks of any size as whole, decoded as in a prefill.

    In plain torch it cannot hold: its matrix products choose their order of summation by shape.
    """
    if not native.is_loaded():
        pytest.skip("no native kernels")
    batch = INVARIANCE[shape]
    tensors = batch.tensors(generator, dtype, cache_dtype)
    together = _run(tensors, "cpu")
    for request, (query_len, seq_len) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
        start = int(tensors["query_start_loc"][request])
        for size in {query_len, -(-query_len // 3), 1}:
            for first in range(0, query_len, size):
                stop = min(first + size, query_len)
                alone = _of_request(tensors, request, first, stop, seq_len - query_len + stop)
                assert torch.equal(_run(alone, "cpu"), together[start + first : start + stop])


def test_threads_change_no_bit(generator: torch.Generator) -> None:
    if not native.is_loaded():
        pytest.skip("no native kernels")
    tensors = INVARIANCE["many_short_and_a_long_one"].tensors(generator)
    expected = _run(tensors, "cpu")
    torch.set_num_threads(3)
    try:
        assert torch.equal(_run(tensors, "cpu"), expected)
    finally:
        torch.set_num_threads(1)


def test_chunks_are_about_the_whole_in_torch(generator: torch.Generator) -> None:
    whole = Batch(query_lens=(23,), seq_lens=(23,)).tensors(generator)
    expected = _run(whole, "torch")
    for first, stop in ((0, 11), (11, 12), (12, 23)):
        torch.testing.assert_close(_run(_of_request(whole, 0, first, stop, stop), "torch"), expected[first:stop])


def test_narrow_dtypes_are_those_with_a_scale() -> None:
    assert set(NARROW) == set(LARGEST)
