"""The noise floor against counts drawn at random, against closed forms, and its limits."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeserve.testing.expert_loads import PATIENT
from moeserve_placement.noise_floor import noise_floor


@pytest.mark.parametrize(("per_rank", "expected"), [(32, 0.80), (128, 0.89), (1024, 0.96)])
def test_eight_ranks(per_rank: int, expected: float) -> None:
    assert noise_floor(per_rank, 8) == pytest.approx(expected, abs=0.005)


@pytest.mark.parametrize("num_ranks", [2, 3, 8, 32, 200])
@pytest.mark.parametrize("per_rank", [1, 2, 4, 17, 128, 1024])
def test_it_is_what_random_routing_shows(num_ranks: int, per_rank: int) -> None:
    rng = np.random.default_rng(7)
    counts = rng.multinomial(per_rank * num_ranks, np.ones(num_ranks) / num_ranks, size=4000)
    drawn = per_rank / counts.max(axis=1)
    # Five standard errors of the drawn mean, and what the Edgeworth series leaves out for few ranks.
    tolerance = 5.0 * drawn.std() / np.sqrt(drawn.size) + 0.002
    assert noise_floor(per_rank, num_ranks) == pytest.approx(drawn.mean(), abs=tolerance)


def test_two_assignments_on_two_ranks() -> None:
    # Half the time apart (1.0), half the time together (0.5); the Poisson of 2 is by Stirling's series.
    assert noise_floor(1, 2) == pytest.approx(0.75, abs=1e-3)


@pytest.mark.parametrize(("per_rank", "num_ranks", "expected"), [(0, 8, 1.0), (5, 1, 1.0), (0.01, 8, 1 / 8)])
def test_nothing_to_balance(per_rank: float, num_ranks: int, expected: float) -> None:
    assert noise_floor(per_rank, num_ranks) == pytest.approx(expected, abs=1e-3)


@PATIENT
@given(per_rank=st.floats(0.2, 1e7), num_ranks=st.integers(1, 1024), factor=st.floats(1.5, 10))
def test_more_assignments_never_lower_it(per_rank: float, num_ranks: int, factor: float) -> None:
    fewer, more = noise_floor(per_rank, num_ranks), noise_floor(per_rank * factor + 1, num_ranks)
    assert 0 < fewer <= 1
    assert more <= 1 + 1e-9
    assert more >= fewer - 2e-3


def test_it_goes_on_smoothly_where_the_sum_stops() -> None:
    assert noise_floor(1.001e6, 64) == pytest.approx(noise_floor(0.999e6, 64), abs=1e-5)


@pytest.mark.parametrize(("per_rank", "num_ranks"), [(-1, 4), (3, 0)])
def test_what_cannot_be_is_refused(per_rank: float, num_ranks: int) -> None:
    with pytest.raises(ValueError, match="at least"):
        noise_floor(per_rank, num_ranks)
