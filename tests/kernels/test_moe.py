"""moe_align and fused_moe: permutation invariants first, then numbers, on skewed and empty routings."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve_kernels import ExpertShape, PackedExperts, fused_moe, moe_align, native, pack_experts
from moeserve_kernels.backend import Backend
from moeserve_kernels.fused_moe.reference import fused_moe_reference
from moeserve_kernels.linear.quantize import dequantize_weight
from moeserve_kernels.moe_align.reference import moe_align_reference

pytestmark = pytest.mark.usefixtures("poisoned")

EXPERTS, WIDTH, HIDDEN = 5, 7, 9
"""Neither is a multiple of anything: every block and every pair is padded."""

BACKENDS: list[Backend] = ["torch", "cpu"]
CPU = torch.device("cpu")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    if request.param == "cpu" and not native.is_loaded():
        pytest.skip("no native kernels")
    backend: Backend = request.param
    return backend


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(-1, 6), max_size=40), st.integers(7, 9))
def test_moe_align(expert_ids: list[int], num_experts: int) -> None:
    ids = torch.tensor(expert_ids, dtype=torch.int64)
    expected_order, expected_counts = moe_align_reference(ids, num_experts)
    for backend in BACKENDS if native.is_loaded() else ["torch"]:
        order, counts = moe_align(ids, num_experts, backend=backend)
        assert sorted(order.tolist()) == list(range(len(expert_ids)))
        assert torch.equal(order, expected_order)
        assert torch.equal(counts, expected_counts)


def _weights(dtype: torch.dtype = torch.float32, *, bias: bool = False) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    weights = {
        "gate_up_proj_p2FD": randn(EXPERTS, 2 * WIDTH, HIDDEN),
        "down_proj_pDF": randn(EXPERTS, HIDDEN, WIDTH),
    }
    if bias:
        weights |= {"gate_up_bias_p2F": randn(EXPERTS, 2 * WIDTH), "down_bias_pD": randn(EXPERTS, HIDDEN)}
    return weights


def _inputs(num_tokens: int, top_k: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.randn(num_tokens, HIDDEN, generator=generator).to(dtype), torch.rand(
        num_tokens, top_k, generator=generator
    )


def _ids(num_tokens: int, top_k: int, *, lowest: int = 0) -> torch.Tensor:
    return torch.randint(lowest, EXPERTS, (num_tokens, top_k), generator=torch.Generator().manual_seed(0))


ROUTINGS = {
    "one_token": [[3, 1]],
    "more_rows_of_one_expert_than_a_tile": [[2, 2]] * 9,
    "nothing_is_ours": [[-1, -1], [-1, -1]],
    "some_are_ours": [[-1, 4], [0, -1], [-1, -1], [0, 4]],
    "first_and_last_expert_idle": [[1, 2], [3, 1], [2, 3]],
    "no_tokens": [],
}


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("activation", ["silu", "swiglu_clamped"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.15), (torch.float16, 0.02)])
def test_fused_moe(
    *,
    routing: str,
    activation: Any,
    bias: bool,
    quantization: Any,
    dtype: torch.dtype,
    tolerance: float,
    backend: Backend,
) -> None:
    ids = torch.tensor(ROUTINGS[routing], dtype=torch.int64).reshape(-1, 2)
    hidden, weights = _inputs(len(ids), 2, dtype)
    parameters = _weights(dtype, bias=bias)
    experts = pack_experts(**parameters, quantization=quantization, backend=backend)
    options = {"activation": activation, "alpha": 1.5, "limit": 1.0}  # a limit that clamps
    actual = fused_moe(hidden, weights, ids, experts, **options)
    for name in ("gate_up", "down") if quantization else ():
        records = [experts.read(place) for place in range(EXPERTS)]
        rounded = [dequantize_weight(r[f"{name}_proj"], r[f"{name}_scale"], torch.float32) for r in records]
        parameters["gate_up_proj_p2FD" if name == "gate_up" else "down_proj_pDF"] = torch.stack(rounded)
    expected = fused_moe_reference(hidden, weights, ids, **parameters, **options)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


def test_experts_of_two_ranks_add_up(backend: Backend) -> None:
    """Each choice is on exactly one rank, the others mark it -1."""
    ids = torch.tensor([[0, 3], [4, 1], [2, 0]])
    hidden, weights = _inputs(3, 2)
    parameters = _weights()
    halves = [
        pack_experts(*(x[part] for x in parameters.values()), backend=backend) for part in (slice(2), slice(2, 5))
    ]
    first = fused_moe(hidden, weights, torch.where(ids < 2, ids, -1), halves[0])
    second = fused_moe(hidden, weights, torch.where(ids >= 2, ids - 2, -1), halves[1])
    whole = fused_moe(hidden, weights, ids, pack_experts(**parameters, backend=backend))
    torch.testing.assert_close(first + second, whole)


def test_order_of_experts_in_memory_does_not_matter(backend: Backend) -> None:
    """Placement invariance, to the bit: the sum follows k, not the place of the expert."""
    ids, (hidden, weights) = _ids(16, 3), _inputs(16, 3)
    parameters = _weights(bias=True)
    places = torch.tensor([3, 0, 4, 2, 1])  # expert e lies at places[e]
    moved = {name: torch.empty_like(x).index_copy_(0, places, x) for name, x in parameters.items()}
    actual = fused_moe(hidden, weights, places[ids], pack_experts(**moved, backend=backend))
    assert torch.equal(actual, fused_moe(hidden, weights, ids, pack_experts(**parameters, backend=backend)))


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_token_knows_no_batch(quantization: Any, dtype: torch.dtype, num_threads: int) -> None:
    """Alone, with others (more than a group of tiles of an expert), beside a token of NaN, with more threads."""
    if not native.is_loaded():
        pytest.skip("torch's order of summation follows the shape")
    ids, (hidden, weights) = _ids(170, 3, lowest=-1), _inputs(170, 3, dtype)
    experts = pack_experts(**_weights(dtype, bias=True), quantization=quantization)
    alone = torch.cat([fused_moe(hidden[[t]], weights[[t]], ids[[t]], experts) for t in range(170)])
    torch.set_num_threads(num_threads)
    try:
        for count in (2, 7, 170):
            assert torch.equal(fused_moe(hidden[:count], weights[:count], ids[:count], experts), alone[:count])
        hidden[0] = math.nan
        assert torch.equal(fused_moe(hidden, weights, ids, experts)[1:], alone[1:])
    finally:
        torch.set_num_threads(1)


def test_weights_of_choices_elsewhere_do_not_count(backend: Backend) -> None:
    """A choice of -1 adds nothing, not even 0 * NaN."""
    ids, (hidden, weights) = torch.tensor([[1, -1], [-1, -1]]), _inputs(2, 2)
    experts = pack_experts(**_weights(), backend=backend)
    expected = fused_moe(hidden, torch.where(ids < 0, 0.0, weights), ids, experts)
    if backend == "cpu":
        weights[ids < 0] = math.nan
    assert torch.equal(fused_moe(hidden, weights, ids, experts), expected)
    assert expected[1].tolist() == [0.0] * HIDDEN


def test_many_tokens_are_taken_in_parts() -> None:
    """More rows than the workspace holds: as the tokens one after another."""
    if not native.is_loaded():
        pytest.skip("no native kernels")
    hidden_size, width, num_tokens = 16, 1, 300_000
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(2, 2 * width, hidden_size, generator=generator), torch.randn(2, hidden_size, width)]
    hidden = torch.randn(num_tokens, hidden_size, generator=generator)
    routing, ids = torch.rand(num_tokens, 4, generator=generator), torch.randint(0, 2, (num_tokens, 4))
    experts = pack_experts(*weights)
    whole = fused_moe(hidden, routing, ids, experts)
    for tokens in (slice(0, 3), slice(num_tokens - 3, num_tokens), slice(250_000, 250_003)):
        assert torch.equal(fused_moe(hidden[tokens], routing[tokens], ids[tokens], experts), whole[tokens])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_record_moves_between_places_and_backends(
    dtype: torch.dtype, quantization: Any, bias: bool, backend: Backend
) -> None:
    """Bit for bit, into memory that held something else, and nothing of the neighbours changes."""
    experts = pack_experts(**_weights(dtype, bias=bias), quantization=quantization, backend=backend)
    for other in BACKENDS if native.is_loaded() else ["torch"]:
        target = PackedExperts.allocate(3, experts.shape, device=CPU, backend=other)
        for place, source in ((0, 4), (1, 3), (2, 2), (1, 0)):
            target.write(place, experts.read(source))
        for place, source in ((0, 4), (1, 0), (2, 2)):
            record, expected = target.read(place), experts.read(source)
            assert list(record) == list(expected) == list(experts.shape.record)
            for name, tensor in expected.items():
                assert tensor.dtype == record[name].dtype
                assert torch.equal(record[name], tensor), name
    total = sum(tensor.nbytes for tensor in experts.read(0).values())
    assert total == experts.shape.record_bytes


def test_a_record_of_another_shape_is_refused(backend: Backend) -> None:
    experts = pack_experts(**_weights(), backend=backend)
    record = experts.read(0)
    with pytest.raises(AssertionError, match="a record holds"):
        experts.write(0, {"down_proj": record["down_proj"]})
    with pytest.raises(AssertionError, match="down_proj is"):
        experts.write(0, record | {"down_proj": record["down_proj"].T})
    shape = ExpertShape(hidden_size=HIDDEN, width=WIDTH, dtype=torch.bfloat16)
    with pytest.raises(AssertionError, match="gate_up_proj is"):
        PackedExperts.allocate(1, shape, device=CPU, backend=backend).write(0, record)


def test_ids_beyond_the_experts_are_refused() -> None:
    """They would be indices into somebody else's memory."""
    if not native.is_loaded():
        pytest.skip("no native kernels")
    hidden, weights = _inputs(1, 2)
    for bad in (EXPERTS, -2):
        with pytest.raises(RuntimeError, match="expert ids must be between -1 and 4"):
            fused_moe(hidden, weights, torch.tensor([[0, bad]]), pack_experts(**_weights()))
