"""The demo model's training text: domains, held-out chunks, tokenizer and seeded batches of token ids."""

import random
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END)

CHUNK_CHARS = 4096
HELD_OUT_EVERY = 33
CHATS_PER_DOMAIN = 3000
TOKENIZER_CHARS_PER_DOMAIN = 600_000
DOMAIN_WEIGHT_EXPONENT = 0.4

PYTHON_BYTES = 3_500_000
PYTHON_SKIPPED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "pydoc_data", "encodings", "idlelib"}
)
C_HEADER_BYTES = 1_800_000
C_HEADER_PATTERNS = ("*.h", "linux/*.h", "asm-generic/*.h", "*-linux-gnu/sys/*.h", "*-linux-gnu/bits/*.h")
MAX_SOURCE_BYTES = 120_000

TEXT_ORIGINS = {
    "dutch_poems": "Dutch prose and verse, 19th century",
    "english_dictionary": "Ambrose Bierce, The Devil's Dictionary (1911)",
    "english_novel": "W. H. Ainsworth, Jack Sheppard (1839)",
    "shakespeare_plays": "plays of William Shakespeare",
}

SENTENCE_END = re.compile(r"[.!?][\"')\]_»”]*(?=\s)|\n[ \t]*\n")
LINE_END = re.compile(r"\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """One kind of text; `held_out` chunks are never trained on, `training` texts are what lies between them."""

    name: str
    origin: str
    licence: str
    is_code: bool
    training: tuple[str, ...]
    held_out: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStream:
    """Token ids of one domain's texts, end to end, and the offsets at which a sequence may start."""

    token_ids: npt.NDArray[np.uint16]
    starts: npt.NDArray[np.int64] | None = None

    def window(self, rng: np.random.Generator, length: int) -> npt.NDArray[np.int64]:
        """`length` consecutive token ids from a random start; wraps around at the end of the stream."""
        start = int(rng.choice(self.starts)) if self.starts is not None else int(rng.integers(len(self.token_ids)))
        return self.token_ids.take(np.arange(start, start + length), mode="wrap").astype(np.int64)


def load_domains(text_dirs: Sequence[Path], *, seed: int) -> tuple[Domain, ...]:
    """A domain for every `*.txt` file of the folders, plus the standard library's Python and the system's C headers."""
    text_files = [path for text_dir in text_dirs for path in sorted(text_dir.glob("*.txt"))]
    if not text_files:
        raise ValueError(f"--text: no *.txt file in {[str(text_dir) for text_dir in text_dirs]}")
    headers = [path for pattern in C_HEADER_PATTERNS for path in Path("/usr/include").glob(pattern)]
    return (
        *(text_domain(path) for path in text_files),
        split_domain(
            sample_sources(python_files(), PYTHON_BYTES, seed=seed),
            name="python_stdlib",
            origin="sample of Python's standard library",
            licence="PSF licence",
            is_code=True,
        ),
        split_domain(
            sample_sources(headers, C_HEADER_BYTES, seed=seed),
            name="c_headers",
            origin="sample of C headers in /usr/include",
            licence="each header's own (GNU C library: LGPL-2.1-or-later; Linux: GPL-2.0 with syscall note; others)",
            is_code=True,
        ),
    )


def text_domain(path: Path) -> Domain:
    """The domain of one text file."""
    known = path.stem in TEXT_ORIGINS
    return split_domain(
        [path.read_text(encoding="utf-8")],
        name=path.stem,
        origin=TEXT_ORIGINS.get(path.stem, path.name),
        licence="public domain" if known else "not stated",
        is_code=False,
    )


def python_files() -> list[Path]:
    """The standard library's Python files, without its tests, third-party packages and tables."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return [path for path in root.rglob("*.py") if not PYTHON_SKIPPED & set(path.relative_to(root).parts)]


def sample_sources(paths: Sequence[Path], max_bytes: int, *, seed: int) -> list[str]:
    """Texts of files in seeded order until `max_bytes` are reached; large and undecodable files are left out."""
    shuffled = sorted(paths)
    random.Random(seed).shuffle(shuffled)
    texts: list[str] = []
    num_bytes = 0
    for path in shuffled:
        size = path.stat().st_size
        if num_bytes + size > max_bytes or not 200 < size < MAX_SOURCE_BYTES:
            continue
        try:
            texts.append(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            continue
        num_bytes += size
    return texts


def split_domain(documents: Sequence[str], *, name: str, origin: str, licence: str, is_code: bool) -> Domain:
    """Hold out every 33rd contiguous chunk of about 4,096 characters (cut at line ends)."""
    training: list[str] = []
    held_out: list[str] = []
    chunk_index = 0
    for document in documents:
        run: list[str] = []
        for chunk in chunks(document):
            if chunk_index % HELD_OUT_EVERY == HELD_OUT_EVERY // 2:
                held_out.append(chunk)
                training.append("".join(run))
                run = []
            else:
                run.append(chunk)
            chunk_index += 1
        training.append("".join(run))
    texts = tuple(text for text in training if text.strip())
    return Domain(name=name, origin=origin, licence=licence, is_code=is_code, training=texts, held_out=tuple(held_out))


def chunks(document: str) -> Iterator[str]:
    """Contiguous pieces of at least `CHUNK_CHARS` characters (the last may be shorter), whole lines."""
    lines: list[str] = []
    num_chars = 0
    for line in document.splitlines(keepends=True):
        lines.append(line)
        num_chars += len(line)
        if num_chars >= CHUNK_CHARS:
            yield "".join(lines)
            lines, num_chars = [], 0
    if lines:
        yield "".join(lines)


def train_tokenizer(domains: Sequence[Domain], *, vocab_size: int) -> Tokenizer:
    """A byte-level BPE of exactly `vocab_size` tokens from an equal share of every domain's training text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ("".join(domain.training)[:TOKENIZER_CHARS_PER_DOMAIN] for domain in domains), trainer=trainer
    )
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"tokenizer has {tokenizer.get_vocab_size()} tokens, expected {vocab_size}: too little text")
    return tokenizer


def text_stream(domain: Domain, tokenizer: Tokenizer) -> TokenStream:
    """The domain's training texts, each followed by the end-of-text token."""
    encodings = tokenizer.encode_batch([text + END_OF_TEXT for text in domain.training])
    return TokenStream(token_ids=np.concatenate([np.array(e.ids, dtype=np.uint16) for e in encodings]))


def chat_stream(domain: Domain, tokenizer: Tokenizer, rng: random.Random) -> TokenStream:
    """Chats made of the domain's text; sequences start where a chat starts."""
    encodings = tokenizer.encode_batch([make_chat(domain, rng) for _ in range(CHATS_PER_DOMAIN)])
    lengths = [len(encoding.ids) for encoding in encodings]
    return TokenStream(
        token_ids=np.concatenate([np.array(e.ids, dtype=np.uint16) for e in encodings]),
        starts=np.cumsum([0, *lengths[:-1]], dtype=np.int64),
    )


def make_chat(domain: Domain, rng: random.Random) -> str:
    """One or two turns in ChatML: the user gives a fragment, the assistant continues it and stops."""
    text = rng.choices(domain.training, weights=[len(text) for text in domain.training])[0]
    boundary = LINE_END if domain.is_code else SENTENCE_END
    position = next_boundary(text, rng.randrange(max(1, len(text) - 1500)), boundary, count=1)
    chat = ""
    for _ in range(rng.choice((1, 1, 2))):
        fragment_end = position + rng.randint(30, 320)
        fragment_end += len(text[fragment_end:].split(maxsplit=1)[0]) if text[fragment_end:].strip() else 0
        if domain.is_code or rng.random() < 0.5:
            fragment_end = next_boundary(text, position + rng.randint(20, 240), boundary, count=1)
        reply_end = next_boundary(text, fragment_end, boundary, count=rng.randint(2, 8) if domain.is_code else 2)
        fragment = text[position:fragment_end].strip()
        reply = text[fragment_end:reply_end].strip("\n") if domain.is_code else text[fragment_end:reply_end].strip()
        chat += f"{IM_START}user\n{fragment}{IM_END}\n{IM_START}assistant\n{reply}{IM_END}\n"
        position = reply_end
    return chat


def next_boundary(text: str, position: int, boundary: re.Pattern[str], *, count: int) -> int:
    """Offset after the `count`-th boundary behind `position`, at most 600 characters further on."""
    limit = min(len(text), position + 600)
    for _ in range(count):
        match = boundary.search(text, position, limit)
        if match is None:
            return limit
        position = match.end()
    return position


class BatchSampler:
    """Draws training batches: a domain by weight, then a window of its text or of its chats."""

    def __init__(self, domains: Sequence[Domain], tokenizer: Tokenizer, *, chat_share: float, seed: int) -> None:
        chat_rng = random.Random(seed)
        self._rng = np.random.default_rng(seed)
        self._chat_share = chat_share
        self._texts = [text_stream(domain, tokenizer) for domain in domains]
        self._chats = [chat_stream(domain, tokenizer, chat_rng) for domain in domains]
        weights = np.array([len(stream.token_ids) for stream in self._texts]) ** DOMAIN_WEIGHT_EXPONENT
        self.domain_weights: npt.NDArray[np.float64] = weights / weights.sum()
        self.domain_tokens: list[int] = [len(stream.token_ids) for stream in self._texts]

    def batch(self, batch_size: int, sequence_length: int) -> npt.NDArray[np.int64]:
        """Token ids of shape [batch_size, sequence_length + 1]: inputs and, shifted by one, labels."""
        domain_ids = self._rng.choice(len(self._texts), size=batch_size, p=self.domain_weights)
        streams = [
            self._chats[domain_id] if self._rng.random() < self._chat_share else self._texts[domain_id]
            for domain_id in domain_ids
        ]
        return np.stack([stream.window(self._rng, sequence_length + 1) for stream in streams])
