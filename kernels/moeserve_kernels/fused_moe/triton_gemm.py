"""Grouped matrix product on GPUs: tiles of routed rows, each times the weights of its expert.

The weights are the left operand and the rows the right one, whatever the number of rows: tensor cores ask for 64 or 128
rows on the left, which a weight always has and a decode never. So every tile size uses the same instruction, and the
terms of a product are added in the same order.
"""
# mypy: disable-error-code="untyped-decorator"
# ruff: noqa: PLR0917

import triton
import triton.language as tl

PLAIN: tl.constexpr = tl.constexpr(0)
CHANNEL_SCALED: tl.constexpr = tl.constexpr(1)
"""int8 weights, one scale for each output channel."""
BLOCK_SCALED: tl.constexpr = tl.constexpr(2)
"""float8 weights, one scale for each block of 128 x 128, and float8 rows, one scale for each group of 128."""
SCALE_BLOCK: tl.constexpr = tl.constexpr(128)


@triton.jit
def _tile_of_program(num_tiles: tl.tensor, num_columns: tl.tensor, GROUP_M: tl.constexpr) -> tl.tensor:
    """(row tile, column tile): GROUP_M row tiles share a tile of weights while the cache still holds it."""
    program = tl.program_id(0)
    group_size = GROUP_M * num_columns
    first_tile = program // group_size * GROUP_M
    group_rows = tl.minimum(num_tiles - first_tile, GROUP_M)
    place = program % group_size
    return first_tile + place % group_rows, place // group_rows


@triton.jit
def _accumulate(
    acc: tl.tensor,
    weights: tl.tensor,
    x: tl.tensor,
    weight_scale: tl.tensor,
    x_scale: tl.tensor,
    FORMAT: tl.constexpr,
) -> tl.tensor:
    if FORMAT == BLOCK_SCALED:
        partial = tl.dot(weights, x)
        return acc + partial * (weight_scale[:, None] * x_scale[None, :])
    return tl.dot(weights.to(x.dtype), x, acc, input_precision="ieee")


@triton.jit
def _activate(gate: tl.tensor, up: tl.tensor, alpha: tl.tensor, limit: tl.tensor, CLAMPED: tl.constexpr) -> tl.tensor:
    if CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        return gate / (1.0 + tl.exp(-alpha * gate)) * (up + 1.0)
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _finish(
    acc: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    channels: tl.tensor,
    FORMAT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> tl.tensor:
    """The product of some output channels with their scales and biases."""
    if FORMAT == CHANNEL_SCALED:
        acc *= tl.load(scale + channels).to(tl.float32)[:, None]
    if HAS_BIAS:
        acc += tl.load(bias + channels).to(tl.float32)[:, None]
    return acc


@triton.jit
def grouped_gemm_kernel(
    x: tl.tensor,
    x_scale: tl.tensor,
    weight: tl.tensor,
    weight_scale: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    order: tl.tensor,
    tiles: tl.tensor,
    num_tiles: tl.tensor,
    num_inputs: tl.tensor,
    num_outputs: tl.tensor,
    copies: tl.tensor,
    stride_x: tl.tensor,
    stride_expert: tl.tensor,
    stride_channel: tl.tensor,
    scale_stride_expert: tl.tensor,
    alpha: tl.tensor,
    limit: tl.tensor,
    FORMAT: tl.constexpr,
    GATED: tl.constexpr,
    CLAMPED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
) -> None:
    """out[r] = weight[expert of r] x[r // copies] for the rows of one tile and BLOCK_N outputs.

    GATED: the weight has 2 num_outputs channels, gates first, and the activation joins each gate with its up.
    """
    tile, column = _tile_of_program(num_tiles, tl.cdiv(num_outputs, BLOCK_N), GROUP_M)
    expert = tl.load(tiles + tile * 3).to(tl.int64)
    if expert < 0:
        return
    places = tl.arange(0, BLOCK_M)
    is_row = places < tl.load(tiles + tile * 3 + 2)
    rows = tl.load(order + tl.load(tiles + tile * 3 + 1) + places, mask=is_row, other=0).to(tl.int64)
    channels = column * BLOCK_N + tl.arange(0, BLOCK_N)
    is_channel = channels < num_outputs
    channels = tl.minimum(channels, num_outputs - 1)  # what lies outside is computed twice and not stored
    ks = tl.arange(0, BLOCK_K)

    x_tile = x + (rows // copies * stride_x)[None, :] + ks[:, None]
    first_weight = weight + expert * stride_expert
    gate_tile = first_weight + (channels * stride_channel)[:, None] + ks[None, :]
    up_tile = gate_tile + num_outputs * stride_channel
    scale_row = x_scale + rows // copies * tl.cdiv(num_inputs, SCALE_BLOCK)
    scales = weight_scale + expert * scale_stride_expert
    gate_scales = scales + channels // SCALE_BLOCK * tl.cdiv(num_inputs, SCALE_BLOCK)
    up_scales = scales + (channels + num_outputs) // SCALE_BLOCK * tl.cdiv(num_inputs, SCALE_BLOCK)
    row_scale = tl.zeros((BLOCK_M,), tl.float32)
    gate_scale = tl.zeros((BLOCK_N,), tl.float32)
    up_scale = tl.zeros((BLOCK_N,), tl.float32)

    gate = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in range(0, num_inputs, BLOCK_K):
        is_k = ks < num_inputs - k
        if FORMAT == BLOCK_SCALED:
            row_scale = tl.load(scale_row + k // SCALE_BLOCK)
            gate_scale = tl.load(gate_scales + k // SCALE_BLOCK)
        x_values = tl.load(x_tile + k) if EVEN_K else tl.load(x_tile + k, mask=is_k[:, None], other=0.0)
        gates = tl.load(gate_tile + k) if EVEN_K else tl.load(gate_tile + k, mask=is_k[None, :], other=0.0)
        gate = _accumulate(gate, gates, x_values, gate_scale, row_scale, FORMAT)
        if GATED:
            if FORMAT == BLOCK_SCALED:
                up_scale = tl.load(up_scales + k // SCALE_BLOCK)
            ups = tl.load(up_tile + k) if EVEN_K else tl.load(up_tile + k, mask=is_k[None, :], other=0.0)
            up = _accumulate(up, ups, x_values, up_scale, row_scale, FORMAT)

    bias += expert * num_outputs * (2 if GATED else 1)
    result = _finish(gate, scales, bias, channels, FORMAT, HAS_BIAS)
    if GATED:
        up = _finish(up, scales, bias, channels + num_outputs, FORMAT, HAS_BIAS)
        result = _activate(result, up, alpha, limit, CLAMPED)
    out_tile = out + (rows * num_outputs)[None, :] + channels[:, None]
    tl.store(out_tile, result.to(out.dtype.element_ty), mask=is_channel[:, None] & is_row[None, :])


@triton.jit
def quantize_groups_kernel(
    x: tl.tensor, narrow: tl.tensor, scale: tl.tensor, width: tl.tensor, stride_x: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """float8 values of one group of 128 numbers of a row, and its scale."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    columns = group * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + row * stride_x + columns, mask=columns < width, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(values), axis=0)
    row_scale = tl.where(largest > 0.0, largest / 448.0, 1.0)
    tl.store(scale + row * tl.num_programs(1) + group, row_scale)
    tl.store(narrow + row * width + columns, (values / row_scale).to(narrow.dtype.element_ty), mask=columns < width)


@triton.jit
def combine_kernel(
    rows_out: tl.tensor,
    weights: tl.tensor,
    expert_ids: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    top_k: tl.tensor,
    BLOCK_D: tl.constexpr,
) -> None:
    """The weighted sum of a token's choices, in their order; a choice of another rank was never written."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    is_column = columns < width
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for k in range(top_k):
        row = token * top_k + k
        if tl.load(expert_ids + row) >= 0:
            values = tl.load(rows_out + row * width + columns, mask=is_column, other=0.0)
            acc += tl.load(weights + row).to(tl.float32) * values.to(tl.float32)
    tl.store(out + token * width + columns, acc.to(out.dtype.element_ty), mask=is_column)
