"""Tuned data: GPU families, the form of the files, and tuner launches that reach the classes they are meant for."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import moeserve_kernels
from moeserve_kernels.tuning import Tuning, family, load_tuning, nearest_family

TABLES = sorted(Path(moeserve_kernels.__path__[0]).glob("*/tuned.json"))


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 9), "sm_86"),
        ((9, 0), "sm_90"),
        ((10, 3), "sm_100"),
        ((12, 0), "sm_86"),
    ],
)
def test_family(capability: tuple[int, int], expected: str) -> None:
    """12.0 has the shared memory of consumer GPUs, not that of 10.0."""
    assert family(capability) == expected


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [("sm_70", "sm_80"), ("sm_80", "sm_80"), ("sm_86", "sm_80"), ("sm_90", "sm_90"), ("sm_120", "sm_100")],
)
def test_nearest_family(wanted: str, expected: str) -> None:
    assert nearest_family(wanted, ["sm_100", "sm_80", "sm_90"]) == expected


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.parent.name)
def test_the_tuner_writes_files_as_they_are(path: Path) -> None:
    pytest.importorskip("triton")
    from benchmarks.tune_kernels import as_text

    assert as_text(json.loads(path.read_text())) == path.read_text()


class FirstAsked(dict[str, Any]):
    """A table that remembers its classes that were asked for."""

    def __init__(self, table: Tuning) -> None:
        super().__init__(table)
        self.asked: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.asked.add(name)
        return super().__getitem__(name)


@pytest.mark.parametrize("tuned_family", ["sm_80", "sm_90"])
def test_every_class_is_tuned_by_a_launch_that_reads_it(tuned_family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from triton.runtime.jit import JITFunction

    from benchmarks.kernels import tunable

    def empty(*shape: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*shape, device=device, dtype=dtype)

    monkeypatch.setattr(tunable, "_randn", empty)
    monkeypatch.setattr(tunable, "NUM_EXPERTS", 8)
    monkeypatch.setattr(tunable, "TOKENS_OF_PHASE", {"decode": 4, "mixed": 32, "prefill": 512})
    monkeypatch.setattr(JITFunction, "run", lambda self, *args, grid, warmup, **kwargs: None)
    tuned: dict[str, set[str]] = {path.parent.name: set() for path in TABLES}
    for one in tunable.tunables(torch.device("cpu"), has_float8=tuned_family == "sm_90"):
        table = FirstAsked(load_tuning(one.op, tuned_family))
        for candidate in (one.candidates[0], one.candidates[-1]):
            config = {**table[one.shape_class], **candidate}
            assert config.keys() == table[one.shape_class].keys(), f"{one.op} {one.shape_class}: unknown sizes"
            changed = FirstAsked(one.table_with(config, table))
            one.launch(tuning=changed)
            assert one.shape_class in changed.asked
        tuned[one.op].add(one.shape_class)
    assert tuned == {op: set(load_tuning(op, tuned_family)) for op in tuned}


def test_the_fastest_candidate_is_chosen() -> None:
    """One that does not fit is passed over, and a partner takes its rows."""
    pytest.importorskip("triton")
    from triton.runtime.errors import OutOfResources

    from benchmarks.kernels.tunable import Tunable, candidates
    from benchmarks.tune_kernels import choose

    seconds = {16: 3.0, 32: 1.0, 64: 2.0}

    class FakeClock:
        def time(self, calls: Mapping[str, Any]) -> dict[str, tuple[float, ...]]:
            return {name: (seconds[call()],) * 3 for name, call in calls.items()}

    def launch(tuning: Tuning) -> int:
        if tuning["a"]["BLOCK_M"] == 128:
            raise OutOfResources(required=2, limit=1, name="shared memory")
        return tuning["a"]["BLOCK_M"]

    choices = candidates(BLOCK_M=(16, 32, 64, 128))
    one = Tunable(op="op", shape_class="a", candidates=choices, launch=launch, partner="b")
    before = {"a": {"BLOCK_M": 16, "num_warps": 4}, "b": {"BLOCK_M": 16, "num_warps": 8}}
    choice, table = choose(one, before, FakeClock())  # type: ignore[arg-type]
    assert table == {"a": {"BLOCK_M": 32, "num_warps": 4}, "b": {"BLOCK_M": 32, "num_warps": 8}}
    assert (choice.microseconds, choice.microseconds_before, choice.num_tried) == (1e6, 3e6, 3)
