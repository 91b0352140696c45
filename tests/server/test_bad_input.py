"""Bad input: the status, OpenAI's shape, and a message with the field, its value and what is accepted."""

import json
from typing import Any

import httpx
import openai
import pytest

MESSAGES = [{"role": "user", "content": "hi"}]
COMPLETION = {"prompt": "hi"}
CHAT = {"messages": MESSAGES}


def post(http: httpx.Client, path: str, body: dict[str, Any]) -> httpx.Response:
    """As httpx would, but half a surrogate pair is sent as JSON can say it."""
    return http.post(path, content=json.dumps(body).encode(), headers={"content-type": "application/json"})


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


BAD_FIELDS: list[tuple[dict[str, Any], str, tuple[str, ...]]] = [
    ({**COMPLETION, "temperature": 3}, "temperature", ("between 0.0 and 2.0", "got 3")),
    ({**COMPLETION, "temperature": -0.5}, "temperature", ("between 0.0 and 2.0", "-0.5")),
    ({**COMPLETION, "temperature": "hot"}, "temperature", ("a valid number", '"hot"')),
    ({**COMPLETION, "top_p": 0}, "top_p", ("above 0 and at most 1", "got 0")),
    ({**COMPLETION, "top_k": -2}, "top_k", ("at least 0", "-2")),
    ({**COMPLETION, "min_p": 2}, "min_p", ("between 0.0 and 1.0", "2")),
    ({**COMPLETION, "presence_penalty": 2.5}, "presence_penalty", ("between -2.0 and 2.0", "2.5")),
    ({**COMPLETION, "frequency_penalty": -3}, "frequency_penalty", ("between -2.0 and 2.0", "-3")),
    ({**COMPLETION, "repetition_penalty": 0}, "repetition_penalty", ("above 0 and at most 10", "got 0")),
    ({**COMPLETION, "logit_bias": {"400": 1}}, "logit_bias", ("between 0 and 399", "'400'")),
    ({**COMPLETION, "logit_bias": {"five": 1}}, "logit_bias", ("between 0 and 399", "'five'")),
    ({**COMPLETION, "logit_bias": {"5": 101}}, "logit_bias", ("between -100.0 and 100.0", "101")),
    ({**COMPLETION, "n": 0}, "n", ("between 1 and 128", "got 0")),
    ({**COMPLETION, "n": 129}, "n", ("between 1 and 128", "129")),
    ({**COMPLETION, "n": 2, "temperature": 0}, "n", ("must be 1", "got 2")),
    ({**COMPLETION, "n": "2"}, "n", ("a valid integer", '"2"')),
    ({**COMPLETION, "n": 10**30}, "n", ("between 1 and 128", "10000")),
    ({**COMPLETION, "seed": 2**63}, "seed", ("between -9223372036854775808", "9223372036854775808")),
    ({**COMPLETION, "logprobs": 21}, "logprobs", ("between 0 and 20", "21")),
    ({**COMPLETION, "logprobs": True}, "logprobs", ("a valid integer", "true")),
    ({**CHAT, "logprobs": 5}, "logprobs", ("a valid boolean", "5")),
    ({**CHAT, "logprobs": True, "top_logprobs": 21}, "top_logprobs", ("between 0 and 20", "21")),
    ({**CHAT, "top_logprobs": 2}, "top_logprobs", ("without logprobs", "2")),
    ({**COMPLETION, "max_tokens": 0}, "max_tokens", ("between 1 and 510", "got 0")),
    ({**COMPLETION, "max_tokens": 511}, "max_tokens", ("between 1 and 510", "511")),
    ({**CHAT, "max_completion_tokens": 5000}, "max_completion_tokens", ("between 1 and ", "5000")),
    ({**COMPLETION, "min_tokens": 17}, "min_tokens", ("between 0 and 16", "17")),
    ({**COMPLETION, "stop": ""}, "stop", ("empty string",)),
    ({**COMPLETION, "stop": 7}, "stop", ("a string or a list of strings", "7")),
    ({**COMPLETION, "stop": ["a", 7]}, "stop[1]", ("a valid string", "7")),
    ({**COMPLETION, "stop_token_ids": [400]}, "stop_token_ids[0]", ("between 0 and 399", "400")),
    ({**COMPLETION, "priority": 2**70}, "priority", ("between", "1180591620717411303424")),
    ({**COMPLETION, "best_of": 3}, "best_of", ("equal to n (1)", "3")),
    ({**COMPLETION, "stream": "yes"}, "stream", ("a valid boolean", "yes")),
    ({**COMPLETION, "stream_options": {"include_usage": True}}, "stream_options", ("stream is not true",)),
    ({**COMPLETION, "stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", ("1",)),
    ({}, "prompt", ("missing",)),
    ({"prompt": ""}, "prompt", ("not empty",)),
    ({"prompt": []}, "prompt", ("not empty",)),
    ({"prompt": ["a", ""]}, "prompt[1]", ("not empty",)),
    ({"prompt": [[1], []]}, "prompt[1]", ("not empty",)),
    ({"prompt": {"text": "x"}}, "prompt", ("a string, a list of strings, a list of token ids", '{"text":"x"}')),
    ({"prompt": [1, "a"]}, "prompt[1]", ("a valid integer", '"a"')),
    ({"prompt": ["a", 1]}, "prompt[1]", ("a valid string", "1")),
    ({"prompt": [1, 400]}, "prompt[1]", ("between 0 and 399", "400")),
    ({"prompt": [[1], [2, -1]]}, "prompt[1][1]", ("between 0 and 399", "-1")),
    ({"prompt": [1] * 512}, "prompt", ("between 1 and 511 tokens", "512 tokens")),
    ({"prompt": "\ud800"}, "prompt", ("valid Unicode",)),
    ({**COMPLETION, "stop": "\udfff"}, "stop", ("valid Unicode",)),
    ({"messages": []}, "messages", ("at least one", "[]")),
    ({"messages": "hi"}, "messages", ("a valid list", '"hi"')),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", ("'user'", "robot")),
    ({"messages": [*MESSAGES, {"content": "x"}]}, "messages[1].role", ("missing",)),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", ("a string or a list of text parts", "5")),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content", ("valid Unicode",)),
    ({"messages": [{"role": "user", "content": "word " * 600}]}, "messages", ("between 1 and 511 tokens",)),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
        ("'text'", "image_url"),
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
        "messages[0].tool_calls",
        ("not supported",),
    ),
    ({**CHAT, "tools": [{"type": "function"}]}, "tools", ("not supported", "absent")),
    ({**CHAT, "tool_choice": "auto"}, "tool_choice", ("not supported", '"none"', '"auto"')),
    ({**CHAT, "functions": [{"name": "f"}]}, "functions", ("not supported",)),
    ({**CHAT, "response_format": {"type": "json_object"}}, "response_format", ('{"type":"text"}', "json_object")),
    ({**CHAT, "modalities": ["text", "audio"]}, "modalities", ("not supported",)),
    ({**COMPLETION, "response_format": {"type": "json_schema"}}, "response_format", ("not supported",)),
    ({**COMPLETION, "suffix": "end"}, "suffix", ("not supported", '"end"')),
]


@pytest.mark.parametrize(("body", "param", "words"), BAD_FIELDS, ids=[f"{i}-{c[1]}" for i, c in enumerate(BAD_FIELDS)])
@pytest.mark.parametrize("stream", [False, True])
def test_bad_field(http: httpx.Client, body: dict[str, Any], param: str, words: tuple[str, ...], stream: bool) -> None:
    if stream and "stream" not in body and "stream_options" not in body:
        body = {**body, "stream": True}
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    error = error_of(post(http, path, body), 400)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert param.partition("[")[0] in error["message"]
    for word in words:
        assert word in error["message"], error["message"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "a JSON object"),
        (b"{", "not valid JSON"),
        (b"[1]", "a JSON object"),
        (b'{"prompt": "x", }', "not valid JSON"),
        (b"\xff\xfe{", "body"),
        (b'{"a":' * 100_000, "body"),
        (b'{"n": ' + b"9" * 10_000 + b"}", "body"),
    ],
    ids=["empty", "cut", "array", "comma", "not utf-8", "deep", "long number"],
)
def test_bad_json(http: httpx.Client, body: bytes, words: str) -> None:
    response = http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert words in error_of(response, 400)["message"]


def test_wrong_content_type_says_what_is_needed(http: httpx.Client) -> None:
    error = error_of(http.post("/v1/completions", data={"prompt": "x"}), 400)
    assert "application/json" in error["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_unknown_model(http: httpx.Client, path: str) -> None:
    body = {"model": "gpt-\ud800-5", "prompt": "x", "messages": MESSAGES, "tokens": [1]}
    error = error_of(http.post(path, json={**body, "model": "gpt-5"}), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert '"gpt-5"' in error["message"]
    assert "demo" in error["message"]
    assert error_of(post(http, path, body), 400)["param"] == "model"


def test_unknown_model_in_the_official_client(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="nothing", prompt="x")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nothing")


def test_unknown_route_and_method(http: httpx.Client) -> None:
    assert "/v1/nothing" in error_of(http.get("/v1/nothing"), 404)["message"]
    response = http.get("/v1/completions")
    assert "GET" in error_of(response, 405)["message"]
    assert response.headers["allow"] == "POST"
