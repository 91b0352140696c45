"""Ops on single rows: rms_norm, rotary, silu_and_mul, against their oracles on each backend."""

import pytest
import torch

from moeserve_kernels import rms_norm, rotary, silu_and_mul
from moeserve_kernels.backend import Backend
from moeserve_kernels.rms_norm.reference import rms_norm_reference
from moeserve_kernels.rotary.reference import rotary_reference
from moeserve_kernels.silu_and_mul.reference import silu_and_mul_reference

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
DTYPES = list(TOLERANCE)
ROWS = [0, 1, 3]
WIDTHS = [1, 6, 64, 83, 200]
"""Less than a vector, whole vectors, a rest behind one and behind four."""


def _assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm(rows: int, width: int, dtype: torch.dtype, backend: Backend, generator: torch.Generator) -> None:
    x = torch.randn(rows, width, generator=generator).to(dtype)
    weight = torch.randn(width, generator=generator).to(dtype)
    _assert_close(rms_norm(x, weight, 1e-3, backend=backend), rms_norm_reference(x, weight, 1e-3), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm_adds_the_residual_first(
    width: int, dtype: torch.dtype, backend: Backend, generator: torch.Generator
) -> None:
    x, residual = torch.randn(2, 3, width, generator=generator).to(dtype)
    weight = torch.randn(width, generator=generator).to(dtype)
    normed, total = rms_norm(x, weight, 1e-6, residual, backend=backend)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm(total, weight, 1e-6, backend=backend))


def test_rms_norm_of_zeros_is_zero(backend: Backend) -> None:
    assert rms_norm(torch.zeros(2, 4), torch.ones(4), 1e-6, backend=backend).tolist() == [[0.0] * 4] * 2


def test_rms_norm_takes_views(backend: Backend, generator: torch.Generator) -> None:
    """Latents are a part of a projection, heads are a slice of one."""
    x, weight = torch.randn(5, 6, 20, generator=generator), torch.randn(8, generator=generator)
    for view in (x[:, 0, 3:11], x[:, 1:4, 12:], x[:, :, :8]):
        assert torch.equal(
            rms_norm(view, weight, 1e-6, backend=backend), rms_norm(view.contiguous(), weight, 1e-6, backend=backend)
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [2, 6, 34])
def test_rotary(
    rows: int, interleaved: bool, rotary_dim: int, dtype: torch.dtype, backend: Backend, generator: torch.Generator
) -> None:
    """34 rotates the whole head, less leaves a tail that passes through."""
    x = torch.randn(rows, 3, 34, generator=generator).to(dtype)
    angles = torch.randn(rows, rotary_dim // 2, generator=generator)
    before = x.clone()
    actual = rotary(x, angles.cos(), angles.sin(), interleaved, backend=backend)
    _assert_close(actual, rotary_reference(x, angles.cos(), angles.sin(), interleaved), dtype)
    assert torch.equal(actual[..., rotary_dim:], x[..., rotary_dim:])
    assert torch.equal(x, before)


def test_rotary_takes_a_view(backend: Backend, generator: torch.Generator) -> None:
    """Heads come as a slice of the merged projection."""
    merged = torch.randn(4, 6, 8, generator=generator)
    angles = torch.randn(4, 4, generator=generator)
    actual = rotary(merged[:, 1:3], angles.cos(), angles.sin(), interleaved=False, backend=backend)
    expected = rotary(merged[:, 1:3].contiguous(), angles.cos(), angles.sin(), interleaved=False, backend=backend)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotated_products_depend_on_the_distance_only(
    interleaved: bool, backend: Backend, generator: torch.Generator
) -> None:
    q, k = torch.randn(2, 1, 1, 8, generator=generator)
    frequencies = torch.tensor([1.0, 0.3, 0.1, 0.01])

    def product(q_position: int, k_position: int) -> torch.Tensor:
        turned = []
        for x, position in ((q, q_position), (k, k_position)):
            angles = position * frequencies.unsqueeze(0)
            turned.append(rotary(x, angles.cos(), angles.sin(), interleaved, backend=backend))
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(product(9, 4), product(105, 100), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", WIDTHS)
def test_silu_and_mul(rows: int, width: int, dtype: torch.dtype, backend: Backend, generator: torch.Generator) -> None:
    x = (torch.randn(rows, 2 * width, generator=generator) * 3).to(dtype)
    _assert_close(silu_and_mul(x, backend=backend), silu_and_mul_reference(x), dtype)


def test_silu_of_large_gates(backend: Backend) -> None:
    """Neither end overflows; a NaN stays one."""
    x = torch.tensor([[-1e4, -89.0, 0.0, 89.0, 1e4, torch.nan, *[1.0] * 6]])
    expected = torch.tensor([[0.0, 0.0, 0.0, 89.0, 1e4, torch.nan]])
    torch.testing.assert_close(silu_and_mul(x, backend=backend), expected, equal_nan=True)


def test_rows_know_no_batch(backend: Backend, generator: torch.Generator) -> None:
    """To the bit, natively; torch computes a sigmoid differently at the end of a tensor."""
    x, weight = torch.randn(37, 3, 26, generator=generator), torch.randn(26, generator=generator)
    angles = torch.randn(37, 13, generator=generator)

    def run(rows: slice) -> list[torch.Tensor]:
        return [
            rms_norm(x[rows], weight, 1e-6, backend=backend),
            rotary(x[rows], angles[rows].cos(), angles[rows].sin(), True, backend=backend),
            silu_and_mul(x[rows], backend=backend),
        ]

    together, tolerance = run(slice(0, 37)), 0.0 if backend == "cpu" else 1e-5
    for row in range(37):
        for alone, out in zip(run(slice(row, row + 1)), together, strict=True):
            torch.testing.assert_close(alone[0], out[row], rtol=tolerance, atol=tolerance)
