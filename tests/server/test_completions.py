"""POST /v1/completions through the official client: prompts of every form, echo, log-probabilities, usage."""

import httpx
import openai
import pytest

from moeserve.engine.sampling_params import SamplingParams
from moeserve.testing.fake_model import generate, hashed_token
from moeserve.tokenizer import Tokenizer

PROMPT = "The expert sits"


def expected_ids(tokenizer: Tokenizer, prompt: str, max_tokens: int) -> list[int]:
    params = SamplingParams(max_tokens=max_tokens)
    ids, _ = generate(tokenizer.encode(prompt), params, hashed_token(tokenizer.vocab_size))
    return ids


def expected_text(tokenizer: Tokenizer, prompt: str, max_tokens: int) -> str:
    return tokenizer.decode(expected_ids(tokenizer, prompt, max_tokens))


def test_text_prompt_gives_sixteen_tokens_by_default(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    answer = client.completions.create(model="demo", prompt=PROMPT)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.model == "demo"
    assert [choice.index for choice in answer.choices] == [0]
    assert answer.choices[0].text == expected_text(tokenizer, PROMPT, 16)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    num_prompt = len(tokenizer.encode(PROMPT))
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (num_prompt, 16)
    assert answer.usage.total_tokens == num_prompt + 16


def test_every_form_of_prompt(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    prompts = ["The expert", "A placement remembers"]
    ids = [tokenizer.encode(prompt) for prompt in prompts]
    texts = [expected_text(tokenizer, prompt, 5) for prompt in prompts]
    for form, expected in ((prompts[0], texts[:1]), (ids[0], texts[:1]), (prompts, texts), (ids, texts)):
        answer = client.completions.create(model="demo", prompt=form, max_tokens=5)
        assert [choice.text for choice in answer.choices] == expected
        assert [choice.index for choice in answer.choices] == list(range(len(expected)))
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == sum(len(i) for i in ids[: len(expected)])
        assert answer.usage.completion_tokens == 5 * len(expected)


def test_n_outputs_of_each_prompt_in_order(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    prompts = ["The expert", "A placement"]
    answer = client.completions.create(model="demo", prompt=prompts, n=3, max_tokens=4)
    assert [choice.index for choice in answer.choices] == list(range(6))
    # The fake model knows no seeds: the three of a prompt are alike.
    assert [choice.text for choice in answer.choices] == [
        expected_text(tokenizer, prompt, 4) for prompt in prompts for _ in range(3)
    ]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(len(tokenizer.encode(prompt)) for prompt in prompts)
    assert answer.usage.completion_tokens == 24


def test_prefix_cache_shows_in_usage(client: openai.OpenAI) -> None:
    prompt = "Only this test says these words, and it says them twice: " + "again and " * 8
    first = client.completions.create(model="demo", prompt=prompt, max_tokens=2)
    second = client.completions.create(model="demo", prompt=prompt, max_tokens=2)
    salted = client.completions.create(model="demo", prompt=prompt, max_tokens=2, extra_body={"cache_salt": "other"})
    cached = []
    for answer in (first, second, salted):
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert cached[0] == 0
    assert cached[1] is not None
    assert cached[1] >= 16
    assert cached[1] % 16 == 0
    assert cached[2] == 0


@pytest.mark.parametrize("as_ids", [False, True])
def test_echo_puts_the_prompt_first(client: openai.OpenAI, tokenizer: Tokenizer, as_ids: bool) -> None:
    prompt = tokenizer.encode(PROMPT) if as_ids else PROMPT
    answer = client.completions.create(model="demo", prompt=prompt, echo=True, max_tokens=3)
    assert answer.choices[0].text == PROMPT + expected_text(tokenizer, PROMPT, 3)


def test_echo_without_output(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    answer = client.completions.create(model="demo", prompt=PROMPT, echo=True, max_tokens=0, logprobs=1)
    choice = answer.choices[0]
    assert choice.text == PROMPT
    assert choice.finish_reason == "length"
    assert choice.logprobs is not None
    assert "".join(choice.logprobs.tokens or []) == PROMPT
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("num_logprobs", [0, 2])
def test_logprobs_are_parallel_lists(
    client: openai.OpenAI, tokenizer: Tokenizer, num_logprobs: int, echo: bool
) -> None:
    answer = client.completions.create(model="demo", prompt=PROMPT, max_tokens=6, logprobs=num_logprobs, echo=echo)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    prompt_ids = tokenizer.encode(PROMPT) if echo else []
    ids = prompt_ids + expected_ids(tokenizer, PROMPT, 6)
    assert logprobs.tokens == [tokenizer.token_text(token_id) for token_id in ids]
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert logprobs.text_offset is not None
    assert len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == len(logprobs.text_offset) == len(ids)
    first_scored = 1 if echo else 0
    assert logprobs.token_logprobs[:first_scored] == [None] * first_scored
    assert logprobs.top_logprobs[:first_scored] == [None] * first_scored
    for token, logprob, top in zip(
        logprobs.tokens[first_scored:],
        logprobs.token_logprobs[first_scored:],
        logprobs.top_logprobs[first_scored:],
        strict=True,
    ):
        assert top[token] == logprob
        assert 1 <= len(top) <= max(num_logprobs, 1)


def test_text_offsets_point_into_the_text(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    prompt = "Grüße aus Köln, 東京 🙂 the end"
    answer = client.completions.create(model="demo", prompt=prompt, max_tokens=0, echo=True, logprobs=0)
    logprobs, text = answer.choices[0].logprobs, answer.choices[0].text
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.text_offset is not None
    assert logprobs.text_offset == sorted(logprobs.text_offset)
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        if not token.startswith("bytes:"):
            assert text[offset : offset + len(token)] == token


def test_every_optional_field_takes_null(http: httpx.Client) -> None:
    schema = http.get("/openapi.json").json()["components"]["schemas"]
    nulls = {name: None for name in schema["CompletionRequest"]["properties"] if name != "prompt"}
    assert len(nulls) > 20
    answer = http.post("/v1/completions", json={**nulls, "prompt": PROMPT})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 16


def test_accepted_and_unknown_fields_change_nothing(http: httpx.Client, tokenizer: Tokenizer) -> None:
    extra = {
        "user": "somebody",
        "service_tier": "auto",
        "priority": 3,
        "best_of": 1,
        "suffix": "",
        "nobody_knows_this": {"deep": [1, 2]},
        "logit_bias": {"5": 1.5},
        "top_k": -1,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "stop_token_ids": [],
        "min_tokens": 1,
        "ignore_eos": True,
        "seed": -(2**63),
        "temperature": 0,
    }
    answer = http.post("/v1/completions", json={"model": "org/demo-alias", "prompt": PROMPT, "max_tokens": 4, **extra})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == expected_text(tokenizer, PROMPT, 4)
    assert answer.json()["model"] == "org/demo-alias"


def test_special_tokens_show_only_when_asked_for(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    prompt = next(
        prompt
        for prompt in (f"try {number}" for number in range(1000))
        if tokenizer.special_token_ids & set(expected_ids(tokenizer, prompt, 12))
    )
    ids = expected_ids(tokenizer, prompt, 12)
    hidden = client.completions.create(model="demo", prompt=prompt, max_tokens=12)
    shown = client.completions.create(
        model="demo", prompt=prompt, max_tokens=12, extra_body={"skip_special_tokens": False}
    )
    assert hidden.choices[0].text == tokenizer.decode(ids, skip_special_tokens=True)
    assert shown.choices[0].text == tokenizer.decode(ids, skip_special_tokens=False)
    assert hidden.choices[0].text != shown.choices[0].text
