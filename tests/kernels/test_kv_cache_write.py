"""kv_cache_write: rows land in their slots and nowhere else."""

import pytest
import torch

from moeserve_kernels import kv_cache_write
from moeserve_kernels.kv_cache_write.reference import kv_cache_write_reference


@pytest.mark.parametrize("slots", [[], [5], [0, 11, 4], [-1, 7, -1], [-1]])
@pytest.mark.parametrize("row_shape", [(2, 3), (5,)])
def test_rows_land_in_their_slots(slots: list[int], row_shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn(3, 4, *row_shape, generator=generator)
    x = torch.randn(len(slots), *row_shape, generator=generator)
    expected = kv_cache_write_reference(x, cache, torch.tensor(slots, dtype=torch.int64))
    kv_cache_write(x, cache, torch.tensor(slots, dtype=torch.int64))
    assert torch.equal(cache, expected)


def test_rows_may_be_a_view() -> None:
    """Values come as a slice of the merged projection."""
    cache, merged = torch.zeros(2, 2, 3), torch.arange(24.0).reshape(4, 6)
    kv_cache_write(merged[:, 3:], cache, torch.tensor([3, 2, 1, 0]))
    assert torch.equal(cache.view(4, 3), merged[:, 3:].flip(0))
