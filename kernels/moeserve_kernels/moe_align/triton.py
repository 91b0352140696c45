"""Stable counting sort of routed rows by expert on GPUs: no atomics, no host, shapes that depend on shapes alone.

Chunks of rows are counted, the counts of each expert summed over the chunks before, and every row put behind the rows
of smaller experts, of chunks before, and of its own chunk before. The rows of nobody here (-1) are an expert more.
"""
# mypy: disable-error-code="untyped-decorator"
# ruff: noqa: PLR0917

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moeserve_kernels.tuning import Tuning, tuning_for

_CHUNK = 128
"""Rows a program sorts, by comparing every pair of them."""
_BLOCK_C = 64
_BLOCK_E = 16
_BLOCK_B = 64


@triton.jit
def _load_bins(expert_ids: tl.tensor, rows: tl.tensor, num_rows: tl.tensor, num_experts: tl.tensor) -> tl.tensor:
    expert_ids = tl.load(expert_ids + rows, mask=rows < num_rows, other=0).to(tl.int32)
    return tl.where(expert_ids < 0, num_experts, expert_ids)


@triton.jit
def _count_kernel(
    expert_ids: tl.tensor,
    chunk_counts: tl.tensor,
    num_rows: tl.tensor,
    num_experts: tl.tensor,
    CHUNK: tl.constexpr,
    BINS: tl.constexpr,
) -> None:
    chunk = tl.program_id(0)
    rows = chunk * CHUNK + tl.arange(0, CHUNK)
    bins = _load_bins(expert_ids, rows, num_rows, num_experts)
    tl.store(chunk_counts + chunk * BINS + tl.arange(0, BINS), tl.histogram(bins, BINS, mask=rows < num_rows))


@triton.jit
def _sum_chunks_kernel(
    chunk_counts: tl.tensor,
    counts: tl.tensor,
    num_chunks: tl.tensor,
    BINS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_E: tl.constexpr,
) -> None:
    """Counts of chunks become counts of the chunks before, and their sum the count of the expert."""
    bins = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    before = tl.zeros((BLOCK_E,), tl.int32)
    for first in range(0, num_chunks, BLOCK_C):
        chunks = first + tl.arange(0, BLOCK_C)
        offsets = chunks[:, None] * BINS + bins[None, :]
        is_chunk = (chunks < num_chunks)[:, None]
        here = tl.load(chunk_counts + offsets, mask=is_chunk, other=0)
        tl.store(chunk_counts + offsets, before[None, :] + tl.cumsum(here, axis=0) - here, mask=is_chunk)
        before += tl.sum(here, axis=0)
    tl.store(counts + bins, before)


@triton.jit
def _place_kernel(
    expert_ids: tl.tensor,
    counts_before: tl.tensor,
    counts: tl.tensor,
    order: tl.tensor,
    tiles: tl.tensor,
    num_rows: tl.tensor,
    num_experts: tl.tensor,
    num_chunks: tl.tensor,
    max_tiles: tl.tensor,
    TILE_ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK_B: tl.constexpr,
) -> None:
    """The first programs place one chunk each; the others cut the sorted rows of each expert into tiles."""
    program = tl.program_id(0)
    bins = tl.arange(0, BINS)
    count = tl.load(counts + bins)
    start = tl.cumsum(count, axis=0) - count
    if program < num_chunks:
        places = tl.arange(0, CHUNK)
        rows = program * CHUNK + places
        row_bins = _load_bins(expert_ids, rows, num_rows, num_experts)
        is_before = (row_bins[None, :] == row_bins[:, None]) & (places[None, :] < places[:, None])
        rank = tl.sum(is_before.to(tl.int32), axis=1) + tl.load(counts_before + program * BINS + row_bins)
        slot = tl.gather(start, row_bins, axis=0) + rank
        tl.store(order + slot, rows.to(order.dtype.element_ty), mask=rows < num_rows)
    else:
        tile_ids = (program - num_chunks) * BLOCK_B + tl.arange(0, BLOCK_B)
        num_tiles = tl.where(bins < num_experts, (count + TILE_ROWS - 1) // TILE_ROWS, 0)
        last_tile = tl.cumsum(num_tiles, axis=0)
        expert = tl.sum((last_tile[None, :] <= tile_ids[:, None]).to(tl.int32), axis=1)
        is_used = expert < num_experts
        known = tl.where(is_used, expert, 0)
        done = (tile_ids - tl.gather(last_tile - num_tiles, known, axis=0)) * TILE_ROWS
        num_here = tl.minimum(tl.gather(count, known, axis=0) - done, TILE_ROWS)
        is_tile = tile_ids < max_tiles
        tl.store(tiles + tile_ids * 3, tl.where(is_used, expert, -1), mask=is_tile)
        tl.store(tiles + tile_ids * 3 + 1, tl.gather(start, known, axis=0) + done, mask=is_tile)
        tl.store(tiles + tile_ids * 3 + 2, num_here, mask=is_tile)


@dataclass(frozen=True, slots=True, kw_only=True)
class SortedRows:
    """Rows by expert, and tiles of at most `tile_rows` rows of one expert."""

    order_R: torch.Tensor
    counts_E: torch.Tensor
    tiles_B3: torch.Tensor
    """int32: (expert, first place in order_R, number of rows) of each tile; unused tiles have expert -1."""


def sort_rows(
    expert_ids_R: torch.Tensor,
    num_experts: int,
    *,
    tile_rows: int,
    dtype: torch.dtype = torch.int32,
    tuning: Tuning | None = None,
) -> SortedRows:
    """Sort, and cut into tiles; the number of tiles is the largest one that so many rows can need."""
    config = (tuning or tuning_for("moe_align", expert_ids_R.device))["any"]
    num_rows, device = len(expert_ids_R), expert_ids_R.device
    num_chunks = triton.cdiv(num_rows, _CHUNK)
    bins = triton.next_power_of_2(max(num_experts + 1, _BLOCK_E))
    max_tiles = min(num_rows, num_rows // tile_rows + num_experts)
    order = torch.empty(num_rows, dtype=dtype, device=device)
    counts = torch.zeros(bins, dtype=torch.int32, device=device)
    tiles = torch.empty(max_tiles, 3, dtype=torch.int32, device=device)
    if num_rows > 0:
        chunk_counts = torch.empty(num_chunks, bins, dtype=torch.int32, device=device)
        sizes = {"CHUNK": _CHUNK, "BINS": bins}
        _count_kernel[(num_chunks,)](expert_ids_R, chunk_counts, num_rows, num_experts, **sizes, **config)
        _sum_chunks_kernel[(bins // _BLOCK_E,)](
            chunk_counts, counts, num_chunks, BINS=bins, BLOCK_C=_BLOCK_C, BLOCK_E=_BLOCK_E, **config
        )
        _place_kernel[(num_chunks + triton.cdiv(max_tiles, _BLOCK_B),)](
            expert_ids_R,
            chunk_counts,
            counts,
            order,
            tiles,
            num_rows,
            num_experts,
            num_chunks,
            max_tiles,
            TILE_ROWS=tile_rows,
            BLOCK_B=_BLOCK_B,
            **sizes,
            **config,
        )
    return SortedRows(order_R=order, counts_E=counts[:num_experts], tiles_B3=tiles)


def moe_align(
    expert_ids_R: torch.Tensor, num_experts: int, *, tuning: Tuning | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the op."""
    num_rows = max(len(expert_ids_R), 1)
    rows = sort_rows(expert_ids_R.contiguous(), num_experts, tile_rows=num_rows, dtype=torch.int64, tuning=tuning)
    return rows.order_R, rows.counts_E.long()
