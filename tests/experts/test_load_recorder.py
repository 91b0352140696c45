"""Loads are counted by phase and layer, and handed over window by window."""

import pytest
import torch

from moeserve.experts.load_recorder import LoadRecorder, LoadSample
from moeserve.layers.forward_batch import count_decode_tokens
from moeserve.testing.fakes import FakeClock

CPU = torch.device("cpu")


def recorder(samples: list[LoadSample], clock: FakeClock) -> LoadRecorder:
    return LoadRecorder(
        num_layers=2,
        num_experts=5,
        device=CPU,
        window_s=10.0,
        on_window=samples.append,
        clock=clock,
        unix_time=lambda: 1000.0 + clock.now,
    )


@pytest.mark.parametrize(
    ("query_lens", "expected"), [((), 0), ((1, 1), 2), ((7,), 0), ((1, 7), 1), ((1, 1, 3, 1), 2), ((3, 1), 0)]
)
def test_decode_tokens_are_those_of_leading_requests_with_one(query_lens: tuple[int, ...], expected: int) -> None:
    assert count_decode_tokens(query_lens) == expected


@pytest.mark.parametrize(("num_tokens", "num_decode_tokens"), [(0, 0), (6, 0), (6, 6), (6, 2), (1, 1)])
def test_every_choice_is_counted_once_in_its_phase(num_tokens: int, num_decode_tokens: int) -> None:
    samples: list[LoadSample] = []
    clock = FakeClock()
    loads = recorder(samples, clock)
    expert_ids_TK = torch.randint(0, 5, (num_tokens, 3), generator=torch.Generator().manual_seed(num_tokens))
    with loads.step(num_prefill_tokens=num_tokens - num_decode_tokens, num_decode_tokens=num_decode_tokens):
        layer = loads.layers[1]
        load_E, num_counted = layer.first_counter(num_tokens, num_decode_tokens)
        load_E += torch.bincount(expert_ids_TK[:num_counted].flatten(), minlength=5)
        layer.count_rest(expert_ids_TK, num_decode_tokens)
        clock.advance(10.0)
    with loads.step(num_prefill_tokens=0, num_decode_tokens=0):
        pass
    (sample,) = samples
    for counted_LE, tokens in (
        (sample.decode_load_LE, expert_ids_TK[:num_decode_tokens]),
        (sample.prefill_load_LE, expert_ids_TK[num_decode_tokens:]),
    ):
        assert counted_LE[0].tolist() == [0] * 5
        assert counted_LE[1].tolist() == torch.bincount(tokens.flatten(), minlength=5).tolist()
    assert (sample.num_prefill_tokens, sample.num_decode_tokens) == (num_tokens - num_decode_tokens, num_decode_tokens)


def test_windows_follow_each_other_and_leave_idle_time_out() -> None:
    samples: list[LoadSample] = []
    clock = FakeClock()
    loads = recorder(samples, clock)

    def step(*, seconds: float) -> None:
        with loads.step(num_prefill_tokens=2, num_decode_tokens=1):
            loads.layers[0].first_counter(2, 0)[0][3] += 1
            loads.layers[0].add_expert_seconds(seconds / 4)
            clock.advance(seconds)

    for seconds in (4.0, 4.0, 4.0):  # the third one ends the window's time, the next step hands it over
        step(seconds=seconds)
    clock.advance(100.0)
    assert samples == []
    step(seconds=4.0)
    clock.advance(1.0)
    step(seconds=6.0)
    step(seconds=1.0)
    first, second = samples
    assert (first.start_s, first.end_s, first.num_steps, first.step_s, first.expert_s) == (1000.0, 1012.0, 3, 12.0, 3.0)
    assert (second.start_s, second.end_s, second.num_steps, second.step_s) == (1112.0, 1123.0, 2, 10.0)
    assert (second.num_prefill_tokens, second.num_decode_tokens) == (4, 2)
    assert [int(sample.prefill_load_LE.sum()) for sample in samples] == [3, 2]
