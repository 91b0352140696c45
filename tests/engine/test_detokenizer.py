"""Incremental text against the text decoded at once, for decoders that make it hard."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders

from moeserve.engine.detokenizer import Detokenizer
from moeserve.engine.stop_matcher import StopMatcher

Decode = Callable[[list[int]], str]


def byte_decode(vocab: list[bytes]) -> Decode:
    """Byte-level BPE: bytes are joined, then decoded."""
    return lambda ids: b"".join(vocab[i] for i in ids).decode(errors="replace")


def metaspace_decode(vocab: list[str]) -> Decode:
    """SentencePiece: the first space of a text is dropped. The decoder of the tokenizers library itself."""
    decoder = decoders.Metaspace()
    return lambda ids: decoder.decode([vocab[i] for i in ids])


def byte_fallback_decode(vocab: list[str]) -> Decode:
    """SentencePiece with characters outside the vocabulary as byte tokens, as in Llama 2 and Mixtral."""
    decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return lambda ids: decoder.decode([vocab[i] for i in ids])


def first_stop(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """(end, stop string) by brute force: the earliest end, then the longest."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return end, max(complete, key=len)
    return None


@dataclass(frozen=True, kw_only=True)
class Case:
    decode: Decode
    prompt: list[int]
    output: list[int]
    stops: tuple[str, ...]
    include_stop: bool
    piece_len: int = 1

    def expected(self) -> tuple[str, str | None]:
        """The text decoded at once, cut at the first stop string."""
        whole = self.decode(self.prompt + self.output)[len(self.decode(self.prompt)) :]
        found = first_stop(whole, self.stops)
        if found is None:
            return whole, None
        end, stop = found
        return whole[: end if self.include_stop else end - len(stop)], stop

    def check(self) -> None:
        expected, expected_stop = self.expected()
        detokenizer = Detokenizer(self.decode, self.prompt, self.stops, self.include_stop)
        text, stop = "", None
        for start in range(0, len(self.output), self.piece_len):
            token_ids = self.output[start : start + self.piece_len]
            piece = detokenizer.append(token_ids)
            text, stop = text + piece.text, piece.stop_reason
            assert expected.startswith(text), "text once given is never taken back"
            if stop is not None:
                break
            assert piece.num_tokens == len(token_ids)
        assert text + detokenizer.finish() == expected
        assert stop == expected_stop


HARD_BYTES = ["é", "€", "🙂", "a", " ", "ab", "\ufffd", "👩‍🔬"]


@st.composite
def byte_level_cases(draw: st.DrawFn) -> Case:
    """A text of multi-byte characters (and, at times, stray bytes), cut into tokens anywhere."""
    endless = st.builds(bytes.__mul__, st.sampled_from([b"\x80", b"\xe2", b"\xe2\x82"]), st.integers(8, 20))
    chunk = st.one_of(st.sampled_from(HARD_BYTES).map(str.encode), st.binary(min_size=1, max_size=2), endless)
    data = b"".join(draw(st.lists(chunk, max_size=25)))
    every_byte = set(range(len(data) + 1))
    cuts = sorted(draw(st.one_of(st.just(every_byte), st.sets(st.sampled_from(sorted(every_byte))))) | {0, len(data)})
    vocab = [b"p", b"", *(data[a:b] for a, b in pairwise(cuts))]
    output = list(range(2, len(vocab)))
    if draw(st.booleans()):  # tokens without text, as special tokens are
        output = [token for pair in zip(output, [1] * len(output), strict=True) for token in pair]
    stops = draw(st.lists(st.text("aé€b 🙂", min_size=1, max_size=4), max_size=3, unique=True))
    return Case(
        decode=byte_decode(vocab),
        prompt=[0],
        output=output,
        stops=tuple(stops),
        include_stop=draw(st.booleans()),
        piece_len=draw(st.integers(1, 3)),
    )


@given(byte_level_cases())
def test_byte_level_text_equals_text_decoded_at_once(case: Case) -> None:
    case.check()


SPACED_VOCAB = ["▁", "▁a", "a", "▁▁", "b", "▁ab"]


@pytest.mark.parametrize("make_decode", [metaspace_decode, byte_fallback_decode])
@given(
    prompt=st.lists(st.integers(0, len(SPACED_VOCAB) - 1), max_size=12),
    output=st.lists(st.integers(0, len(SPACED_VOCAB) - 1), max_size=20),
    stops=st.lists(st.text("ab ", min_size=1, max_size=3), max_size=2, unique=True),
    include=st.booleans(),
)
@example(prompt=[0], output=[1], stops=[], include=False)
def test_spaces_at_the_beginning_of_words_survive(
    make_decode: Callable[[list[str]], Decode], prompt: list[int], output: list[int], stops: list[str], include: bool
) -> None:
    Case(
        decode=make_decode(SPACED_VOCAB), prompt=prompt, output=output, stops=tuple(stops), include_stop=include
    ).check()


def test_characters_of_byte_tokens_come_whole() -> None:
    vocab = ["▁x", *(f"<0x{byte:02X}>" for byte in "é🙂".encode())]
    detokenizer = Detokenizer(byte_fallback_decode(vocab), [0], ())
    assert [detokenizer.append([i]).text for i in range(1, 7)] == ["", "é", "", "", "", "🙂"]


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=3))
def test_the_matcher_knows_how_much_could_become_a_stop_string(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(tuple(stops))
    found = first_stop(text, tuple(stops))
    assert matcher.advance(text) == found
    if found is None:
        longest = max(n for n in range(len(text) + 1) for stop in stops if stop.startswith(text[len(text) - n :]))
        assert matcher.num_matched_chars == longest


def test_text_that_may_begin_a_stop_string_is_held_until_it_cannot() -> None:
    vocab = [b"so ", b"<", b"|en", b"d|>", b"ds"]
    detokenizer = Detokenizer(byte_decode(vocab), [], ("<|end|>",))
    assert [detokenizer.append([i]).text for i in (0, 1, 2)] == ["so ", "", ""]
    assert detokenizer.append([4]).text == "<|ends"
    stopped = detokenizer.append([1, 2, 3, 0])
    assert (stopped.text, stopped.stop_reason, stopped.num_tokens) == ("", "<|end|>", 3)
    assert detokenizer.finish() == ""


def test_what_is_held_comes_at_the_end() -> None:
    vocab = [b"a<", "é".encode()[:1]]
    detokenizer = Detokenizer(byte_decode(vocab), [], ("<|",))
    assert detokenizer.append([0]).text == "a"
    assert detokenizer.append([1]).text == ""
    assert detokenizer.finish() == "<\ufffd"


def test_certain_text_before_a_broken_character_is_not_held() -> None:
    vocab = ["stop €".encode()[:-1], "€".encode()[-1:]]
    detokenizer = Detokenizer(byte_decode(vocab), [], ())
    assert [detokenizer.append([i]).text for i in (0, 1)] == ["stop ", "€"]


def test_the_first_tokens_are_not_searched_for_stop_strings() -> None:
    detokenizer = Detokenizer(byte_decode([b"."]), [], (".",), min_tokens=3)
    stopped = detokenizer.append([0] * 5)
    assert (stopped.text, stopped.stop_reason, stopped.num_tokens) == ("..", ".", 3)


@pytest.mark.parametrize("token", [b"x", b"\xff", b"\xe2", b""], ids=["letters", "stray", "cut", "no text"])
def test_a_token_costs_a_small_window_however_long_the_text_is(token: bytes) -> None:
    sizes: list[int] = []

    def decode(ids: list[int]) -> str:
        sizes.append(len(ids))
        return (token * len(ids)).decode(errors="replace")

    detokenizer = Detokenizer(decode, [0] * 1000, ())
    num_tokens = 2000
    detokenizer.append([0] * num_tokens)
    assert max(sizes) <= 40
    assert sum(sizes) <= 40 * num_tokens
