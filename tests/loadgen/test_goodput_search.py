"""The search against servers whose knee is known: where it ends, and how often its interval is right."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy.optimize import brentq

from moeserve.loadgen.crossing import crossing_interval
from moeserve.loadgen.goodput_search import GoodputSearch, MaxGoodput, SearchSettings, Trial

Server = Callable[[float], tuple[bool, ...]]
"""From a rate to which requests of a trial are good."""


def _search(server: Server, *, start_rate: float, settings: SearchSettings | None = None) -> MaxGoodput:
    search = GoodputSearch(settings or SearchSettings(), start_rate=start_rate)
    while (rate := search.next_rate()) is not None:
        is_good = server(rate)
        search.add(Trial(rate=rate, is_good=is_good, goodput_rps=rate * sum(is_good) / len(is_good)))
    return search.result()


def _step(knee: float) -> Server:
    return lambda rate: (rate <= knee,) * 100


@pytest.mark.parametrize("knee", [0.037, 1.0, 7.3, 480.0])
@pytest.mark.parametrize("start_rate", [0.5, 8.0])
def test_a_sharp_knee_is_found_within_the_tolerance(knee: float, start_rate: float) -> None:
    found = _search(_step(knee), start_rate=start_rate)
    assert found.rate is not None
    assert found.rate <= knee < found.rate * 1.05 * (1 + 1e-9)
    assert found.low <= knee <= found.high
    assert found.goodput_rps == pytest.approx(found.rate)
    assert "longer trials" not in found.text
    # Both ends were tried twice.
    at_ends = [trial.rate for trial in found.trials if trial.rate == found.rate]
    assert len(at_ends) == 2


def test_a_server_that_fails_at_any_rate_ends_the_search() -> None:
    found = _search(lambda rate: (False,) * 10, start_rate=1.0)
    assert found.rate is None
    assert found.goodput_rps is None
    assert "no rate passed" in found.text
    assert len(found.trials) == SearchSettings().max_trials


def test_a_server_that_never_fails_ends_the_search() -> None:
    found = _search(lambda rate: (True,) * 10, start_rate=1.0)
    assert found.rate == 2.0 ** (SearchSettings().max_trials - 1)


def test_a_rate_that_passed_by_luck_is_left_when_it_fails_again() -> None:
    tries: dict[float, int] = {}

    def server(rate: float) -> tuple[bool, ...]:
        tries[rate] = tries.get(rate, 0) + 1
        lucky = rate <= 9.0 and tries[rate] == 1
        return (rate <= 4.0 or lucky,) * 100

    found = _search(server, start_rate=1.0, settings=SearchSettings(max_trials=99))
    assert found.rate is not None
    # The trials of a lucky rate do not pass together.
    assert found.rate <= 4.0 < found.rate * 1.05 * (1 + 1e-9)


def test_half_good_is_not_enough_and_exactly_enough_is() -> None:
    settings = SearchSettings(attainment=0.95, max_trials=1)
    for num_good, passes in ((94, False), (95, True)):
        search = GoodputSearch(settings, start_rate=1.0)
        search.add(Trial(rate=1.0, is_good=(True,) * num_good + (False,) * (100 - num_good), goodput_rps=1.0))
        assert (search.result().rate is not None) == passes


def _single_server_queue(rng: np.random.Generator, *, duration_s: float, target_s: float) -> Server:
    """M/M/1 with ten requests a second: good when it began to be served in time."""

    def server(rate: float) -> tuple[bool, ...]:
        now_s = free_s = 0.0
        goods: list[bool] = []
        while now_s < duration_s or not goods:
            now_s += rng.exponential(1.0 / rate)
            start_s = max(now_s, free_s)
            free_s = start_s + rng.exponential(0.1)
            goods.append(start_s - now_s <= target_s)
        return tuple(goods)

    return server


@pytest.mark.parametrize(("duration_s", "target_s"), [(30.0, 0.5), (60.0, 2.0), (120.0, 0.5)])
def test_the_interval_holds_the_knee_of_a_queue_as_often_as_it_says(duration_s: float, target_s: float) -> None:
    """Requests behind each other in a queue are anything but independent. P(wait > t) = u exp(-(1 - u) t / service)."""
    knee = brentq(lambda rate: rate / 10 * math.exp(-(10 - rate) * target_s) - 0.05, 0.1, 9.9)
    num_searches, hits = 40, 0
    for seed in range(num_searches):
        rng = np.random.default_rng(seed)
        found = _search(_single_server_queue(rng, duration_s=duration_s, target_s=target_s), start_rate=2.0)
        hits += found.low <= knee <= found.high
    assert hits / num_searches >= 0.9


def test_longer_trials_narrow_the_interval() -> None:
    widths = []
    for duration_s in (60.0, 2000.0):
        rng = np.random.default_rng(3)
        found = _search(_single_server_queue(rng, duration_s=duration_s, target_s=0.5), start_rate=4.0)
        widths.append(found.high / found.low)
    assert widths[1] < 1.2 < widths[0]


def test_trials_that_do_not_tell_leave_the_whole_window() -> None:
    one = [(4.0, (True,) * 20)]
    assert crossing_interval(one, 0.95, estimate=4.0) == (2.0, 8.0)
    alike = [(4.0, (True, False) * 10), (4.2, (True, False) * 10), (4.4, (True, False) * 10)]
    assert crossing_interval(alike, 0.5, estimate=4.2) == pytest.approx((2.1, 8.4))


@pytest.mark.parametrize("values", [{"attainment": 0.0}, {"attainment": 1.0}, {"tolerance": 0.0}])
def test_settings_out_of_range(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(values))} must be"):
        SearchSettings(**values)


def test_a_start_rate_must_be_above_zero() -> None:
    with pytest.raises(ValueError, match="rate must be above 0"):
        GoodputSearch(SearchSettings(), start_rate=0.0)
