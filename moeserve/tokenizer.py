"""Text to token ids and back, and the chat template, from a checkpoint's own files.

Reads `tokenizer.json` with the `tokenizers` library; transformers, which takes seconds to import, is asked only where
a checkpoint has no such file.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from moeserve.chat_template import ChatTemplate, ChatTemplateError
from moeserve.config import ConfigError

_SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Encodes, decodes, and renders chats; made by `load_tokenizer`."""

    def __init__(
        self, backend: tokenizers.Tokenizer, *, special_tokens: Mapping[str, str], chat_template: str | None
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        known = [token for token in special_tokens.values() if backend.token_to_id(token) is not None]
        backend.add_special_tokens(known)  # marks them special; their ids stay
        self._backend = backend
        self._special_tokens = dict(special_tokens)
        self._chat_template = chat_template
        added = backend.get_added_tokens_decoder()
        self._added_bytes = {token_id: token.content.encode() for token_id, token in added.items()}
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size = max(backend.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
        """One more than the highest token id."""

    @property
    def eos_token_id(self) -> int | None:
        eos_token = self._special_tokens.get("eos_token")
        return None if eos_token is None else self._backend.token_to_id(eos_token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Raises ValueError for text that is not valid Unicode (lone surrogates)."""
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Ids that the tokenizer does not know give no text."""
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds in the middle of a text; empty for an id without a token."""
        added = self._added_bytes.get(token_id)
        if added is not None:
            return added
        token = self._backend.id_to_token(token_id)
        return b"" if token is None else self._token_codec.to_bytes(token)

    def token_text(self, token_id: int) -> str:
        r"""The token as text; `bytes:\x..` where it is only a part of a character."""
        raw = self.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The conversation as one prompt, special tokens included: encode it with `add_special_tokens=False`.

        Raises ChatTemplateError where there is no template, or it refuses the messages.
        """
        return self._template.render(messages, add_generation_prompt=add_generation_prompt, variables=variables)

    @cached_property
    def _template(self) -> ChatTemplate:
        if self._chat_template is None:
            raise ChatTemplateError("this model has no chat template: use /v1/completions")
        return ChatTemplate(self._chat_template, self._special_tokens)

    @cached_property
    def _token_codec(self) -> "_TokenCodec":
        decoder = self._backend.decoder
        return _TokenCodec(uses_byte_alphabet=decoder is not None and b"ByteLevel" in decoder.__getstate__())


class _TokenCodec:
    """How the vocabulary writes bytes: GPT-2's alphabet of 256 letters, or pieces with U+2581 and <0xNN>."""

    def __init__(self, *, uses_byte_alphabet: bool) -> None:
        self._bytes_by_letter = _byte_alphabet() if uses_byte_alphabet else None

    def to_bytes(self, token: str) -> bytes:
        if self._bytes_by_letter is not None:
            return b"".join(self._bytes_by_letter.get(letter) or letter.encode() for letter in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return token.replace("\u2581", " ").encode()


def _byte_alphabet() -> dict[str, bytes]:
    """Printable Latin-1 bytes stand for themselves, the others for the letters from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): bytes([byte]) for byte in printable}
    return letters | {chr(0x100 + i): bytes([byte]) for i, byte in enumerate(others)}


def load_tokenizer(folder: Path) -> Tokenizer:
    """Tokenizer of the checkpoint in `folder`. Raises ConfigError where its files are missing or broken."""
    config = _read_json(folder / "special_tokens_map.json") | _read_json(folder / "tokenizer_config.json")
    path = folder / "tokenizer.json"
    try:
        backend = tokenizers.Tokenizer.from_file(str(path)) if path.exists() else _convert(folder)
    except Exception as error:  # tokenizers raises plain Exception, transformers a zoo
        raise ConfigError(f"cannot read the tokenizer in {folder}: {error}") from error
    special_tokens = {name: _content(config[name]) for name in _SPECIAL_TOKEN_NAMES if config.get(name)}
    return Tokenizer(backend, special_tokens=special_tokens, chat_template=_find_chat_template(folder, config))


def _convert(folder: Path) -> tokenizers.Tokenizer:
    """Let transformers build the fast tokenizer from older files (sentencepiece, vocab.json and merges.txt)."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ConfigError("there is no tokenizer.json, and the other files do not convert to one")
    return backend


def _find_chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """A file of its own wins over the entry in tokenizer_config.json, which is one template or a list of named ones."""
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    templates = config.get("chat_template")
    if not isinstance(templates, list):
        return templates
    return {entry["name"]: str(entry["template"]) for entry in templates}.get("default")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    return content if isinstance(content, dict) else {}


def _content(token: str | Mapping[str, Any]) -> str:
    """Special tokens are given as text or as a record with its flags."""
    return token if isinstance(token, str) else str(token["content"])
