"""kv_cache_write: rows land in their slots and nowhere else, as the nearest values that the cache has."""

import pytest
import torch

from moeserve_kernels import kv_cache_write
from moeserve_kernels.backend import Backend
from moeserve_kernels.kv_cache_write.quantize import LARGEST, quantize
from moeserve_kernels.kv_cache_write.reference import kv_cache_write_reference, quantize_reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NARROW = list(LARGEST)


@pytest.mark.parametrize("slots", [[], [5], [0, 11, 4], [-1, 7, -1], [-1]])
@pytest.mark.parametrize("row_shape", [(2, 3), (5,), (1, 67)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", DTYPES)
def test_rows_land_in_their_slots(
    slots: list[int],
    row_shape: tuple[int, ...],
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    backend: Backend,
    generator: torch.Generator,
) -> None:
    cache = torch.randn(3, 4, *row_shape, generator=generator).to(cache_dtype)
    x = torch.randn(len(slots), *row_shape, generator=generator).to(dtype)
    expected = kv_cache_write_reference(x, cache, torch.tensor(slots, dtype=torch.int64))
    kv_cache_write(x, cache, torch.tensor(slots, dtype=torch.int64), backend=backend)
    assert torch.equal(cache, expected)


def test_rows_may_be_a_view(backend: Backend) -> None:
    """Values come as a slice of the merged projection."""
    cache, merged = torch.zeros(2, 2, 3), torch.arange(24.0).reshape(4, 6)
    kv_cache_write(merged[:, 3:], cache, torch.tensor([3, 2, 1, 0]), backend=backend)
    assert torch.equal(cache.view(4, 3), merged[:, 3:].flip(0))


@pytest.mark.parametrize("cache_dtype", NARROW)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row_shape", [(2, 3), (37,)])
def test_narrow_rows_are_the_nearest(
    row_shape: tuple[int, ...],
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    backend: Backend,
    generator: torch.Generator,
) -> None:
    """Rows of very different sizes; one of zeros, whose scale must not be 0; a slot that is not written."""
    sizes = torch.tensor([1.0, 1e-4, 0.0, 300.0, 1.0]).view(5, *[1] * len(row_shape))
    x = (torch.randn(5, *row_shape, generator=generator) * sizes).to(dtype)
    cache, scale = torch.zeros(2, 4, *row_shape, dtype=cache_dtype), torch.full((2, 4, *row_shape[:-1]), torch.nan)
    kv_cache_write(x, cache, torch.tensor([6, 0, 3, 5, -1]), scale, backend=backend)
    rows, scales = cache.float().flatten(0, 1), scale.flatten(0, 1)
    for row, slot in zip(x.flatten(1, -2) if x.ndim > 2 else x.unsqueeze(1), [6, 0, 3, 5], strict=False):
        for head, values in enumerate(row.double().tolist()):
            expected, expected_scale = quantize_reference(values, cache_dtype)
            found = rows[slot].view(-1, row_shape[-1])[head].double() * scales[slot].flatten()[head].double()
            error = (found - torch.tensor(values, dtype=torch.float64)).abs()
            best = (torch.tensor(expected).double() * expected_scale - torch.tensor(values).double()).abs()
            assert (error <= best + 1e-4 * expected_scale).all()
    assert not rows[[1, 2, 4, 7]].any()
    assert torch.isnan(scales[[1, 2, 4, 7]]).all()


@pytest.mark.parametrize("cache_dtype", NARROW)
def test_backends_agree_to_the_bit(cache_dtype: torch.dtype, backend: Backend, generator: torch.Generator) -> None:
    """Over many magnitudes: the small steps of float8 near 0, ties, and the edge where a row's largest value lies."""
    x = torch.randn(500, 40, generator=generator) * torch.logspace(-8, 0, 40)
    x[:200] = (x[:200] * 64).round() / 64
    x[:, 0] = LARGEST[cache_dtype] / torch.tensor([1.0, 2.0, 3.0, 7.0]).repeat(125)
    cache, scale = torch.zeros(500, 1, 40, dtype=cache_dtype), torch.zeros(500, 1)
    kv_cache_write(x, cache, torch.arange(500), scale, backend=backend)
    values, scales = quantize(x, cache_dtype)
    assert torch.equal(cache.view(torch.uint8).squeeze(1), values.view(torch.uint8))
    assert torch.equal(scale.squeeze(1), scales)
