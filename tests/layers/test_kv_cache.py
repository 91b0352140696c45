"""KV cache: shapes on every number of ranks, and bytes that agree with what is allocated."""

import pytest
import torch

from moeserve.layers.attention import KVCache, kv_bytes_per_block
from moeserve.parallel import ParallelContext
from moeserve.testing.thread_ranks import run_thread_ranks
from moeserve.testing.tiny_models import Style, tiny_spec


def _tensors(cache: KVCache) -> list[torch.Tensor]:
    tensors = [getattr(layer, name) for layer in cache.layers for name in layer.__slots__]
    return [tensor for tensor in tensors if tensor is not None]


@pytest.mark.parametrize("style", ["qwen3", "deepseek", "gpt_oss"])
@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_bytes_per_block_are_what_is_allocated(style: Style, tp_size: int, dtype: torch.dtype) -> None:
    spec = tiny_spec(style, num_layers=3)

    def run(parallel: ParallelContext) -> int:
        cache = KVCache.allocate(spec, num_blocks=5, block_size=4, dtype=dtype, parallel=parallel)
        return sum(tensor.nbytes for tensor in _tensors(cache))

    expected = 5 * kv_bytes_per_block(spec, block_size=4, dtype=dtype, tp_size=tp_size)
    assert run_thread_ranks(run, tp_size=tp_size) == [expected] * tp_size


@pytest.mark.parametrize(("tp_size", "num_local_heads"), [(1, 2), (2, 1), (4, 1)])
def test_key_value_heads_are_split_then_replicated(tp_size: int, num_local_heads: int) -> None:
    spec = tiny_spec("qwen3", num_layers=1)
    for cache in run_thread_ranks(
        lambda parallel: KVCache.allocate(spec, num_blocks=2, block_size=3, dtype=torch.float32, parallel=parallel),
        tp_size=tp_size,
    ):
        assert [tuple(tensor.shape) for tensor in _tensors(cache)] == [(2, 3, num_local_heads, 8)] * 2


def test_a_layer_has_memory_of_its_own() -> None:
    spec = tiny_spec("deepseek", num_layers=2)
    (cache,) = run_thread_ranks(
        lambda parallel: KVCache.allocate(spec, num_blocks=2, block_size=3, dtype=torch.float32, parallel=parallel)
    )
    first, second = _tensors(cache)
    first.fill_(1.0)
    assert cache.layer(1).latent_NS1C is second
    assert not second.any()
