"""How many KV blocks fit, and what is said when too few do."""

import types

import psutil
import pytest

from moeserve.config import CacheConfig, ConfigError
from moeserve.parallel import ParallelContext
from moeserve.testing.thread_ranks import run_thread_ranks
from moeserve.worker.memory import agree_on_num_blocks, num_kv_blocks


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        pytest.param(399, None, id="one byte less than a sequence"),
        pytest.param(400, 4, id="exactly a sequence"),
        pytest.param(499, 4, id="a part of a block is none"),
        pytest.param(10**9, 12, id="no more than all sequences fill"),
    ],
)
def test_blocks_by_budget(budget: int, expected: int | None) -> None:
    def blocks() -> int:
        # 13 tokens are 4 blocks of 4.
        return num_kv_blocks(budget, bytes_per_block=100, block_size=4, max_model_len=13, max_num_seqs=3)

    if expected is not None:
        assert blocks() == expected
        return
    with pytest.raises(ConfigError, match=r"13 tokens needs 400 bytes on each rank, there are 399") as error:
        blocks()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("cache", "tp_size", "dp_size", "expected"),
    [
        pytest.param(CacheConfig(kv_cache_memory=1000), 1, 1, 10, id="given bytes, for each rank"),
        pytest.param(CacheConfig(kv_cache_memory=1000), 2, 2, 10, id="given bytes, not shared"),
        pytest.param(CacheConfig(memory_fraction=0.5), 1, 1, 20, id="fraction of the free memory"),
        pytest.param(CacheConfig(memory_fraction=0.5), 2, 2, 5, id="the ranks of a host share its memory"),
    ],
)
def test_all_ranks_have_as_many_blocks(
    cache: CacheConfig, tp_size: int, dp_size: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: types.SimpleNamespace(available=4000))
    assert count_blocks([cache] * tp_size * dp_size, tp_size, dp_size) == [expected] * tp_size * dp_size


def test_the_rank_that_can_afford_least_decides() -> None:
    caches = [CacheConfig(kv_cache_memory=memory) for memory in (900, 700, 800)]
    assert count_blocks(caches, 3, 1) == [7, 7, 7]


def test_too_little_on_one_rank_ends_all_of_them() -> None:
    caches = [CacheConfig(kv_cache_memory=memory) for memory in (900, 99)]
    with pytest.raises(ConfigError, match="there are 99"):
        count_blocks(caches, 1, 2)


def count_blocks(caches: list[CacheConfig], tp_size: int, dp_size: int) -> list[int]:
    def count(parallel: ParallelContext) -> int:
        return agree_on_num_blocks(
            caches[parallel.layout.rank], bytes_per_block=100, max_model_len=16, max_num_seqs=100, parallel=parallel
        )

    return run_thread_ranks(count, tp_size=tp_size, dp_size=dp_size)
