"""Load reports become windows, and windows a history."""

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from moeserve.engine.placement_messages import LoadReport, PlacementShape, pack_array
from moeserve.server.placement.loads import MAX_HISTORY_BYTES, MAX_HISTORY_WINDOWS, LoadHistory, ReportMerger, load_of

SHAPE = PlacementShape(
    num_layers=1, moe_layer_ids=[0], num_logical_experts=3, top_k=1, num_physical_by_rank=[3], node_of_rank=[0],
    expert_bytes=1, num_spare_places=1,
)  # fmt: skip
REPORT = LoadReport(
    dp_rank=0, start_s=5.0, end_s=7.0, num_steps=4, num_prefill_tokens=3, num_decode_tokens=2, step_s=1.0, expert_s=0.5,
    prefill_load=pack_array(np.array([[1, 2, 0]]), "<i8"), decode_load=pack_array(np.array([[0, 0, 2]]), "<i8"),
)  # fmt: skip


def report(**changed: Any) -> LoadReport:
    return msgspec.structs.replace(REPORT, **changed)


def merger(dp_size: int = 2) -> ReportMerger:
    return ReportMerger(SHAPE, dp_size=dp_size, patience_s=5.0)


def test_a_window_is_complete_with_the_last_replica() -> None:
    merging = merger()
    assert merging.add(REPORT, 100.0) is None
    interval = merging.add(report(dp_rank=1, num_decode_tokens=5, num_steps=5, step_s=1.5), 100.5)
    assert interval is not None
    prefill, decode = interval.windows
    assert (prefill.phase, decode.phase) == ("prefill", "decode")
    assert prefill.expert_load_LE.tolist() == [[2, 4, 0]]
    assert decode.expert_load_LE.tolist() == [[0, 0, 4]]
    assert (prefill.num_tokens, decode.num_tokens) == (6, 7)
    # On the clock of whoever receives it, however wrong the sender's is.
    assert (interval.start_s, interval.start_s + interval.duration_s) == (98.0, 100.5)
    # Replicas step together: steps are not added up.
    assert (interval.steps.num_steps, interval.steps.step_s, interval.steps.num_tokens) == (5, 1.5, 13)
    assert interval.steps.expert_share == pytest.approx(0.5 / 1.5)


def test_two_reports_of_one_replica_before_the_other_ones_are_added() -> None:
    merging = merger()
    assert merging.add(REPORT, 100.0) is None
    assert merging.add(report(expert_s=None), 102.0) is None
    interval = merging.add(report(dp_rank=1, num_steps=7, step_s=1.9), 102.1)
    assert interval is not None
    assert (interval.steps.num_steps, interval.steps.step_s) == (8, 2.0)
    assert interval.steps.expert_share == 0.5
    assert interval.start_s == 98.0
    assert merging.add(report(dp_rank=1), 104.0) is None


def test_late_replicas_are_waited_for_so_long() -> None:
    merging = merger()
    assert merging.tick(50.0) is None
    merging.add(REPORT, 100.0)
    assert merging.tick(105.0) is None
    interval = merging.tick(105.1)
    assert interval is not None
    assert interval.steps.num_tokens == 5
    assert merging.tick(200.0) is None


def test_a_clock_that_was_set_back_leaves_an_empty_time() -> None:
    interval = merger(1).add(report(end_s=1.0), 100.0)
    assert interval is not None
    assert interval.duration_s == 0.0


@pytest.mark.parametrize(
    "wrong", [{"dp_rank": 2}, {"dp_rank": -1}, {"decode_load": b""}, {"prefill_load": bytes(8 * 6)}]
)
def test_reports_that_fit_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="replica"):
        merger().add(report(**wrong), 100.0)


def test_history_keeps_the_newest_exactly() -> None:
    history = LoadHistory(SHAPE)
    interval = merger(1).add(REPORT, 100.0)
    assert interval is not None
    large = np.array([[2**24, 1, 0]], dtype=np.float64)
    for index in range(MAX_HISTORY_WINDOWS + 3):
        windows = tuple(replace(window, expert_load_LE=large - [[index, 0, 0]]) for window in interval.windows)
        history.add(replace(interval, windows=windows))
    assert (len(history), history.num_added) == (MAX_HISTORY_WINDOWS, MAX_HISTORY_WINDOWS + 3)
    newest = history.newest(num_windows=2)
    assert [each.windows[0].expert_load_LE[0, 0] for each in newest] == [2**24 - index for index in (721, 722)]
    assert load_of(newest, "mixed")[0].tolist() == [[4 * 2**24 - 2 * (721 + 722), 4, 0]]
    assert load_of(newest, "decode")[1] == 4
    # Each covers two seconds.
    assert [len(history.covering(window_s)) for window_s in (0.1, 2.0, 2.1, 6.0, 1e9)] == [1, 1, 2, 3, 720]


def test_history_of_a_large_model_is_bounded_in_bytes() -> None:
    shape = msgspec.structs.replace(SHAPE, num_layers=58, num_logical_experts=MAX_HISTORY_BYTES // 58 // 8 // 2)
    history = LoadHistory(shape)
    assert history.fits(shape)
    assert not history.fits(SHAPE)
    interval = merger(1).add(REPORT, 100.0)
    assert interval is not None
    for _ in range(5):
        history.add(interval)
    assert len(history) == 2
