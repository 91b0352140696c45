"""Server-sent events: order, what is certain, the finishing chunk, usage, errors after the start."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from moeserve.tokenizer import Tokenizer

MESSAGES = [{"role": "user", "content": "Speak."}]


def events(http: httpx.Client, path: str, body: dict[str, Any]) -> list[Any]:
    """All events of a stream, parsed, `[DONE]` as text."""
    return list(iter_events(http, path, body))


def iter_events(http: httpx.Client, path: str, body: dict[str, Any]) -> Iterator[Any]:
    with http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response.iter_lines():
            if line:
                assert line.startswith("data: ")
                data = line.removeprefix("data: ")
                yield data if data == "[DONE]" else json.loads(data)


def chat(http: httpx.Client, **body: Any) -> list[Any]:
    return events(http, "/v1/chat/completions", {"messages": MESSAGES, **body})


def complete(http: httpx.Client, **body: Any) -> list[Any]:
    return events(http, "/v1/completions", {"prompt": "Speak.", "max_tokens": 200, **body})


def test_chat_stream_from_role_to_done(scripted_http: httpx.Client, script: str) -> None:
    *chunks, done = chat(scripted_http)
    assert done == "[DONE]"
    assert all("usage" not in chunk for chunk in chunks), "usage was not asked for"
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    assert chunks[0]["object"] == "chat.completion.chunk"
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert all(set(choice["delta"]) == {"content"} and choice["delta"]["content"] for choice in choices[1:-1])
    assert "".join(choice["delta"]["content"] for choice in choices[:-1]) == script
    assert choices[-1]["delta"] == {}
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]


def test_completion_stream_from_text_to_done(scripted_http: httpx.Client, script: str) -> None:
    *chunks, done = complete(scripted_http)
    assert done == "[DONE]"
    choices = [chunk["choices"][0] for chunk in chunks]
    assert all(choice["text"] for choice in choices[:-1])
    assert "".join(choice["text"] for choice in choices) == script
    assert choices[-1]["text"] == ""
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]


def test_no_chunk_cuts_a_character(scripted_http: httpx.Client, tokenizer: Tokenizer, script: str) -> None:
    assert any("\ufffd" in tokenizer.decode([i]) for i in tokenizer.encode(script)), "the script must hold such tokens"
    for chunk in complete(scripted_http)[:-1]:
        assert "\ufffd" not in chunk["choices"][0]["text"]


@pytest.mark.parametrize(
    ("stop", "ends_before"),
    [
        ("STOP", "STOP"),
        (["nowhere", "two, three", "STOP"], "two, three"),
        (["。", "END", "here, and"], "here, and"),
        ("one, two, three. STOP here, and END", "one, two"),
        ("東京", "東京"),
    ],
)
def test_stop_strings_are_never_seen_and_end_the_stream(
    scripted_http: httpx.Client, script: str, stop: str | list[str], ends_before: str
) -> None:
    *chunks, _ = complete(scripted_http, stop=stop)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == script[: script.index(ends_before)]
    last = chunks[-1]["choices"][0]
    assert last["finish_reason"] == "stop"
    assert last["stop_reason"] in ([stop] if isinstance(stop, str) else stop)


def test_stop_string_can_be_kept(scripted_http: httpx.Client, script: str) -> None:
    *chunks, _ = complete(scripted_http, stop=["STOP"], include_stop_str_in_output=True)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == script[: script.index("STOP") + 4]


def test_the_beginning_of_a_stop_string_that_does_not_come_is_delivered(
    scripted_http: httpx.Client, script: str
) -> None:
    *chunks, _ = complete(scripted_http, stop=["END there.!"])
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == script


def test_stop_token_id_ends_and_is_named(scripted_http: httpx.Client, tokenizer: Tokenizer, script: str) -> None:
    ids = tokenizer.encode(script)
    *chunks, _ = complete(scripted_http, stop_token_ids=[ids[3]])
    cut = ids.index(ids[3])
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == tokenizer.decode(ids[:cut])
    assert chunks[-1]["choices"][0]["stop_reason"] == ids[3]
    whole = scripted_http.post(
        "/v1/completions",
        json={"prompt": "x", "stop_token_ids": [ids[3]], "include_stop_str_in_output": True},
    ).json()
    assert whole["choices"][0]["text"] == tokenizer.decode(ids[: cut + 1])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_n_outputs_finish_once_each(http: httpx.Client, path: str) -> None:
    body = {"prompt": "Speak."} if path == "/v1/completions" else {"messages": MESSAGES}
    *chunks, done = events(http, path, {**body, "n": 3, "max_tokens": 5})
    assert done == "[DONE]"
    finishes = [c["index"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"] is not None]
    assert sorted(finishes) == [0, 1, 2]
    if "messages" in body:
        roles = [c["index"] for chunk in chunks for c in chunk["choices"] if "role" in c["delta"]]
        assert sorted(roles) == [0, 1, 2]
        assert all("role" in chunk["choices"][0]["delta"] for chunk in chunks[:3])


@pytest.mark.parametrize("continuous", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_usage_when_asked_for(http: httpx.Client, path: str, continuous: bool) -> None:
    body: dict[str, Any] = {"prompt": "Speak."} if path == "/v1/completions" else {"messages": MESSAGES}
    options = {"include_usage": True, "continuous_usage_stats": continuous}
    *chunks, last, done = events(http, path, {**body, "max_tokens": 7, "n": 2, "stream_options": options})
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 14
    assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + 14
    if not continuous:
        assert all(chunk["usage"] is None for chunk in chunks)
        return
    for index in (0, 1):
        counts = [c["usage"]["completion_tokens"] for c in chunks if c["choices"][0]["index"] == index]
        assert counts == sorted(counts)
        assert counts[-1] == 7
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {last["usage"]["prompt_tokens"]}


def test_streamed_text_and_logprobs_are_those_of_the_whole_answer(http: httpx.Client) -> None:
    body = {"prompt": ["The expert", "Köln"], "max_tokens": 9, "logprobs": 2, "echo": True}
    whole = http.post("/v1/completions", json=body).json()
    *chunks, _ = events(http, "/v1/completions", body)
    for index, choice in enumerate(whole["choices"]):
        parts = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(part["text"] for part in parts) == choice["text"]
        for name, values in choice["logprobs"].items():
            assert [value for part in parts if part["logprobs"] for value in part["logprobs"][name]] == values


def test_streamed_chat_logprobs_are_those_of_the_whole_answer(http: httpx.Client) -> None:
    body = {"messages": MESSAGES, "max_tokens": 9, "logprobs": True, "top_logprobs": 2}
    whole = http.post("/v1/chat/completions", json=body).json()["choices"][0]
    *chunks, _ = events(http, "/v1/chat/completions", body)
    parts = [chunk["choices"][0] for chunk in chunks]
    entries = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
    assert entries == whole["logprobs"]["content"]


def test_official_client_reads_streams(scripted_client: openai.OpenAI, script: str) -> None:
    chat_stream = scripted_client.chat.completions.create(
        model="demo",
        messages=MESSAGES,  # type: ignore[arg-type]
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(chat_stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == script
    assert [c.usage is not None for c in chunks] == [False] * (len(chunks) - 1) + [True]
    text = scripted_client.completions.create(model="demo", prompt="x", max_tokens=200, stream=True)
    assert "".join(chunk.choices[0].text for chunk in text) == script


def test_min_tokens_holds_stop_strings_off(scripted_http: httpx.Client, tokenizer: Tokenizer, script: str) -> None:
    num_tokens = len(tokenizer.encode(script[: script.index("END") - 2]))
    *chunks, _ = complete(scripted_http, stop=["STOP", "END"], min_tokens=num_tokens)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == script[: script.index("END")]


@pytest.mark.parametrize("is_chat", [False, True])
def test_what_a_load_tool_sends(http: httpx.Client, is_chat: bool) -> None:
    """The requests of guidellm: exact output lengths, usage in every event, nulls, text in parts."""
    common = {
        "model": "demo",
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "ignore_eos": True,
        "stop": None,
    }
    content = [{"type": "text", "text": "Speak."}]
    chat_body = {"messages": [{"role": "user", "content": content}], "max_completion_tokens": 12}
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    body = chat_body if is_chat else {"prompt": "Speak.", "max_tokens": 12}
    *chunks, done = events(http, path, {**common, **body})
    assert done == "[DONE]"
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks][-1] == 12
    assert http.get("/v1/models").json()["data"][0]["id"] == "demo"
    assert http.get("/health").status_code == 200
