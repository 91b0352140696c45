"""Ops on single rows: linear, rms_norm, rotary, silu_and_mul, against their oracles."""

import pytest
import torch

from moeserve_kernels import linear, rms_norm, rotary, silu_and_mul
from moeserve_kernels.linear.reference import linear_reference
from moeserve_kernels.rms_norm.reference import rms_norm_reference
from moeserve_kernels.rotary.reference import rotary_reference
from moeserve_kernels.silu_and_mul.reference import silu_and_mul_reference

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
DTYPES = list(TOLERANCE)
ROWS = [0, 1, 3]


def _randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("bias", [False, True])
def test_linear(dtype: torch.dtype, rows: int, bias: bool) -> None:
    x, weight = _randn(rows, 7, dtype=dtype), _randn(5, 7, dtype=dtype, seed=1)
    b = _randn(5, dtype=dtype, seed=2) if bias else None
    _assert_close(linear(x, weight, b), linear_reference(x, weight, b), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_of_no_inputs_is_its_bias(dtype: torch.dtype) -> None:
    """The shard of a rank that got no part of a narrow MLP."""
    assert linear(torch.empty(2, 0, dtype=dtype), torch.empty(3, 0, dtype=dtype)).tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
def test_rms_norm(dtype: torch.dtype, rows: int) -> None:
    x, weight = _randn(rows, 6, dtype=dtype), _randn(6, dtype=dtype, seed=1)
    _assert_close(rms_norm(x, weight, 1e-3), rms_norm_reference(x, weight, 1e-3), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_adds_the_residual_first(dtype: torch.dtype) -> None:
    x, residual, weight = (_randn(3, 6, dtype=dtype, seed=seed) for seed in range(3))
    normed, total = rms_norm(x, weight[0], 1e-6, residual)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm(total, weight[0], 1e-6))


def test_rms_norm_of_zeros_is_zero() -> None:
    assert rms_norm(torch.zeros(2, 4), torch.ones(4), 1e-6).tolist() == [[0.0] * 4] * 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [2, 6, 8])
def test_rotary(dtype: torch.dtype, rows: int, interleaved: bool, rotary_dim: int) -> None:
    """8 rotates the whole head, less leaves a tail that passes through."""
    x = _randn(rows, 3, 8, dtype=dtype)
    angles = _randn(rows, rotary_dim // 2, seed=1)
    before = x.clone()
    actual = rotary(x, angles.cos(), angles.sin(), interleaved)
    _assert_close(actual, rotary_reference(x, angles.cos(), angles.sin(), interleaved), dtype)
    assert torch.equal(actual[..., rotary_dim:], x[..., rotary_dim:])
    assert torch.equal(x, before)


def test_rotary_takes_a_view() -> None:
    """Heads come as a slice of the merged projection."""
    merged = _randn(4, 6, 8)
    angles = _randn(4, 4, seed=1)
    actual = rotary(merged[:, 1:3], angles.cos(), angles.sin(), interleaved=False)
    assert torch.equal(actual, rotary(merged[:, 1:3].contiguous(), angles.cos(), angles.sin(), interleaved=False))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotated_products_depend_on_the_distance_only(interleaved: bool) -> None:
    q, k, frequencies = _randn(1, 1, 8), _randn(1, 1, 8, seed=1), torch.tensor([1.0, 0.3, 0.1, 0.01])

    def product(q_position: int, k_position: int) -> torch.Tensor:
        turned = []
        for x, position in ((q, q_position), (k, k_position)):
            angles = position * frequencies.unsqueeze(0)
            turned.append(rotary(x, angles.cos(), angles.sin(), interleaved))
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(product(9, 4), product(105, 100))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
def test_silu_and_mul(dtype: torch.dtype, rows: int) -> None:
    x = _randn(rows, 10, dtype=dtype)
    _assert_close(silu_and_mul(x), silu_and_mul_reference(x), dtype)
