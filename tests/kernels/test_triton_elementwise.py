"""Triton kernels that work row by row: against the oracles, on views, with rows alone equal to rows in a batch."""

import pytest
import torch

from moeserve_kernels.kv_cache_write.quantize import LARGEST, quantize
from moeserve_kernels.kv_cache_write.reference import kv_cache_write_reference
from moeserve_kernels.kv_cache_write.triton import kv_cache_write
from moeserve_kernels.rms_norm.reference import rms_norm_reference
from moeserve_kernels.rms_norm.triton import rms_norm
from moeserve_kernels.rotary.reference import rotary_reference
from moeserve_kernels.rotary.triton import rotary
from moeserve_kernels.silu_and_mul.reference import silu_and_mul_reference
from moeserve_kernels.silu_and_mul.triton import silu_and_mul

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
DTYPES = list(TOLERANCE)


def _randn(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def _assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double().cpu(), expected.cpu(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 7), (1, 7), (3, 600), (17, 8), (5, 3, 6)])
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, ...], triton_device: torch.device) -> None:
    """No rows; a width of no power of two; one over the limit of head norms; a tile and one row; heads of tokens."""
    x = _randn(*shape, dtype=dtype, device=triton_device)
    weight = _randn(shape[-1], dtype=dtype, device=triton_device, seed=1)
    actual, total = rms_norm(x, weight, 1e-3)
    assert total is x
    expected = rms_norm_reference(x.reshape(-1, shape[-1]), weight, 1e-3).reshape(shape)
    _assert_close(actual, expected, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rms_norm_adds_the_residual_first(dtype: torch.dtype, triton_device: torch.device) -> None:
    """Not bfloat16: the interpreter cuts its digits off instead of rounding them."""
    x, residual, weight = (_randn(3, 6, dtype=dtype, device=triton_device, seed=seed) for seed in range(3))
    normed, total = rms_norm(x, weight[0], 1e-6, residual)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm(total, weight[0], 1e-6)[0])


def test_rms_norm_of_heads_inside_a_merged_projection(triton_device: torch.device) -> None:
    merged, weight = _randn(4, 6, 8, device=triton_device), _randn(8, device=triton_device, seed=1)
    heads = merged[:, 1:4]
    assert torch.equal(rms_norm(heads, weight, 1e-6)[0], rms_norm(heads.contiguous(), weight, 1e-6)[0])


@pytest.mark.parametrize("width", [6, 700])
def test_rms_norm_of_a_row_knows_no_batch(width: int, triton_device: torch.device) -> None:
    x, weight = _randn(19, width, device=triton_device), _randn(width, device=triton_device, seed=1)
    together, _ = rms_norm(x, weight, 1e-6)
    for row in (0, 15, 18):
        assert torch.equal(rms_norm(x[row : row + 1], weight, 1e-6)[0][0], together[row])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 3])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [2, 6, 8])
def test_rotary(dtype: torch.dtype, rows: int, interleaved: bool, rotary_dim: int, triton_device: torch.device) -> None:
    """8 rotates the whole head, less leaves a tail that passes through; heads are a slice of a merged projection."""
    x = _randn(rows, 21, 8, dtype=dtype, device=triton_device)[:, 2:20]
    angles = _randn(rows, rotary_dim // 2, device=triton_device, seed=1)
    before = x.clone()
    actual = rotary(x, angles.cos(), angles.sin(), interleaved)
    _assert_close(actual, rotary_reference(x, angles.cos(), angles.sin(), interleaved), dtype)
    assert torch.equal(actual[..., rotary_dim:], x[..., rotary_dim:])
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(0, 5), (1, 5), (3, 1025)])
def test_silu_and_mul(dtype: torch.dtype, rows: int, width: int, triton_device: torch.device) -> None:
    """1025 is one more than a tile."""
    x = _randn(rows, 2 * width, dtype=dtype, device=triton_device)
    _assert_close(silu_and_mul(x), silu_and_mul_reference(x), dtype)


@pytest.mark.parametrize("slots", [[], [5], [0, 11, 4], [-1, 7, -1], [-1]])
@pytest.mark.parametrize("row_shape", [(3, 5), (5,)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_land_in_their_slots(
    slots: list[int], row_shape: tuple[int, ...], dtype: torch.dtype, triton_device: torch.device
) -> None:
    """Heads of keys and latents; widths of no power of two, so that a tile reaches over the row's end."""
    cache = _randn(3, 4, *row_shape, dtype=dtype, device=triton_device)
    x = _randn(len(slots), *row_shape, dtype=dtype, device=triton_device, seed=1)
    slot_mapping = torch.tensor(slots, dtype=torch.int64, device=triton_device)
    expected = kv_cache_write_reference(x, cache, slot_mapping)
    kv_cache_write(x, cache, slot_mapping)
    assert torch.equal(cache, expected)


def test_written_rows_may_be_a_view(triton_device: torch.device) -> None:
    """Values come as a slice of the merged projection."""
    cache, merged = torch.zeros(2, 2, 3), torch.arange(24.0).reshape(4, 6)
    cache, merged = cache.to(triton_device), merged.to(triton_device)
    kv_cache_write(merged[:, 3:], cache, torch.tensor([3, 2, 1, 0], device=triton_device))
    assert torch.equal(cache.view(4, 3), merged[:, 3:].flip(0))


def _exactly_narrow_rows(narrow: torch.dtype, device: torch.device) -> torch.Tensor:
    """[4, 3, 33] of multiples of what `narrow` can hold, the largest in every row, but a row of zeros.

    The interpreter loses the carry of a float8 that rounds up to a power of two.
    """
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(0, 256, (4, 3, 33), generator=generator, dtype=torch.uint8).view(narrow).float()
    rows = torch.where(torch.isfinite(numbers), numbers, 1.0).clamp(-LARGEST[narrow], LARGEST[narrow])
    rows[..., 5] = LARGEST[narrow]
    rows[1] = 0
    return rows.to(device) / 16


@pytest.mark.parametrize("narrow", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("kind", ["heads", "latents"])
def test_rows_are_narrowed_on_the_way(narrow: torch.dtype, kind: str, triton_device: torch.device) -> None:
    """To the bit as `quantize` does; zeros have scale 1; slots that nobody writes keep their bytes."""
    x = _exactly_narrow_rows(narrow, triton_device)
    _check_narrowing(x if kind == "heads" else x[:, 0], narrow)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_integers_are_rounded_to_nearest(dtype: torch.dtype, triton_device: torch.device) -> None:
    x = _randn(4, 3, 33, dtype=dtype, device=triton_device) * 30
    x[0, 0, :3] = torch.tensor([127.0, 0.5, 1.5])  # halves go to the even neighbour
    _check_narrowing(x, torch.int8)


def _check_narrowing(x: torch.Tensor, narrow: torch.dtype) -> None:
    cache = torch.full((3, 4, *x.shape[1:]), 3.0).to(x.device, narrow)
    scale = torch.full((3, 4, *x.shape[1:-1]), torch.nan, device=x.device)
    slots = torch.tensor([7, 2, -1, 11], device=x.device)
    expected_cache, expected_scale = cache.clone().view(torch.uint8), scale.clone()
    values, scales = quantize(x[slots >= 0], narrow)
    expected_cache.flatten(0, 1)[slots[slots >= 0]] = values.view(torch.uint8)
    expected_scale.flatten(0, 1)[slots[slots >= 0]] = scales
    kv_cache_write(x, cache, slots, scale)
    assert torch.equal(cache.view(torch.uint8), expected_cache)
    torch.testing.assert_close(scale, expected_scale, rtol=0, atol=0, equal_nan=True)
