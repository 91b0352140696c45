"""paged_attention: oracle on odd batches, and isolation of requests from each other."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from moeserve_kernels import paged_attention
from moeserve_kernels.paged_attention.op import MAX_POSITIONS_PER_GROUP, MAX_QUERIES_PER_TILE, MIN_GROUP_LENGTH_BITS
from moeserve_kernels.paged_attention.reference import paged_attention_reference

BLOCK_SIZE = 4


@dataclass(frozen=True)
class Batch:
    """Query and sequence lengths, and the kind of heads."""

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    key_width: int = 6
    value_width: int = 6
    options: dict[str, Any] = field(default_factory=dict)


def _tensors(batch: Batch, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Arguments of paged_attention; block tables are scattered over a pool with spare blocks."""
    generator = torch.Generator().manual_seed(1)
    needed = [-(-seq_len // BLOCK_SIZE) for seq_len in batch.seq_lens]
    num_blocks = sum(needed) + 3
    order = torch.randperm(num_blocks, generator=generator).tolist()
    tables = torch.zeros(len(needed), max(needed, default=0) + 1, dtype=torch.int64)
    for request, count in enumerate(needed):
        tables[request, :count] = torch.tensor([order.pop() for _ in range(count)])

    def cache(width: int) -> torch.Tensor:
        return torch.randn(num_blocks, BLOCK_SIZE, batch.num_kv_heads, width, generator=generator).to(dtype)

    q = torch.randn(sum(batch.query_lens), batch.num_heads, batch.key_width, generator=generator).to(dtype)
    return {
        "q_THD": q,
        "key_cache_NSGD": cache(batch.key_width),
        "value_cache_NSGV": cache(batch.value_width),
        "query_lens": batch.query_lens,
        "seq_lens": batch.seq_lens,
        "block_tables_RB": tables,
        "softmax_scale": 0.4,
        **batch.options,
    }


SHAPES = {
    "no_requests": Batch((), ()),
    "one_token": Batch((1,), (1,)),
    "whole_prefill": Batch((9,), (9,)),
    "chunk_after_a_cached_prefix": Batch((3,), (11,)),
    "last_block_just_full": Batch((2, 1), (8, 4)),
    "decodes_of_mixed_length": Batch((1, 1, 1, 1), (1, 7, 140, 33)),
    "prefills_among_decodes": Batch((1, 5, 1, 2), (6, 5, 2, 9)),
    "one_head_group": Batch((1, 3), (5, 3), num_kv_heads=1),
    "no_sharing": Batch((1, 3), (5, 3), num_kv_heads=4),
    "narrow_values": Batch((1, 4), (6, 6), num_kv_heads=1, value_width=3),
}
OPTIONS = {
    "plain": {},
    "window_1": {"sliding_window": 1},
    "window_5": {"sliding_window": 5},
    "sinks": {"sinks_H": torch.tensor([3.0, -2.0, 0.0, 1.0])},
    "window_and_sinks": {"sliding_window": 6, "sinks_H": torch.tensor([3.0, -2.0, 0.0, 1.0])},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("option", OPTIONS)
def test_against_reference(shape: str, option: str) -> None:
    tensors = _tensors(replace(SHAPES[shape], options=OPTIONS[option]))
    torch.testing.assert_close(
        paged_attention(**tensors).double(), paged_attention_reference(**tensors), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("option", ["plain", "window_and_sinks"])
def test_prefill_of_several_tiles(option: str) -> None:
    num_queries = MAX_QUERIES_PER_TILE + 3
    options = {name: x[:2] if name == "sinks_H" else x for name, x in OPTIONS[option].items()}
    tensors = _tensors(Batch((num_queries,), (num_queries + 2,), num_heads=2, num_kv_heads=1, options=options))
    torch.testing.assert_close(
        paged_attention(**tensors).double(), paged_attention_reference(**tensors), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves(dtype: torch.dtype) -> None:
    tensors = _tensors(SHAPES["prefills_among_decodes"], dtype)
    actual = paged_attention(**tensors)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), paged_attention_reference(**tensors), rtol=2e-2, atol=2e-2)


def test_values_may_be_a_view_of_the_keys() -> None:
    """Latents: the value is the first part of the key."""
    tensors = _tensors(Batch((1, 4, 1), (6, 6, 9), num_kv_heads=1))
    tensors["value_cache_NSGV"] = tensors["key_cache_NSGD"][..., :4]
    torch.testing.assert_close(
        paged_attention(**tensors).double(), paged_attention_reference(**tensors), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("window", [None, 5])
def test_requests_never_read_what_is_not_theirs(window: int | None) -> None:
    """NaN in every slot that is no request's own, block 0 (padding of the tables) and tails of last blocks included."""
    batch = Batch((1, 3, 1), (9, 6, 2), options={"sliding_window": window})
    tensors = _tensors(batch)
    expected = paged_attention(**tensors)
    owned = torch.zeros(tensors["key_cache_NSGD"].shape[:2], dtype=torch.bool)
    for request, seq_len in enumerate(batch.seq_lens):
        for position in range(seq_len):
            owned[tensors["block_tables_RB"][request, position // BLOCK_SIZE], position % BLOCK_SIZE] = True
    for name in ("key_cache_NSGD", "value_cache_NSGV"):
        tensors[name][~owned] = torch.nan
    assert torch.equal(paged_attention(**tensors), expected)


def test_decodes_of_more_positions_than_one_group_takes() -> None:
    """All requests read one cached sequence, so that the reference has little to do."""
    seq_len = 64
    one = _tensors(Batch((1,), (seq_len,)))
    count = (MAX_POSITIONS_PER_GROUP >> MIN_GROUP_LENGTH_BITS) + 3
    many = {
        **one,
        "q_THD": one["q_THD"].expand(count, -1, -1),
        "query_lens": (1,) * count,
        "seq_lens": (seq_len,) * count,
        "block_tables_RB": one["block_tables_RB"].expand(count, -1),
    }
    expected = paged_attention_reference(**one).expand(count, -1, -1)
    torch.testing.assert_close(paged_attention(**many).double(), expected, rtol=1e-5, atol=1e-5)


def test_a_chunk_is_the_end_of_the_whole_prefill() -> None:
    whole = _tensors(Batch((12,), (12,)))
    chunk = {**whole, "q_THD": whole["q_THD"][7:], "query_lens": (5,)}
    torch.testing.assert_close(paged_attention(**chunk), paged_attention(**whole)[7:])


def test_a_decode_is_the_last_row_of_the_prefill() -> None:
    whole = _tensors(Batch((12,), (12,)))
    decode = {**whole, "q_THD": whole["q_THD"][11:], "query_lens": (1,)}
    torch.testing.assert_close(paged_attention(**decode), paged_attention(**whole)[11:])
