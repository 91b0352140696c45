"""`cache.kv_cache_dtype`: what a narrower KV cache costs in accuracy and saves in memory, from logits to the engine."""

from pathlib import Path

import pytest
import torch

from moeserve.config import ConfigError, ParallelConfig
from moeserve.engine.sampling_params import SamplingParams
from moeserve.layers.attention import KVCache, kv_bytes_per_block
from moeserve.llm import LLM
from moeserve.models.decoder import Decoder
from moeserve.models.hf_config import read_model_spec
from moeserve.models.layout import starting_placement
from moeserve.models.parameters import DictReader
from moeserve.parallel import single_rank_context
from moeserve.testing.tiny_models import (
    BLOCK_SIZE,
    BLOCKS_PER_REQUEST,
    Style,
    forward_batch,
    random_parameters,
    tiny_spec,
)

ERROR = {"bfloat16": 0.02, "float16": 0.003, "fp8": 0.15, "int8": 0.05}
"""Most that the logits of a tiny model may be off, as a part of their norm: steps of fp8 are 1 in 16, of int8 1 in 127
of a row's largest value."""
TORCH_DTYPES = {
    "bfloat16": torch.bfloat16, "float16": torch.float16, "fp8": torch.float8_e4m3fn, "int8": torch.int8,
}  # fmt: skip
PROMPT = [5, 17, 250, 31, 8, 8, 100, 3, 77, 64, 12, 9, 201]


def _logits(decoder: Decoder, dtype: torch.dtype) -> torch.Tensor:
    """Behind every token of two sequences: prompts, a chunk behind cached tokens, and decodes."""
    kv_cache = KVCache.allocate(
        decoder.spec,
        num_blocks=2 * BLOCKS_PER_REQUEST,
        block_size=BLOCK_SIZE,
        dtype=dtype,
        parallel=decoder.parallel,
    )
    logits, computed = [], [0, 0]
    for sizes in ([9, 14], [7, 1], [1, 1], [1, 1]):
        tokens = [[(7 * i + 3 * computed[r] + r) % 96 for i in range(size)] for r, size in enumerate(sizes)]
        hidden = decoder.forward(forward_batch(tokens, num_computed=computed), kv_cache)
        logits.append(decoder.compute_logits(hidden))
        computed = [n + size for n, size in zip(computed, sizes, strict=True)]
    return torch.cat(logits)


@pytest.mark.parametrize("style", ["qwen3", "deepseek", "gpt_oss"])
def test_logits_stay_near(style: Style) -> None:
    spec = tiny_spec(style)
    decoder = Decoder.build(
        spec,
        DictReader(random_parameters(spec)),
        single_rank_context(),
        starting_placement(spec, ParallelConfig()),
        dtype=torch.float32,
    )
    exact = _logits(decoder, torch.float32)
    for name, dtype in TORCH_DTYPES.items():
        errors_T = (_logits(decoder, dtype) - exact).norm(dim=1) / exact.norm(dim=1)
        # The median: where two experts are nearly equal, a token may go to the other one.
        assert 0 < errors_T.median() < ERROR[name], name


@pytest.fixture(scope="module")
def exact_logprobs(checkpoint: Path) -> torch.Tensor:
    return _prompt_logprobs(LLM(str(checkpoint), max_model_len=64))


def _prompt_logprobs(llm: LLM) -> torch.Tensor:
    params = SamplingParams(max_tokens=8, temperature=0.0, prompt_logprobs=0, ignore_eos=True)
    (result,) = llm.generate([PROMPT], params, use_tqdm=False)
    assert len(result.token_ids) == 8
    assert result.prompt_logprobs is not None
    return torch.tensor([record.logprob for record in result.prompt_logprobs])


@pytest.mark.parametrize("name", ERROR)
def test_the_engine_serves_it(name: str, checkpoint: Path, exact_logprobs: torch.Tensor) -> None:
    """Near the unquantised probabilities, and as many blocks as their bytes say."""
    spec = read_model_spec(checkpoint)
    bytes_per_block = kv_bytes_per_block(spec, block_size=16, dtype=TORCH_DTYPES[name], tp_size=1)
    llm = LLM(str(checkpoint), kv_cache_dtype=name, max_model_len=64, kv_cache_memory=9 * bytes_per_block)
    assert llm.stats().num_blocks == 9
    error = (_prompt_logprobs(llm) - exact_logprobs).norm() / exact_logprobs.norm()
    assert 0 < error < ERROR[name]


def test_a_dtype_that_is_none_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=r"cache\.kv_cache_dtype must be one of auto, .*, fp8, int8, got 'fp4'"):
        LLM(str(checkpoint), kv_cache_dtype="fp4")
