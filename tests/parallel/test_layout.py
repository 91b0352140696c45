"""The parallel layout: every rank has one place, and shards cover everything once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeserve.config import ConfigError, ParallelConfig
from moeserve.parallel import ParallelLayout, shard_range

sizes = st.integers(min_value=1, max_value=7)


@given(tp_size=sizes, dp_size=sizes)
def test_ranks_and_places_are_one_to_one(tp_size: int, dp_size: int) -> None:
    layouts = [ParallelLayout(tp_size=tp_size, dp_size=dp_size, rank=rank) for rank in range(tp_size * dp_size)]
    assert len({(layout.dp_rank, layout.tp_rank) for layout in layouts}) == tp_size * dp_size
    assert sum(layout.is_leader for layout in layouts) == dp_size
    assert all(layout.dp_rank * tp_size + layout.tp_rank == layout.rank for layout in layouts)


@given(total=st.integers(min_value=0, max_value=100), size=sizes)
def test_shards_are_contiguous_cover_all_and_differ_by_at_most_one(total: int, size: int) -> None:
    shards = [shard_range(total, size, rank) for rank in range(size)]
    assert [i for shard in shards for i in range(total)[shard]] == list(range(total))
    lengths = [shard.stop - shard.start for shard in shards]
    assert max(lengths) - min(lengths) <= 1


def test_a_layout_that_does_not_fit_the_started_ranks_says_which_number_to_change() -> None:
    config = ParallelConfig(tensor_parallel_size=2, data_parallel_size=2)
    with pytest.raises(ConfigError, match=r"3 ranks were started.* 2 x .* 2 is 4.*--nproc-per-node"):
        ParallelLayout.build(config, rank=0, world_size=3)
