"""The whole engine on one rank, with transformers as the oracle, and with itself under other circumstances."""

import dataclasses
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from moeserve.config import ConfigError
from moeserve.engine.outputs import FinishReason
from moeserve.engine.sampling_params import SamplingParams, child_seed
from moeserve.llm import LLM, CompletionResult
from moeserve.testing.checkpoints import TINY_ARCHITECTURES, write_tiny_checkpoint

MAX_MODEL_LEN = 64
BLOCK_SIZE = 4
BYTES_PER_BLOCK = 2 * 2 * 2 * 8 * BLOCK_SIZE * 4
"""Layers x (keys and values) x KV heads x head_dim x block size x float32."""
NUM_REQUESTS = 10
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


def prompts(num: int, *, seed: int = 0) -> list[list[int]]:
    """Of 1, 4, 7, ... tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 300, (1 + 3 * i,), generator=generator).tolist() for i in range(num)]


def mixed_params(num: int) -> list[SamplingParams]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.7, "top_k": 40},
        {"temperature": 1.2, "min_p": 0.05, "presence_penalty": 0.6, "frequency_penalty": 0.3},
        {"temperature": 0.9, "repetition_penalty": 1.3, "logit_bias": {5: 2.0}},
    ]
    return [SamplingParams(max_tokens=24, seed=i, ignore_eos=True, **kinds[i % len(kinds)]) for i in range(num)]


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[list[int]]:
    """The tokens of each request when it runs alone."""
    pairs = zip(prompts(NUM_REQUESTS), mixed_params(NUM_REQUESTS), strict=True)
    results = [llm.generate([prompt], params, use_tqdm=False)[0].token_ids for prompt, params in pairs]
    assert len({tuple(result) for result in results}) == NUM_REQUESTS
    return results


def make(folder: Path, **settings: Any) -> LLM:
    return LLM(str(folder), **{"block_size": BLOCK_SIZE, "max_model_len": MAX_MODEL_LEN} | settings)


def token_ids(results: Sequence[CompletionResult]) -> list[list[int]]:
    return [result.token_ids for result in results]


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    return make(checkpoint)


@pytest.mark.parametrize("architecture", TINY_ARCHITECTURES)
def test_greedy_output_is_that_of_transformers(architecture: str, tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path, architecture)
    model = AutoModelForCausalLM.from_pretrained(folder)
    results = make(folder).generate(prompts(5), GREEDY, use_tqdm=False)
    for prompt, result in zip(prompts(5), results, strict=True):
        expected = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=GREEDY.max_tokens,
            min_new_tokens=GREEDY.max_tokens,
            do_sample=False,
        )
        # min_new_tokens forbids the end token, ignore_eos does not: up to there both are the same.
        count = result.token_ids.index(2) if 2 in result.token_ids else GREEDY.max_tokens
        assert result.token_ids[:count] == expected[0, len(prompt) : len(prompt) + count].tolist()
        assert (result.finish_reason, result.prompt_token_ids) == (FinishReason.LENGTH, prompt)


class TestTheSameTokensUnderAnyCircumstances:
    def generate(self, llm: LLM) -> list[list[int]]:
        return token_ids(llm.generate(prompts(NUM_REQUESTS), mixed_params(NUM_REQUESTS), use_tqdm=False))

    def test_in_a_batch(self, llm: LLM, expected: list[list[int]]) -> None:
        assert self.generate(llm) == expected

    def test_in_another_order(self, llm: LLM, expected: list[list[int]]) -> None:
        results = llm.generate(prompts(NUM_REQUESTS)[::-1], mixed_params(NUM_REQUESTS)[::-1], use_tqdm=False)
        assert token_ids(results) == expected[::-1]

    def test_after_preemptions(self, checkpoint: Path, expected: list[list[int]]) -> None:
        # Room for one sequence of the greatest length and a bit.
        llm = make(checkpoint, kv_cache_memory=20 * BYTES_PER_BLOCK)
        assert self.generate(llm) == expected
        assert llm.stats().num_blocks == 20
        assert llm.stats().num_preemptions > 0
        assert llm.stats().num_free_blocks == 20

    @pytest.mark.parametrize("budget", [1, 7])
    def test_in_chunks(self, checkpoint: Path, expected: list[list[int]], budget: int) -> None:
        assert self.generate(make(checkpoint, max_num_batched_tokens=budget)) == expected

    def test_from_the_prefix_cache(self, checkpoint: Path, expected: list[list[int]]) -> None:
        llm = make(checkpoint)
        assert self.generate(llm) == expected
        assert self.generate(llm) == expected
        assert llm.stats().num_prefix_hit_tokens > 0

    def test_without_a_prefix_cache(self, checkpoint: Path, expected: list[list[int]]) -> None:
        llm = make(checkpoint, enable_prefix_caching=False)
        assert self.generate(llm) == self.generate(llm) == expected
        assert llm.stats().num_prefix_hit_tokens == 0

    def test_one_at_a_time(self, checkpoint: Path, expected: list[list[int]]) -> None:
        assert self.generate(make(checkpoint, max_num_seqs=1)) == expected


@pytest.mark.parametrize("budget", [2048, 5])
def test_logprobs_are_those_of_transformers(checkpoint: Path, budget: int) -> None:
    """Of the prompt, whole and in chunks, and of sampled tokens, whatever the sampler was asked to do to the logits."""
    params = SamplingParams(max_tokens=6, seed=3, temperature=1.3, logit_bias={9: 3.0}, logprobs=4, prompt_logprobs=2)
    results = make(checkpoint, max_num_batched_tokens=budget).generate(prompts(6), params, use_tqdm=False)
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    for result in results:
        all_ids = result.prompt_token_ids + result.token_ids
        with torch.no_grad():
            logprobs_TV = model(torch.tensor([all_ids])).logits[0].log_softmax(dim=-1)
        assert result.logprobs is not None
        assert result.prompt_logprobs is not None
        assert len(result.prompt_logprobs) == len(result.prompt_token_ids) - 1
        assert len(result.logprobs) == len(result.token_ids)
        for position, record in enumerate(result.prompt_logprobs + result.logprobs):
            expected_V = logprobs_TV[position]
            num_top = 2 if position < len(result.prompt_logprobs) else 4
            assert record.token_id == all_ids[position + 1]
            assert record.logprob == pytest.approx(expected_V[record.token_id].item(), abs=1e-4)
            assert record.rank == int((expected_V > expected_V[record.token_id]).sum()) + 1
            assert record.top_token_ids == expected_V.topk(num_top).indices.tolist()
            assert record.top_logprobs == pytest.approx(expected_V.topk(num_top).values.tolist(), abs=1e-4)


class TestWhereATextEnds:
    def test_stop_token(self, llm: LLM) -> None:
        whole = llm.generate([[5, 6]], GREEDY, use_tqdm=False)[0].token_ids
        stop = whole[7]
        params = dataclasses.replace(GREEDY, stop_token_ids=(stop,))
        (result,) = llm.generate([[5, 6]], params, use_tqdm=False)
        assert result.token_ids == whole[: whole.index(stop) + 1]
        assert (result.finish_reason, result.stop_reason) == (FinishReason.STOP, stop)

    def test_min_tokens_keeps_a_stop_token_away(self, llm: LLM) -> None:
        stop = llm.generate([[5, 6]], GREEDY, use_tqdm=False)[0].token_ids[0]
        params = dataclasses.replace(GREEDY, stop_token_ids=(stop,), min_tokens=9)
        (result,) = llm.generate([[5, 6]], params, use_tqdm=False)
        assert stop not in result.token_ids[:9]

    @pytest.mark.parametrize("ignore_eos", [False, True])
    def test_end_of_sequence_token(self, llm: LLM, ignore_eos: bool) -> None:
        params = SamplingParams(max_tokens=5, seed=0, logit_bias={2: 100.0}, ignore_eos=ignore_eos)
        (result,) = llm.generate("ab", params, use_tqdm=False)
        assert result.token_ids == [2] * (5 if ignore_eos else 1)
        assert result.finish_reason == (FinishReason.LENGTH if ignore_eos else FinishReason.STOP)
        assert result.stop_reason is None

    @pytest.mark.parametrize("include", [False, True])
    def test_stop_string(self, llm: LLM, include: bool) -> None:
        """It lies across two tokens: the text ends before it or with it, the tokens with the one that completed it."""
        biased = {llm.tokenizer.encode(letter)[0]: 60.0 for letter in "xy"}
        params = SamplingParams(max_tokens=32, seed=1, logit_bias=biased, include_stop_str_in_output=include)
        (whole,) = llm.generate("ab", params, use_tqdm=False)
        end = whole.text.index("xy") + 2
        params = dataclasses.replace(params, stop=("xy",), logprobs=0)
        (result,) = llm.generate("ab", params, use_tqdm=False)
        assert result.text == whole.text[: end if include else end - 2]
        assert result.token_ids == whole.token_ids[:end]
        assert result.logprobs is not None
        assert len(result.logprobs) == end
        assert (result.finish_reason, result.stop_reason) == (FinishReason.STOP, "xy")
        assert llm.stats().num_running == 0
        assert llm.stats().num_free_blocks == llm.stats().num_blocks


def test_n_sequences_are_those_of_the_child_seeds(llm: LLM) -> None:
    params = SamplingParams(max_tokens=8, seed=11, n=3)
    results = llm.generate(["ab", "cd"], params, use_tqdm=False)
    assert [result.index for result in results] == [0, 1, 2, 0, 1, 2]
    for result in results:
        alone = dataclasses.replace(params, n=1, seed=child_seed(11, result.index))
        assert llm.generate([result.prompt_token_ids], alone, use_tqdm=False)[0].text == result.text
    assert len({tuple(result.token_ids) for result in results[:3]}) == 3


def test_without_a_seed_every_call_draws_anew(llm: LLM) -> None:
    params = SamplingParams(max_tokens=16)
    first, second = (llm.generate("ab", params, use_tqdm=False)[0].token_ids for _ in range(2))
    assert first != second


def test_chat_is_the_templates_prompt(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hello"}]
    prompt = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    (expected,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert token_ids(llm.chat(conversation, GREEDY, use_tqdm=False)) == [expected.token_ids]
    assert token_ids(llm.chat([conversation] * 2, GREEDY, use_tqdm=False)) == [expected.token_ids] * 2


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], GREEDY, "between 1 and 40 tokens .* got 0"),
        ([1] * 41, GREEDY, "between 1 and 40 tokens .* got 41"),
        ([320], GREEDY, "ids of a prompt must be between 0 and 319, got 320"),
        ([1], SamplingParams(logit_bias={-1: 1.0}), "ids of logit_bias must be between 0 and 319, got -1"),
        ([1], SamplingParams(stop_token_ids=(320,)), "ids of stop_token_ids must be between 0 and 319, got 320"),
    ],
)
def test_what_cannot_run_is_refused_and_leaves_nothing_behind(
    llm: LLM, prompt: list[int], params: SamplingParams, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate([[1], prompt], [GREEDY, params], use_tqdm=False)
    assert llm.stats().num_waiting == 0


def test_params_for_other_prompts_are_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="one for each of 2 prompts, got 1"):
        llm.generate(["a", "b"], [GREEDY], use_tqdm=False)


def test_an_interrupt_does_not_spoil_the_next_call(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make(checkpoint)
    (expected,) = llm.generate("ab", GREEDY, use_tqdm=False)

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("moeserve.worker.sampler.sample", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["ab", "cd"], GREEDY, use_tqdm=False)
    assert token_ids(llm.generate("ab", GREEDY, use_tqdm=False)) == [expected.token_ids]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_modle_len": 3}, "unknown setting 'max_modle_len' of LLM; there are model, "),
        ({"max_model_len": 257}, "model.max_model_len must be at most 256, the context of .*, got 257"),
        ({"kv_cache_memory": 16 * BYTES_PER_BLOCK - 1}, f"needs {16 * BYTES_PER_BLOCK} bytes"),
    ],
)
def test_settings_that_cannot_be_are_refused(checkpoint: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(checkpoint, **settings)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes_generate(checkpoint: Path, dtype: str) -> None:
    llm = make(checkpoint, dtype=dtype, kv_cache_memory=16 * BYTES_PER_BLOCK // 2)
    assert llm.stats().num_blocks == 16  # of half the bytes
    (result,) = llm.generate([[5, 6]], GREEDY, use_tqdm=False)
    assert len(result.token_ids) == GREEDY.max_tokens


def test_importing_moeserve_imports_no_torch() -> None:
    code = "import sys, moeserve; moeserve.SamplingParams(); moeserve.__version__; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
