"""head_linear: float64 on odd sizes, parts of wider tensors in and out, rows that know no batch."""

import pytest
import torch

from moeserve_kernels import head_linear, native, pack_heads
from moeserve_kernels.backend import Backend
from moeserve_kernels.head_linear.reference import head_linear_reference

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}
SHAPES = [
    (0, 2, 5, 3),  # no tokens
    (1, 1, 7, 5),  # less than a block of outputs, half a pair of inputs
    (3, 2, 64, 32),  # whole blocks
    (13, 3, 33, 70),  # one row more than the largest tile, two blocks and a part
    (300, 2, 6, 33),  # more rows than are interleaved at once
]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("num_tokens", "num_heads", "inputs", "outputs"), SHAPES)
def test_against_reference(
    num_tokens: int,
    num_heads: int,
    inputs: int,
    outputs: int,
    dtype: torch.dtype,
    backend: Backend,
    generator: torch.Generator,
) -> None:
    """From a part of wider heads into a part of wider heads, of which the rest stays."""
    x = torch.randn(num_tokens, num_heads, inputs + 3, generator=generator).to(dtype)[..., 2:-1]
    weight = torch.randn(num_heads, outputs, inputs, generator=generator).to(dtype)
    out = torch.full((num_tokens, num_heads, outputs + 2), 7.0, dtype=dtype)
    packed = pack_heads(weight, backend=backend)
    head_linear(x, packed, out_THo=out[..., 1:-1])
    expected = head_linear_reference(x, weight)
    assert (out[..., 1:-1].double() - expected).norm() <= TOLERANCE[dtype] * expected.norm()
    assert (out[..., [0, -1]] == 7.0).all()
    assert torch.equal(head_linear(x, packed), out[..., 1:-1])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_row_knows_no_batch(dtype: torch.dtype, generator: torch.Generator) -> None:
    if not native.is_loaded():
        pytest.skip("no native kernels")
    x = torch.randn(29, 3, 50, generator=generator).to(dtype)
    packed = pack_heads(torch.randn(3, 41, 50, generator=generator).to(dtype), backend="cpu")
    together = head_linear(x, packed)
    for row in range(29):
        assert torch.equal(head_linear(x[row : row + 1], packed)[0], together[row])
