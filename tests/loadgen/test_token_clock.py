"""Tokens of chat chunks and of servers that count nothing. (Completions: tests/benchmarks/test_load.py.)"""

import json

import pytest

from moeserve.loadgen.token_clock import TokenClock


def _delta(**fields: object) -> str:
    return json.dumps({"choices": [{"delta": fields, "index": 0}]})


def test_chat_chunks_with_text_are_tokens() -> None:
    clock = TokenClock()
    for now_s, chunk in enumerate(
        [_delta(role="assistant", content=""), _delta(reasoning_content="h"), _delta(content="i"), _delta()]
    ):
        clock.read(chunk.encode(), float(now_s))
    assert clock.times == (1.0, 2.0)
    assert clock.usage is None


def test_a_usage_at_the_end_adds_the_tokens_that_were_withheld() -> None:
    clock = TokenClock()
    clock.read(_delta(content="a"), 1.0)
    clock.read('{"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 3}}', 2.0)
    assert clock.finish(prompt_tokens=3, output_tokens=3) == (1.0, 2.0, 2.0)


def test_counts_that_fall_back_take_no_token_away() -> None:
    clock = TokenClock()
    clock.read('{"usage": {"completion_tokens": 2}}', 1.0)
    clock.read('{"usage": {"completion_tokens": 1}}', 2.0)
    assert clock.times == (1.0, 1.0)


@pytest.mark.parametrize("chunk", ["[]", "{", '{"choices": 3}', '{"usage": {"completion_tokens": "2"}}'])
def test_what_is_no_chunk(chunk: str) -> None:
    with pytest.raises(RuntimeError, match="not a chunk"):
        TokenClock().read(chunk, 0.0)


def test_bytes_that_are_no_text() -> None:
    with pytest.raises(RuntimeError, match="not a chunk"):
        TokenClock().read(b'{"choices": [{"text": "\xff"}]}', 0.0)
