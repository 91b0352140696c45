"""Attention of requests that bring several tokens: one program a tile of tokens and the heads of one key-value head."""
# mypy: disable-error-code="untyped-decorator"
# ruff: noqa: PLR0917

import triton
import triton.language as tl

from moeserve_kernels.paged_attention.triton_tile import LOG2_E, attend, load_queries


@triton.jit
def _find_request(
    query_start_loc: tl.tensor, tile: tl.tensor, num_requests: tl.tensor, BLOCK_Q: tl.constexpr
) -> tl.tensor:
    """The request of a tile, where request r begins with tile query_start_loc[r] // BLOCK_Q + r."""
    low = 0
    high = num_requests
    while low + 1 < high:
        middle = (low + high) // 2
        is_begun = tl.load(query_start_loc + middle).to(tl.int32) // BLOCK_Q + middle <= tile
        low = tl.where(is_begun, middle, low)
        high = tl.where(is_begun, high, middle)
    return low


@triton.jit
def prefill_kernel(
    q: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    key_scale: tl.tensor,
    value_scale: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    block_tables: tl.tensor,
    num_requests: tl.tensor,
    group_size: tl.tensor,
    window: tl.tensor,
    softmax_scale: tl.tensor,
    widths: tl.tensor,
    q_strides: tl.tensor,
    out_strides: tl.tensor,
    strides: tl.tensor,
    head_strides: tl.tensor,
    table_stride: tl.tensor,
    HAS_SINKS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_NARROW: tl.constexpr,
    VALUE_IS_KEY: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_V: tl.constexpr,
    EXACT_D: tl.constexpr,
    EXACT_V: tl.constexpr,
) -> None:
    """A request of a single token is left to the decode kernel, so that it is computed alike in any batch."""
    block_q: tl.constexpr = BLOCK_M // HEADS
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last tiles of a prefill read most: they start first
    request = _find_request(query_start_loc, tile, num_requests, block_q)
    begin = tl.load(query_start_loc + request).to(tl.int32)
    query_len = tl.load(query_start_loc + request + 1).to(tl.int32) - begin
    done = (tile - begin // block_q - request) * block_q
    if query_len <= 1 or done >= query_len:
        return
    seq_len = tl.load(seq_lens + request).to(tl.int32)
    rows = tl.arange(0, BLOCK_M)
    tokens = done + rows // HEADS
    head_tiles = tl.cdiv(group_size, HEADS)
    kv_head = tl.program_id(1) // head_tiles
    group_heads = tl.program_id(1) % head_tiles * HEADS + rows % HEADS
    heads = kv_head * group_size + group_heads
    is_row = (tokens < query_len) & (group_heads < group_size)
    query, query_rest = load_queries(q, begin + tokens, heads, is_row, q_strides, widths[0], BLOCK_D, BLOCK_REST)
    first_position = seq_len - query_len + done
    first = tl.maximum(first_position - window + 1, 0) if HAS_WINDOW else 0
    acc, largest, total = attend(
        query,
        query_rest,
        seq_len - query_len + tokens,
        (
            key_cache + kv_head * head_strides[0],
            value_cache + kv_head * head_strides[1],
            key_scale + kv_head * head_strides[2],
            value_scale + kv_head * head_strides[2],
        ),
        block_tables + request.to(tl.int64) * table_stride,
        strides,
        first,
        tl.minimum(first_position + block_q, seq_len),
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
    if HAS_SINKS:
        sink = tl.load(sinks + heads, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
        new_largest = tl.maximum(largest, sink)
        acc *= tl.exp2(largest - new_largest)[:, None]
        total = total * tl.exp2(largest - new_largest) + tl.exp2(sink - new_largest)
    total = tl.where(is_row, total, 1.0)
    columns = tl.arange(0, BLOCK_V)
    out_rows = out + (begin + tokens).to(tl.int64) * out_strides[0] + heads * out_strides[1]
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out_rows[:, None] + columns[None, :], result, mask=is_row[:, None] & (columns < widths[1])[None, :])
