"""Seeds: every sequence has one of its own, and it fits the 64 bits of a message."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeserve.engine.sampling_params import SamplingParams, child_seed

seeds = st.integers(-(2**63), 2**63 - 1)


@given(seed=seeds)
def test_children_have_seeds_of_their_own(seed: int) -> None:
    children = [child_seed(seed, index) for index in range(128)]
    assert children[0] == seed
    assert len(set(children)) == 128
    for child in children:
        params = SamplingParams(seed=child)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


@given(seed=seeds, index=st.integers(1, 127))
def test_neighbouring_requests_share_no_children(seed: int, index: int) -> None:
    """Users number their seeds: seed + 1 must not be the next child of seed."""
    neighbour = seed + 1 if seed < 2**63 - 1 else seed - 1
    assert child_seed(seed, index) not in {child_seed(neighbour, other) for other in range(128)}


def test_splitmix_of_the_paper() -> None:
    """The first outputs of splitmix64 seeded with 1234567, a much published test vector, without their last bit."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [child_seed(1234567, index) for index in (1, 2, 3)] == [value >> 1 for value in published]


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1, 10**400])
def test_a_seed_of_more_than_64_bits_is_refused(seed: int) -> None:
    with pytest.raises(ValueError, match="seed must fit 64 bits"):
        SamplingParams(seed=seed)
