"""A tile of queries over a range of paged keys and values: what the kernels of prefill and decode have in common.

Rows of a tile are (token, query head) pairs of one key-value head: its keys and values are read once for all of them.
Tiles of positions begin at multiples of their size whatever the queries, so the order of a row's sums is its own.
Scores are in units of log 2. `strides` are those of key blocks, key slots, value blocks, value slots, scale blocks and
scale slots.
"""
# mypy: disable-error-code="untyped-decorator"
# ruff: noqa: PLR0917

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _score(
    query: tl.tensor,
    query_rest: tl.tensor,
    key_rows: tl.tensor,
    is_read: tl.tensor,
    width: tl.tensor,
    BLOCK_D: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    EXACT_D: tl.constexpr,
) -> tl.tensor:
    """(keys [D, L], query keys [M, L]). What may not be read is 0, so that no weight of 0 ever meets a NaN.

    A width that is no power of two is cut into one and a rest.
    """
    columns = tl.arange(0, BLOCK_D)
    mask = is_read[None, :] if EXACT_D else is_read[None, :] & (columns < width)[:, None]
    keys = tl.load(key_rows[None, :] + columns[:, None], mask=mask, other=0.0).to(query.dtype)
    scores = tl.dot(query, keys, input_precision="ieee")
    if BLOCK_REST > 0:
        rest = BLOCK_D + tl.arange(0, BLOCK_REST)
        mask = is_read[None, :] & (rest < width)[:, None]
        more = tl.load(key_rows[None, :] + rest[:, None], mask=mask, other=0.0).to(query.dtype)
        scores = tl.dot(query_rest, more, scores, input_precision="ieee")
    return keys, scores


@triton.jit
def _read_values(
    value_rows: tl.tensor, is_read: tl.tensor, value_width: tl.tensor, BLOCK_V: tl.constexpr, EXACT_V: tl.constexpr
) -> tl.tensor:
    columns = tl.arange(0, BLOCK_V)
    mask = is_read[:, None] if EXACT_V else is_read[:, None] & (columns < value_width)[None, :]
    return tl.load(value_rows[:, None] + columns[None, :], mask=mask, other=0.0)


@triton.jit
def attend(
    query: tl.tensor,
    query_rest: tl.tensor,
    query_positions: tl.tensor,
    caches: tl.tensor,
    block_table: tl.tensor,
    strides: tl.tensor,
    first: tl.tensor,
    stop: tl.tensor,
    window: tl.tensor,
    softmax_scale: tl.tensor,
    widths: tl.tensor,
    HAS_WINDOW: tl.constexpr,
    IS_NARROW: tl.constexpr,
    VALUE_IS_KEY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_V: tl.constexpr,
    EXACT_D: tl.constexpr,
    EXACT_V: tl.constexpr,
) -> tl.tensor:
    """(weighted sum of values, largest score, sum of weights) of the queries over the positions first to stop."""
    acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(first // BLOCK_L * BLOCK_L, stop, BLOCK_L):
        positions = start + tl.arange(0, BLOCK_L)
        is_read = (positions >= first) & (positions < stop)
        block = tl.load(block_table + positions // BLOCK_SIZE, mask=is_read, other=0).to(tl.int64)
        place = positions % BLOCK_SIZE
        key_rows = caches[0] + block * strides[0] + place * strides[1]
        keys, scores = _score(query, query_rest, key_rows, is_read, widths[0], BLOCK_D, BLOCK_REST, EXACT_D)
        scores *= softmax_scale * LOG2_E
        scale_rows = block * strides[4] + place * strides[5]
        if IS_NARROW:
            scores *= tl.load(caches[2] + scale_rows, mask=is_read, other=0.0)[None, :]
        is_visible = is_read[None, :] & (positions[None, :] <= query_positions[:, None])
        if HAS_WINDOW:
            is_visible &= positions[None, :] > query_positions[:, None] - window
        scores = tl.where(is_visible, scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, axis=1))
        finite = tl.where(new_largest == float("-inf"), 0.0, new_largest)  # a row may see nothing of the first tiles
        weights = tl.exp2(scores - finite[:, None])
        shrink = tl.exp2(largest - finite)
        total = total * shrink + tl.sum(weights, axis=1)
        largest = new_largest
        if IS_NARROW:
            weights *= tl.load(caches[3] + scale_rows, mask=is_read, other=0.0)[None, :]
        if VALUE_IS_KEY:
            values = tl.trans(keys)
        else:
            value_rows = caches[1] + block * strides[2] + place * strides[3]
            values = _read_values(value_rows, is_read, widths[1], BLOCK_V, EXACT_V).to(query.dtype)
        acc = tl.dot(weights.to(query.dtype), values, acc * shrink[:, None], input_precision="ieee")
    return acc, largest, total


@triton.jit
def load_queries(
    q: tl.tensor,
    tokens: tl.tensor,
    heads: tl.tensor,
    is_row: tl.tensor,
    strides: tl.tensor,
    width: tl.tensor,
    BLOCK_D: tl.constexpr,
    BLOCK_REST: tl.constexpr,
) -> tl.tensor:
    """(query [M, BLOCK_D], its rest [M, BLOCK_REST])."""
    rows = q + tokens.to(tl.int64) * strides[0] + heads * strides[1]
    columns = tl.arange(0, BLOCK_D)
    query = tl.load(rows[:, None] + columns[None, :], mask=is_row[:, None] & (columns < width)[None, :], other=0.0)
    more = query
    if BLOCK_REST > 0:
        rest = BLOCK_D + tl.arange(0, BLOCK_REST)
        more = tl.load(rows[:, None] + rest[None, :], mask=is_row[:, None] & (rest < width)[None, :], other=0.0)
    return query, more
