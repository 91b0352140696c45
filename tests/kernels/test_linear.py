"""linear and its packed weights: against float64 on each backend, rows alone against rows in a batch, odd sizes."""

import math

import pytest
import torch

from moeserve_kernels import linear, native, pack_linear
from moeserve_kernels.backend import Backend
from moeserve_kernels.linear.quantize import dequantize_weight, quantize_weight
from moeserve_kernels.linear.reference import linear_reference, quantize_reference
from moeserve_kernels.native.blocks import BlockLayout

pytestmark = pytest.mark.usefixtures("poisoned")

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
DTYPES = list(TOLERANCE)
SHAPES = [
    (0, 5, 3),  # no rows
    (1, 7, 5),  # less than a block of outputs, half a pair of inputs
    (3, 64, 32),  # whole blocks
    (13, 33, 70),  # one row more than the largest tile, two blocks and a part
    (100, 6, 33),  # several groups of tiles
]


def _randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_linear(*, rows: int, inputs: int, outputs: int, bias: bool, dtype: torch.dtype, backend: Backend) -> None:
    x, weight = _randn(rows, inputs, dtype=dtype), _randn(outputs, inputs, dtype=dtype, seed=1) / inputs**0.5
    b = _randn(outputs, dtype=dtype, seed=2) if bias else None
    actual = linear(x, pack_linear(weight, b, backend=backend))
    assert actual.dtype == dtype
    expected = linear_reference(x, weight, b)
    torch.testing.assert_close(actual.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
def test_int8_weights(rows: int, inputs: int, outputs: int, dtype: torch.dtype, backend: Backend) -> None:
    x, weight = _randn(rows, inputs, dtype=dtype), _randn(outputs, inputs, dtype=dtype, seed=1) / inputs**0.5
    b = _randn(outputs, dtype=dtype, seed=2)
    actual = linear(x, pack_linear(weight, b, quantization="int8", backend=backend))
    values, scale = quantize_weight(weight)
    expected = linear_reference(x, values.double() * scale.double().unsqueeze(1), b)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_axes_before_the_inputs_are_kept(dtype: torch.dtype, backend: Backend) -> None:
    x, packed = _randn(2, 3, 5, dtype=dtype), pack_linear(_randn(4, 5, dtype=dtype, seed=1), backend=backend)
    assert linear(x, packed).shape == (2, 3, 4)
    assert linear(x[0, 0], packed).shape == (4,)
    torch.testing.assert_close(linear(x.transpose(0, 1), packed), linear(x, packed).transpose(0, 1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_of_no_inputs_is_its_bias(dtype: torch.dtype, backend: Backend) -> None:
    """The shard of a rank that got no part of a narrow MLP."""
    x, weight, bias = torch.empty(2, 0, dtype=dtype), torch.empty(3, 0, dtype=dtype), torch.ones(3, dtype=dtype)
    for quantization in (None, "int8"):
        assert linear(x, pack_linear(weight, quantization=quantization, backend=backend)).tolist() == [[0.0] * 3] * 2
        packed = pack_linear(weight, bias, quantization=quantization, backend=backend)
        assert linear(x, packed).tolist() == [[1.0] * 3] * 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_row_knows_no_batch(dtype: torch.dtype, quantization: str | None, num_threads: int, backend: Backend) -> None:
    """Alone, in batches of any size, beside a row of NaN, and with more threads: the same bits."""
    if backend == "torch":
        pytest.skip("torch's order of summation follows the shape")
    packed = pack_linear(_randn(70, 33, dtype=dtype), _randn(70, dtype=dtype), quantization=quantization)
    x = _randn(110, 33, dtype=dtype, seed=1)
    alone = torch.stack([linear(row, packed) for row in x])
    torch.set_num_threads(num_threads)
    try:
        for rows in (*range(2, 14), 110):
            assert torch.equal(linear(x[:rows], packed), alone[:rows])
        x[3] = math.nan
        assert torch.equal(linear(x, packed)[4:], alone[4:])
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize(("dtype", "weight_dtype"), [*((d, d) for d in DTYPES), *((d, torch.int8) for d in DTYPES)])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (5, 7), (64, 32), (33, 70), (3, 0)])
def test_blocks_give_back_the_weight(dtype: torch.dtype, weight_dtype: torch.dtype, outputs: int, inputs: int) -> None:
    if not native.is_loaded():
        pytest.skip("no native kernels")
    layout = BlockLayout.of(dtype, weight_dtype)
    weight = (_randn(outputs, inputs) * 50).clamp(-127, 127).to(weight_dtype)
    blocks = torch.full(layout.shape(outputs, inputs), 3).to(weight_dtype)
    layout.pack(weight, blocks)
    assert torch.equal(layout.unpack(blocks, outputs, inputs), weight)
    assert blocks.count_nonzero() == weight.count_nonzero(), "all padding is zero"


def test_quantization_rounds_each_channel_by_its_largest_weight() -> None:
    weight = torch.cat([_randn(4, 9) * torch.tensor([[1e-3], [1.0], [50.0], [1e4]]), torch.zeros(1, 9)])
    values, scale = quantize_weight(weight)
    for row, row_values, row_scale in zip(weight.tolist(), values.tolist(), scale.tolist(), strict=True):
        expected_values, expected_scale = quantize_reference(row)
        assert row_values == expected_values
        assert row_scale == pytest.approx(expected_scale, rel=1e-6)
    error = (dequantize_weight(values, scale, torch.float32) - weight).abs()
    assert (error <= scale.unsqueeze(1) * 0.5001).all()


def test_inputs_of_another_dtype_or_width_are_refused(backend: Backend) -> None:
    packed = pack_linear(_randn(4, 5), backend=backend)
    with pytest.raises(AssertionError, match="packed for inputs of"):
        linear(_randn(2, 5, dtype=torch.bfloat16), packed)
    with pytest.raises(AssertionError, match="packed for 5 inputs"):
        linear(_randn(2, 6), packed)
