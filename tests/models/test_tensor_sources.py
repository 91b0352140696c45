"""Sources against numpy: every slice of a canonical tensor is put together as the whole would be."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeserve.models.tensor_sources import PerExpertSource, StoredTensor, TensorSource, WholeSource, split_range

NUM_EXPERTS, WIDTH, HIDDEN = 3, 4, 5
GATE_UP = np.arange(NUM_EXPERTS * 2 * WIDTH * HIDDEN).reshape(NUM_EXPERTS, 2 * WIDTH, HIDDEN)


def interleaved(tensor: Any) -> Any:
    gate, up = np.split(tensor, 2, axis=1)
    return np.stack((gate, up), axis=2).reshape(tensor.shape)


def whole(stored: Any, **layout: bool) -> tuple[TensorSource, dict[str, Any]]:
    return WholeSource(GATE_UP.shape, StoredTensor("x", stored.shape), **layout), {"x": stored}


def per_expert() -> tuple[TensorSource, dict[str, Any]]:
    tensors = {
        f"{expert}.{part}": GATE_UP[expert, part * WIDTH : (part + 1) * WIDTH]
        for expert in range(NUM_EXPERTS)
        for part in range(2)
    }
    experts = tuple(
        tuple(StoredTensor(f"{expert}.{part}", (WIDTH, HIDDEN)) for part in range(2)) for expert in range(NUM_EXPERTS)
    )
    return PerExpertSource(GATE_UP.shape, experts), tensors


LAYOUTS = {
    "fused": whole(GATE_UP),
    "transposed": whole(GATE_UP.swapaxes(1, 2), transposed=True),
    "interleaved": whole(interleaved(GATE_UP), interleaved=True),
    "interleaved and transposed": whole(interleaved(GATE_UP).swapaxes(1, 2), transposed=True, interleaved=True),
    "one tensor for each projection of each expert": per_expert(),
}


def assemble(source: TensorSource, tensors: dict[str, Any], ranges: tuple[range, ...]) -> Any:
    result = np.full([len(axis) for axis in ranges], -1)
    for copy in source.copies(ranges):
        part = tensors[copy.stored.name][np.ix_(*copy.ranges)]
        result[copy.into] = part.swapaxes(-1, -2) if copy.transposed else part
    return result


@st.composite
def ranges_of(draw: st.DrawFn, size: int) -> range:
    start, stop = draw(st.integers(0, size)), draw(st.integers(0, size))
    return range(size)[start : stop : draw(st.integers(1, 3))]


@pytest.mark.parametrize("layout", LAYOUTS)
@given(experts=ranges_of(NUM_EXPERTS), rows=ranges_of(2 * WIDTH), columns=ranges_of(HIDDEN))
def test_any_slice_is_that_of_the_whole(layout: str, experts: range, rows: range, columns: range) -> None:
    source, tensors = LAYOUTS[layout]
    found = assemble(source, tensors, (experts, rows, columns))
    np.testing.assert_array_equal(found, GATE_UP[np.ix_(experts, rows, columns)])


def test_only_the_tensors_of_the_asked_experts_are_named() -> None:
    source, _ = LAYOUTS["one tensor for each projection of each expert"]
    copies = source.copies((range(1, 2), range(WIDTH, 2 * WIDTH), range(HIDDEN)))
    assert [copy.stored.name for copy in copies] == ["1.1"]


@given(indices=ranges_of(9), sizes=st.sampled_from([(9,), (4, 5), (0, 9), (3, 3, 3), (1, 0, 8)]))
def test_a_split_range_is_the_same_indices_in_order(indices: range, sizes: tuple[int, ...]) -> None:
    starts = np.cumsum((0, *sizes))
    parts = list(split_range(indices, sizes))
    assert [starts[section] + i for section, local, _ in parts for i in local] == list(indices)
    assert [place for _, _, into in parts for place in range(into.start, into.stop)] == list(range(len(indices)))
    assert all(local for _, local, _ in parts)
