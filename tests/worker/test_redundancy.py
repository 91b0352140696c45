"""What `num_redundant_experts = "auto"` comes to: as many as help, never more than the KV cache can bear."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeserve.config import Config, ParallelConfig, config_from_dict
from moeserve.models.hf_config import read_model_spec
from moeserve.models.layout import evenly_redundant
from moeserve.parallel import ParallelContext
from moeserve.testing.checkpoints import write_tiny_checkpoint
from moeserve.testing.migrating_engine import OneRank, run_engine
from moeserve.testing.thread_ranks import run_thread_ranks
from moeserve.worker import redundancy as module
from moeserve.worker.redundancy import choose_more_places
from moeserve.worker.worker import Worker, build_worker
from moeserve_placement import ExpertPlacement


@given(num_experts=st.integers(1, 40), num_ranks=st.integers(1, 40), num_more=st.integers(0, 3))
def test_an_even_spread_has_as_many_places_on_every_rank(num_experts: int, num_ranks: int, num_more: int) -> None:
    placement = ExpertPlacement.identity(
        num_layers=1,
        num_logical_experts=num_experts,
        num_ranks=num_ranks,
        num_redundant_experts=evenly_redundant(num_experts, num_ranks, num_more),
    )
    (places,) = set(placement.num_physical_R.tolist())
    assert places == min(-(-num_experts // num_ranks) + num_more, num_experts)


@pytest.mark.parametrize(
    ("num_experts", "num_ranks", "num_blocks_with", "expected"),
    [
        pytest.param(8, 4, lambda num_more: 100, 2, id="free, and yet no more than help"),
        pytest.param(8, 4, lambda num_more: 100 - 5 * num_more, 2, id="exactly what the KV cache can bear"),
        pytest.param(8, 4, lambda num_more: 100 - 6 * num_more, 1, id="the second costs too much"),
        pytest.param(8, 4, lambda num_more: 100 - 11 * num_more, 0, id="the first costs too much"),
        pytest.param(8, 4, lambda num_more: 100 if num_more < 2 else 0, 1, id="none left to serve with"),
        pytest.param(8, 4, lambda num_more: 0, 0, id="not even without"),
        pytest.param(3, 2, lambda num_more: 100, 1, id="every expert is everywhere"),
        pytest.param(8, 1, lambda num_more: 100, 0, id="one rank"),
    ],
)
def test_places_by_price(
    num_experts: int, num_ranks: int, num_blocks_with: Callable[[int], int], expected: int
) -> None:
    assert expected == choose_more_places(num_experts=num_experts, num_ranks=num_ranks, num_blocks_with=num_blocks_with)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3_moe")


def config_with(num_redundant_experts: int | str, **cache: object) -> Config:
    return config_from_dict(
        {
            "model": {"max_model_len": 64},
            "parallel": {"data_parallel_size": 3, "num_redundant_experts": num_redundant_experts},
            "cache": {"block_size": 4, **cache},
            "scheduler": {"max_num_seqs": 8},
        }
    )


def build_workers(folder: Path, config: Config) -> list[Worker]:
    def build(parallel: ParallelContext) -> Worker:
        return build_worker(config, read_model_spec(folder), folder, parallel, progress=False)

    return run_thread_ranks(build, tp_size=1, dp_size=3)


def expert_bytes(worker: Worker) -> int:
    tensors = [tensor for layer in worker.decoder.moe_layers for tensor in layer.experts.store.experts.tensors.values()]
    return sum(tensor.nbytes for tensor in tensors)


def test_ranks_hold_what_they_said_and_pay_what_they_said(folder: Path) -> None:
    """Eight experts on three ranks leave one place empty, which is filled for nothing."""
    auto, even = (build_workers(folder, config_with(number)) for number in ("auto", 1))
    for worker, without in zip(auto, even, strict=True):
        assert worker.redundancy is not None
        assert worker.start_placement is not None
        assert worker.redundancy.num_redundant_experts == worker.start_placement.num_redundant_experts == 7
        assert worker.redundancy.num_bytes == expert_bytes(worker) - expert_bytes(without) > 0
        assert without.redundancy is None


@pytest.mark.parametrize("cache", [{"memory_fraction": 0.5}, {"kv_cache_memory": 60_000}], ids=["share", "bytes"])
def test_the_rank_with_least_memory_decides(
    folder: Path, cache: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory enough for a cache that no place more fits beside."""
    plenty = 10**9
    monkeypatch.setattr(module, "free_bytes_of_rank", lambda parallel: plenty if parallel.layout.rank else 250_000)
    for worker in build_workers(folder, config_with("auto", **cache)):
        assert worker.redundancy is not None
        assert (worker.redundancy.num_redundant_experts, worker.redundancy.num_bytes) == (1, 0)
        assert worker.redundancy.num_blocks == 0


def test_a_saved_placement_has_its_own_number(folder: Path, tmp_path: Path) -> None:
    saved = ExpertPlacement.identity(num_layers=2, num_logical_experts=8, num_ranks=3, num_redundant_experts=2)
    saved.save(tmp_path / "map.json")
    config = config_with("auto")
    config = replace(config, parallel=replace(config.parallel, placement_file=str(tmp_path / "map.json")))
    for worker in build_workers(folder, config):
        assert worker.redundancy is None
        assert worker.start_placement is not None
        assert worker.start_placement.num_redundant_experts == 2


def test_tokens_are_those_of_one_rank(folder: Path) -> None:
    parallel = ParallelConfig(data_parallel_size=2, num_redundant_experts="auto")
    with run_engine(folder, parallel) as engine:
        assert engine.driver.placement.num_redundant_experts == 4
        for _ in range(4):
            engine.send()
        OneRank(folder).check(engine.finish())
