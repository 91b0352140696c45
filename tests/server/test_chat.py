"""POST /v1/chat/completions through the official client."""

import httpx
import openai
import pytest

from moeserve.engine.sampling_params import SamplingParams
from moeserve.testing.fake_model import generate, hashed_token
from moeserve.tokenizer import Tokenizer

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where does the expert sit?"}]
PROMPT = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhere does the expert sit?<|im_end|>\n"
    "<|im_start|>assistant\n"
)


def expected_text(tokenizer: Tokenizer, prompt: str, max_tokens: int) -> str:
    ids, _ = generate(
        tokenizer.encode(prompt), SamplingParams(max_tokens=max_tokens), hashed_token(tokenizer.vocab_size)
    )
    return tokenizer.decode(ids)


def test_answer_to_a_templated_prompt(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    answer = client.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=8)  # type: ignore[arg-type]
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    message = answer.choices[0].message
    assert (message.role, message.content) == ("assistant", expected_text(tokenizer, PROMPT, 8))
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].logprobs is None
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(tokenizer.encode(PROMPT))
    assert answer.usage.completion_tokens == 8


def test_all_that_fits_by_default(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    answer = client.chat.completions.create(model="demo", messages=MESSAGES)  # type: ignore[arg-type]
    assert answer.usage is not None
    assert answer.usage.total_tokens == 512
    assert answer.choices[0].message.content == expected_text(tokenizer, PROMPT, 512 - len(tokenizer.encode(PROMPT)))


def test_max_completion_tokens_wins_over_max_tokens(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo",
        messages=MESSAGES,  # type: ignore[arg-type]
        max_completion_tokens=3,
        max_tokens=9,
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


def test_text_parts_are_joined(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "Where does "}, {"type": "text", "text": "the expert sit?"}]
    answer = client.chat.completions.create(
        model="demo",
        messages=[MESSAGES[0], {"role": "user", "content": parts}],  # type: ignore[list-item,misc]
        max_tokens=4,
    )
    assert answer.choices[0].message.content == expected_text(tokenizer, PROMPT, 4)


@pytest.mark.parametrize("num_top", [0, 3])
def test_logprobs(client: openai.OpenAI, tokenizer: Tokenizer, num_top: int) -> None:
    answer = client.chat.completions.create(
        model="demo",
        messages=MESSAGES,  # type: ignore[arg-type]
        max_tokens=6,
        logprobs=True,
        top_logprobs=num_top,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    ids, _ = generate(tokenizer.encode(PROMPT), SamplingParams(max_tokens=6), hashed_token(tokenizer.vocab_size))
    assert [entry.bytes for entry in logprobs.content] == [list(tokenizer.token_bytes(token_id)) for token_id in ids]
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == num_top
        if num_top:
            assert (entry.top_logprobs[0].token, entry.top_logprobs[0].logprob) == (entry.token, entry.logprob)


def test_ends_with_the_stop_token_whose_text_is_not_shown(scripted_client: openai.OpenAI, script: str) -> None:
    answer = scripted_client.chat.completions.create(model="demo", messages=MESSAGES)  # type: ignore[arg-type]
    assert answer.choices[0].message.content == script
    assert answer.choices[0].finish_reason == "stop"


def test_ignore_eos_goes_on_to_the_limit(scripted_client: openai.OpenAI, script: str) -> None:
    answer = scripted_client.chat.completions.create(
        model="demo",
        messages=MESSAGES,  # type: ignore[arg-type]
        max_tokens=100,
        extra_body={"ignore_eos": True},
    )
    assert answer.choices[0].message.content == script
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 100


def test_every_optional_field_takes_null(http: httpx.Client) -> None:
    schema = http.get("/openapi.json").json()["components"]["schemas"]
    nulls = {name: None for name in schema["ChatCompletionRequest"]["properties"] if name != "messages"}
    answer = http.post(
        "/v1/chat/completions",
        json={**nulls, "tools": None, "response_format": None, "messages": MESSAGES, "max_tokens": 2},
    )
    assert answer.status_code == 200, answer.text


def test_neutral_values_of_unsupported_features_are_taken(http: httpx.Client) -> None:
    neutral = {
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "parallel_tool_calls": True,
        "metadata": {"a": "b"},
        "store": False,
        "chat_template_kwargs": {"enable_thinking": False},
        "reasoning_effort": "low",
    }
    answer = http.post("/v1/chat/completions", json={**neutral, "messages": MESSAGES, "max_tokens": 2})
    assert answer.status_code == 200, answer.text
