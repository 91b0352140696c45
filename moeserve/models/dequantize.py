"""Slices of quantised tensors as float32; formats as in `moeserve.models.quantization`."""

import torch

from moeserve.models.quantization import MXFP4_BLOCK
from moeserve.models.tensor_sources import split_range

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequantize_fp8(
    weight: torch.Tensor, scale_inv: torch.Tensor, ranges: tuple[range, ...], block: tuple[int, int]
) -> torch.Tensor:
    """`(weight * scale)[ranges]`; weight [..., R, C] in float8, one scale for each `block` of its last two axes."""
    *lead, rows, columns = ranges
    outer = tuple(map(as_slice, lead))
    decoded = weight[(*outer, as_slice(rows), as_slice(columns))].to(torch.float32)
    column_blocks = torch.arange(columns.start, columns.stop, columns.step) // block[1]
    scales = scale_inv[outer].to(torch.float32)[..., column_blocks]
    # One block of rows after the other: scales spread over all rows would be as large as the weight.
    for row_block, _, place in split_range(rows, (block[0],) * scale_inv.shape[-2]):
        decoded[..., place, :] *= scales[..., row_block, None, :]
    return decoded


def dequantize_mxfp4(blocks: torch.Tensor, scales: torch.Tensor, ranges: tuple[range, ...]) -> torch.Tensor:
    """`full[ranges]` of the decoded tensor [..., C]; blocks uint8 [..., C / 32, 16], scales [..., C / 32]."""
    *lead, columns = ranges
    first, last = columns.start // MXFP4_BLOCK, -(-columns.stop // MXFP4_BLOCK)
    outer = (*map(as_slice, lead), slice(first, last))
    packed = blocks[outer]
    pairs = _byte_values().index_select(0, packed.flatten().to(torch.int32))
    factors = scales[outer].view(torch.float8_e8m0fnu).to(torch.float32)
    decoded = pairs.view(*packed.shape[:-1], MXFP4_BLOCK).mul_(factors.unsqueeze(-1)).flatten(-2)
    return decoded[..., as_slice(columns, first * MXFP4_BLOCK)]


def as_slice(indices: range, origin: int = 0) -> slice:
    """The same indices, counted from `origin`."""
    return slice(indices.start - origin, indices.stop - origin, indices.step)


def _byte_values() -> torch.Tensor:
    """[256, 2]: the two numbers in a byte, the one in its low half first."""
    magnitudes = torch.tensor(_E2M1)
    values = torch.cat((magnitudes, -magnitudes))
    codes = torch.arange(256)
    return torch.stack((values[codes & 0xF], values[codes >> 4]), dim=-1)
