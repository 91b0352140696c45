"""Attention of requests that bring one token: chunks of a fixed number of positions, joined in their order."""
# mypy: disable-error-code="untyped-decorator"
# ruff: noqa: PLR0917

import triton
import triton.language as tl

from moeserve_kernels.paged_attention.triton_tile import LOG2_E, attend, load_queries


@triton.jit
def decode_kernel(
    q: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    key_scale: tl.tensor,
    value_scale: tl.tensor,
    partial: tl.tensor,
    partial_state: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    block_tables: tl.tensor,
    first_request: tl.tensor,
    num_heads: tl.tensor,
    group_size: tl.tensor,
    window: tl.tensor,
    softmax_scale: tl.tensor,
    widths: tl.tensor,
    q_strides: tl.tensor,
    strides: tl.tensor,
    head_strides: tl.tensor,
    table_stride: tl.tensor,
    HAS_WINDOW: tl.constexpr,
    IS_NARROW: tl.constexpr,
    VALUE_IS_KEY: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_V: tl.constexpr,
    EXACT_D: tl.constexpr,
    EXACT_V: tl.constexpr,
) -> None:
    """partial [r, H, C, V] and partial_state [r, H, C, 2] of chunk C of the requests from first_request on."""
    place = tl.program_id(0)
    request = first_request + place
    chunk = tl.program_id(2)
    token = tl.load(query_start_loc + request).to(tl.int32)
    seq_len = tl.load(seq_lens + request).to(tl.int32)
    first = tl.maximum(seq_len - window, 0) if HAS_WINDOW else 0
    stop = tl.minimum((chunk + 1) * CHUNK, seq_len)
    first = tl.maximum(chunk * CHUNK, first)
    if tl.load(query_start_loc + request + 1).to(tl.int32) != token + 1 or first >= stop:
        return
    head_tiles = tl.cdiv(group_size, BLOCK_M)
    kv_head = tl.program_id(1) // head_tiles
    group_heads = tl.program_id(1) % head_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    heads = kv_head * group_size + group_heads
    is_row = group_heads < group_size
    tokens = tl.zeros((BLOCK_M,), tl.int32) + token
    query, query_rest = load_queries(q, tokens, heads, is_row, q_strides, widths[0], BLOCK_D, BLOCK_REST)
    acc, largest, total = attend(
        query,
        query_rest,
        tokens * 0 + seq_len - 1,
        (
            key_cache + kv_head * head_strides[0],
            value_cache + kv_head * head_strides[1],
            key_scale + kv_head * head_strides[2],
            value_scale + kv_head * head_strides[2],
        ),
        block_tables + request.to(tl.int64) * table_stride,
        strides,
        first,
        stop,
        window,
        softmax_scale,
        widths,
        HAS_WINDOW,
        IS_NARROW,
        VALUE_IS_KEY,
        BLOCK_SIZE,
        BLOCK_M,
        BLOCK_L,
        BLOCK_D,
        BLOCK_REST,
        BLOCK_V,
        EXACT_D,
        EXACT_V,
    )
    rows = (place.to(tl.int64) * num_heads + heads) * tl.num_programs(2) + chunk
    columns = tl.arange(0, BLOCK_V)
    is_stored = is_row[:, None] & (columns < widths[1])[None, :]
    tl.store(partial + (rows * widths[1])[:, None] + columns[None, :], acc, mask=is_stored)
    tl.store(partial_state + rows * 2, largest, mask=is_row)
    tl.store(partial_state + rows * 2 + 1, total, mask=is_row)


@triton.jit
def join_chunks_kernel(
    partial: tl.tensor,
    partial_state: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    first_request: tl.tensor,
    num_chunks: tl.tensor,
    window: tl.tensor,
    value_width: tl.tensor,
    out_strides: tl.tensor,
    HAS_SINKS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """The output of one head of one request. How many chunks are joined depends on the request's length alone."""
    place = tl.program_id(0)
    head = tl.program_id(1)
    request = first_request + place
    token = tl.load(query_start_loc + request).to(tl.int64)
    if tl.load(query_start_loc + request + 1).to(tl.int64) != token + 1:
        return
    seq_len = tl.load(seq_lens + request).to(tl.int32)
    first = tl.maximum(seq_len - window, 0) // CHUNK if HAS_WINDOW else 0
    stop = tl.cdiv(seq_len, CHUNK)
    row = (place.to(tl.int64) * tl.num_programs(1) + head) * num_chunks
    columns = tl.arange(0, BLOCK_V)
    is_column = columns < value_width
    largest = tl.load(partial_state + (row + first) * 2)
    for chunk in range(first + 1, stop):
        largest = tl.maximum(largest, tl.load(partial_state + (row + chunk) * 2))
    total = 0.0
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        largest = tl.maximum(largest, sink)
        total = tl.exp2(sink - largest)
    acc = tl.zeros((BLOCK_V,), tl.float32)
    for chunk in range(first, stop):
        share = tl.exp2(tl.load(partial_state + (row + chunk) * 2) - largest)
        values = tl.load(partial + (row + chunk) * value_width + columns, mask=is_column, other=0.0)
        acc += values * share
        total += tl.load(partial_state + (row + chunk) * 2 + 1) * share
    out_row = out + token * out_strides[0] + head * out_strides[1]
    tl.store(out_row + columns, (acc / total).to(out.dtype.element_ty), mask=is_column)
