"""Layouts a model cannot be split into are refused with the number to change."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from moeserve.config import ConfigError, ParallelConfig
from moeserve.models.layout import check_layout, starting_placement
from moeserve.testing.placements import random_placement
from moeserve.testing.tiny_models import tiny_spec
from moeserve_placement import ExpertPlacement


def layout(tp: int = 1, dp: int = 1, redundant: int = 0, file: Path | None = None) -> ParallelConfig:
    return ParallelConfig(
        tensor_parallel_size=tp,
        data_parallel_size=dp,
        num_redundant_experts=redundant,
        placement_file=str(file) if file is not None else None,
    )


@pytest.mark.parametrize(("tp", "dp"), [(1, 1), (2, 1), (4, 1), (1, 4), (2, 2), (1, 3), (1, 8)])
def test_accepts_what_divides(tp: int, dp: int) -> None:
    check_layout(tiny_spec(num_heads=4, num_kv_heads=2), layout(tp, dp))


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "tp"), [(4, 2, 3), (4, 2, 8), (12, 4, 6), (6, 3, 2), (5, 5, 2)])
def test_refuses_heads_that_do_not_divide(num_heads: int, num_kv_heads: int, tp: int) -> None:
    spec = tiny_spec(num_heads=num_heads, num_kv_heads=num_kv_heads, num_experts=8)
    with pytest.raises(ConfigError, match=rf"parallel.tensor_parallel_size must be one of 1, .*got {tp}"):
        check_layout(spec, layout(tp))


def test_the_accepted_sizes_it_names_are_accepted() -> None:
    spec = tiny_spec("deepseek", num_heads=8)
    with pytest.raises(ConfigError, match="must be one of 1, 2, 4, 8 for the 8 attention heads"):
        check_layout(spec, layout(3))
    for tp in (1, 2, 4, 8):
        check_layout(spec, layout(tp))


@pytest.mark.parametrize(("tp", "dp", "redundant"), [(2, 3, 0), (1, 6, 0), (4, 2, 2)])
def test_refuses_more_ranks_than_physical_experts(tp: int, dp: int, redundant: int) -> None:
    spec = tiny_spec(num_experts=5)
    missing = tp * dp - 5
    with pytest.raises(ConfigError, match=rf"use at most {5 + redundant} ranks.*num_redundant_experts.*{missing}$"):
        check_layout(spec, layout(tp, dp, redundant))


def test_redundant_experts_make_room_for_more_ranks() -> None:
    check_layout(tiny_spec(num_experts=5), layout(dp=7, redundant=2))


def test_refuses_more_copies_than_ranks() -> None:
    with pytest.raises(ConfigError, match=r"num_redundant_experts must be at most 8 .*got 9"):
        check_layout(tiny_spec(num_experts=8), layout(dp=2, redundant=9))


def test_starts_with_experts_in_order() -> None:
    placement = starting_placement(tiny_spec(num_experts=4, num_layers=3), layout(tp=2, redundant=1))
    assert placement.physical_to_logical_LP.tolist() == [[0, 1, 2, 3, 0]] * 3
    assert placement.epoch == 0


def test_only_moe_layers_are_placed() -> None:
    placement = starting_placement(tiny_spec("deepseek", num_layers=3), layout())
    assert placement.num_layers == 2


def test_starts_with_the_placement_file(tmp_path: Path) -> None:
    path = tmp_path / "placement.json"
    saved = random_placement(num_layers=2, num_experts=8, num_ranks=2, num_redundant_experts=3, epoch=5)
    saved.save(path)
    for redundant in (0, 3):
        loaded = starting_placement(tiny_spec(num_experts=8), layout(dp=2, redundant=redundant, file=path))
        assert np.array_equal(loaded.physical_to_logical_LP, saved.physical_to_logical_LP)
        assert loaded.epoch == 5


@pytest.mark.parametrize(
    ("num_layers", "num_experts", "num_ranks", "message"),
    [
        (3, 8, 2, "for 3 layers, but the model has 2"),
        (2, 6, 2, "for 6 logical experts, but the model has 8"),
        (2, 8, 4, "for 4 ranks, but tensor_parallel_size x data_parallel_size is 2"),
    ],
)
def test_refuses_a_placement_file_of_another_shape(
    tmp_path: Path, num_layers: int, num_experts: int, num_ranks: int, message: str
) -> None:
    path = tmp_path / "placement.json"
    random_placement(num_layers=num_layers, num_experts=num_experts, num_ranks=num_ranks).save(path)
    with pytest.raises(ConfigError, match=message):
        check_layout(tiny_spec(num_experts=8), layout(dp=2, file=path))


def test_refuses_a_placement_file_with_empty_places(tmp_path: Path) -> None:
    file = tmp_path / "placement.json"
    spec = tiny_spec()
    num_experts, num_layers = spec.num_experts, len(spec.moe_layer_ids)
    row = np.append(np.arange(num_experts), -1)
    ExpertPlacement(
        physical_to_logical_LP=np.tile(row, (num_layers, 1)), num_logical_experts=num_experts, num_ranks=1
    ).save(file)
    with pytest.raises(ConfigError, match="leaves places empty"):
        starting_placement(spec, ParallelConfig(placement_file=str(file)))


def test_refuses_a_redundancy_the_placement_file_does_not_have(tmp_path: Path) -> None:
    path = tmp_path / "placement.json"
    random_placement(num_layers=2, num_experts=8, num_ranks=2, num_redundant_experts=3).save(path)
    with pytest.raises(ConfigError, match=r"num_redundant_experts must be auto, 0 or 3 .*got 1"):
        check_layout(tiny_spec(num_experts=8), layout(dp=2, redundant=1, file=path))


@pytest.mark.parametrize("content", [None, "{", '{"format": "other"}'])
def test_names_a_placement_file_it_cannot_read(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "placement.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=rf"parallel.placement_file: placement file {path}"):
        check_layout(tiny_spec(), layout(file=path))


def test_checks_without_torch() -> None:
    code = "import sys, moeserve.models.layout; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
