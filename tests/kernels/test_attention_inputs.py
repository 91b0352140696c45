"""attention_inputs: norms, rotation and cache write at once are the same as one after the other."""

import pytest
import torch

from moeserve_kernels import attention_inputs
from moeserve_kernels.attention_inputs.reference import attention_inputs_reference
from moeserve_kernels.backend import Backend
from moeserve_kernels.kv_cache_write.quantize import LARGEST

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
CACHE_TOLERANCE = {**TOLERANCE, torch.int8: 2e-2, torch.float8_e4m3fn: 5e-2}
EPS = 1e-5


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("cache_dtype", CACHE_TOLERANCE)
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize(("width", "num_pairs", "interleaved"), [(10, 5, False), (22, 7, True), (64, 32, False)])
def test_against_reference(
    num_tokens: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    has_norms: bool,
    width: int,
    num_pairs: int,
    interleaved: bool,
    backend: Backend,
    generator: torch.Generator,
) -> None:
    """Heads are views of a merged projection; the fourth token is not written, other slots are not touched."""

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    q, k, v = randn(num_tokens, 7, width).split_with_sizes((3, 2, 2), dim=1)
    angles = torch.randn(num_tokens, num_pairs, generator=generator)
    slots = torch.tensor([7, 0, 5, -1, 2])[:num_tokens]
    weights = (randn(width), randn(width)) if has_norms else (None, None)
    caches = [torch.zeros(2, 4, 2, width, dtype=cache_dtype) for _ in range(2)]
    scales = [torch.full((2, 4, 2), torch.nan) if cache_dtype in LARGEST else None for _ in range(2)]
    queries = attention_inputs(
        q,
        k,
        v,
        cos_TR=angles.cos(),
        sin_TR=angles.sin(),
        interleaved=interleaved,
        slot_mapping_T=slots,
        key_cache_NSGD=caches[0],
        value_cache_NSGD=caches[1],
        key_scale_NSG=scales[0],
        value_scale_NSG=scales[1],
        q_norm_weight_D=weights[0],
        k_norm_weight_D=weights[1],
        eps=EPS,
        backend=backend,
    )
    expected_queries, expected_keys = attention_inputs_reference(
        q, k, (angles.cos(), angles.sin()), interleaved=interleaved, norm_weights=weights, eps=EPS
    )
    assert queries.dtype == dtype
    _assert_close(queries.double(), expected_queries, TOLERANCE[dtype])
    untouched = [slot for slot in range(8) if slot not in slots.tolist()]
    for cache, scale, expected in zip(caches, scales, (expected_keys, v.double()), strict=True):
        rows = cache.double().flatten(0, 1)
        assert not rows[untouched].any()
        if scale is not None:
            assert torch.isnan(scale.flatten(0, 1)[untouched]).all()
            rows = rows * scale.double().flatten(0, 1).unsqueeze(-1)
        _assert_close(rows[slots[slots >= 0]], expected[slots >= 0], TOLERANCE[dtype] + CACHE_TOLERANCE[cache_dtype])


def _assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """By the norm of the error."""
    assert actual.shape == expected.shape
    assert (actual - expected).norm() <= tolerance * expected.norm()


def test_a_token_knows_no_batch(backend: Backend, generator: torch.Generator) -> None:
    """To the bit."""
    x, angles = torch.randn(9, 4, 20, generator=generator), torch.randn(9, 10, generator=generator)
    weight = torch.randn(20, generator=generator)

    def run(tokens: slice) -> tuple[torch.Tensor, torch.Tensor]:
        caches = [torch.zeros(9, 1, 1, 20) for _ in range(2)]
        q, k, v = x[tokens].split_with_sizes((2, 1, 1), dim=1)
        queries = attention_inputs(
            q,
            k,
            v,
            cos_TR=angles[tokens].cos(),
            sin_TR=angles[tokens].sin(),
            interleaved=False,
            slot_mapping_T=torch.arange(9)[tokens],
            key_cache_NSGD=caches[0],
            value_cache_NSGD=caches[1],
            q_norm_weight_D=weight,
            k_norm_weight_D=weight,
            eps=EPS,
            backend=backend,
        )
        return queries, torch.cat(caches)[torch.arange(9)[tokens]]

    together = run(slice(0, 9))
    for token in range(9):
        alone = run(slice(token, token + 1))
        assert all(torch.equal(a[0], t[token]) for a, t in zip(alone, together, strict=True))


def test_on_triton(triton_device: torch.device, generator: torch.Generator) -> None:
    """There it is one op after the other."""
    q, k, v = torch.randn(3, 6, 10, generator=generator).to(triton_device).split_with_sizes((2, 2, 2), dim=1)
    angles, weight = torch.randn(3, 5, generator=generator), torch.randn(10, generator=generator)
    caches = [torch.zeros(2, 2, 2, 10, device=triton_device) for _ in range(2)]
    queries = attention_inputs(
        q,
        k,
        v,
        cos_TR=angles.cos().to(triton_device),
        sin_TR=angles.sin().to(triton_device),
        interleaved=True,
        slot_mapping_T=torch.tensor([2, -1, 1], device=triton_device),
        key_cache_NSGD=caches[0],
        value_cache_NSGD=caches[1],
        q_norm_weight_D=weight.to(triton_device),
        eps=EPS,
        backend="triton",
    )
    expected_queries, expected_keys = attention_inputs_reference(
        q.cpu(), k.cpu(), (angles.cos(), angles.sin()), interleaved=True, norm_weights=(weight, None), eps=EPS
    )
    _assert_close(queries.cpu().double(), expected_queries, 1e-5)
    for cache, expected in zip(caches, (expected_keys, v.cpu().double()), strict=True):
        _assert_close(cache.cpu().double().flatten(0, 1)[[2, 1]], expected[[0, 2]], 1e-5)
