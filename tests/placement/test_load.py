"""Load windows, trace files and their errors."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeserve.testing.expert_loads import PATIENT
from moeserve_placement.load import (
    LoadError,
    LoadTrace,
    LoadWindow,
    merge_windows,
    read_trace,
    trace_from_routing_counts,
    write_trace,
)


def _window(start_s: float = 0.0, *, tokens: int = 4, phase: str = "decode", load: float = 1.0) -> LoadWindow:
    return LoadWindow(
        expert_load_LE=np.full((2, 3), load), start_s=start_s, end_s=start_s + 1, num_tokens=tokens, phase=phase
    )


@st.composite
def traces(draw: st.DrawFn) -> LoadTrace:
    """Whole counts and averages, with and without windows and SLO classes."""
    num_layers, num_experts = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    whole = draw(st.booleans())
    windows = [
        LoadWindow(
            expert_load_LE=rng.integers(0, 10**6, (num_layers, num_experts)) / (1.0 if whole else 7.0),
            start_s=index / 3,
            end_s=index / 3 + 0.25,
            num_tokens=draw(st.integers(0, 10**9)),
            num_steps=draw(st.integers(0, 100)),
            phase=draw(st.sampled_from(["prefill", "decode", "mixed"])),
            slo_shares=draw(st.dictionaries(st.text(max_size=5), st.floats(0, 1), max_size=2)),
        )
        for index in range(draw(st.integers(0, 3)))
    ]
    return LoadTrace(model="tiny", top_k=2, moe_layer_ids=tuple(range(1, 1 + num_layers)), windows=tuple(windows))


@PATIENT
@given(trace=traces(), suffix=st.sampled_from([".npz", ".jsonl"]))
def test_files_give_back_what_was_written(
    trace: LoadTrace, suffix: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("trace") / f"trace{suffix}"
    write_trace(path, trace)
    read = read_trace(path)
    assert (read.model, read.top_k, read.moe_layer_ids) == (trace.model, trace.top_k, trace.moe_layer_ids)
    assert len(read.windows) == len(trace.windows)
    for ours, theirs in zip(trace.windows, read.windows, strict=True):
        np.testing.assert_array_equal(ours.expert_load_LE, theirs.expert_load_LE)
        for name in ("start_s", "end_s", "num_tokens", "num_steps", "phase", "slo_shares"):
            assert getattr(ours, name) == getattr(theirs, name)


@pytest.mark.parametrize("name", ["bad.npz", "bad.jsonl"])
@pytest.mark.parametrize(
    "content", [b"", b"[]\n", b'{"format": "other"}\n', b'{"format": "moeserve-load-1"}\n', b"PK\x03\x04"]
)
def test_a_bad_file_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(LoadError, match=name.replace(".", r"\.")):
        read_trace(tmp_path / name)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"none\.npz: No such file"):
        read_trace(tmp_path / "none.npz")


def test_another_ending_is_refused(tmp_path: Path) -> None:
    trace = LoadTrace(model="tiny", top_k=1, moe_layer_ids=(), windows=())
    with pytest.raises(LoadError, match=r"\.npz or \.jsonl"):
        write_trace(tmp_path / "trace.csv", trace)
    with pytest.raises(LoadError, match=r"\.npz or \.jsonl"):
        read_trace(tmp_path / "trace.csv")


def test_routing_counts_become_one_window_a_domain(tmp_path: Path) -> None:
    path = tmp_path / "counts.json"
    counts = {"code": [[4, 0], [1, 3]], "prose": [[2, 2], [0, 4]]}
    path.write_text(json.dumps({"model": "m", "num_experts": 2, "top_k": 2, "layers": [0, 7], "counts": counts}))
    trace = trace_from_routing_counts(path)
    assert trace.moe_layer_ids == (0, 7)
    assert [window.num_tokens for window in trace.windows] == [2, 2]
    assert trace.windows[1].expert_load_LE.tolist() == [[2, 2], [0, 4]]
    path.write_text("{}")
    with pytest.raises(LoadError, match=r"counts\.json"):
        trace_from_routing_counts(path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"expert_load_LE": np.ones(3)}, "layers x experts"),
        ({"expert_load_LE": -np.ones((1, 3))}, "at least 0"),
        ({"end_s": -1.0}, "end after it starts"),
        ({"num_tokens": -1}, "at least 0 tokens"),
        ({"phase": "warmup"}, "phase must be one of prefill, decode, mixed"),
    ],
)
def test_windows_that_cannot_be_are_refused(changes: dict[str, object], words: str) -> None:
    values: dict[str, object] = {"expert_load_LE": np.ones((1, 3)), "start_s": 0.0, "end_s": 1.0, "num_tokens": 3}
    with pytest.raises(LoadError, match=words):
        LoadWindow(**(values | changes))


def test_a_trace_has_one_shape() -> None:
    with pytest.raises(LoadError, match="same 3 layers"):
        LoadTrace(model="m", top_k=1, moe_layer_ids=(0, 1, 2), windows=(_window(),))


def test_merged_windows_add_up() -> None:
    first = LoadWindow(
        expert_load_LE=np.ones((1, 2)), start_s=1, end_s=2, num_tokens=1, phase="prefill", slo_shares={"chat": 1.0}
    )
    second = LoadWindow(expert_load_LE=np.ones((1, 2)) * 3, start_s=2, end_s=4, num_tokens=3, num_steps=5)
    merged = merge_windows([first, second])
    assert merged.expert_load_LE.tolist() == [[4.0, 4.0]]
    assert (merged.start_s, merged.end_s, merged.num_tokens, merged.num_steps) == (1, 4, 4, 6)
    assert merged.phase == "mixed"
    assert merged.slo_shares == {"chat": 0.25}
    assert merged.assignments_per_layer == 8.0
