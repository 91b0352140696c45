"""Encoding, decoding and chat templates against transformers, on tokenizers trained here."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from moeserve.chat_template import ChatTemplateError
from moeserve.config import ConfigError
from moeserve.testing.tokenizer_files import SPECIAL_TOKENS, write_tokenizer
from moeserve.tokenizer import Tokenizer, load_tokenizer

TEXTS = (
    "The expert sits where the tokens are.",
    "  leading, trailing   and\n\n\tinner  space ",
    "Grüße aus Köln, 東京からこんにちは 🙂🙃 नमस्ते",
    "<|im_start|>user\nhi<|im_end|>",
    "can't won't it's 1234567 a_b(c)[d]{e}",
    "",
)


def write_sentencepiece_style_tokenizer(folder: Path) -> None:
    """As Llama and Mixtral have it: U+2581 for spaces, <0xNN> for bytes, <s> before every text."""
    special = ["<unk>", "<s>", "</s>"]
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=360, special_tokens=special + byte_tokens, show_progress=False)
    backend.train_from_iterator(["the expert sits where the tokens are"] * 4, trainer)
    content = json.loads(backend.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] in special]
    backend = tokenizers.Tokenizer.from_str(json.dumps(content))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"content": "<s>", "lstrip": False, "normalized": False, "rstrip": False, "__type": "AddedToken"},
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module", params=["byte level", "sentencepiece style"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("tokenizer") / "model"
    if request.param == "byte level":
        write_tokenizer(folder)
    else:
        write_sentencepiece_style_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("special", [False, True])
def test_encodes_like_transformers(
    tokenizer: Tokenizer, oracle: PreTrainedTokenizerFast, text: str, special: bool
) -> None:
    assert tokenizer.encode(text, add_special_tokens=special) == oracle.encode(text, add_special_tokens=special)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ids=st.lists(st.integers(0, 349), max_size=12), skip=st.booleans())
def test_decodes_like_transformers(
    tokenizer: Tokenizer, oracle: PreTrainedTokenizerFast, ids: list[int], skip: bool
) -> None:
    ids = [token_id % tokenizer.vocab_size for token_id in ids]
    assert tokenizer.decode(ids, skip_special_tokens=skip) == oracle.decode(ids, skip_special_tokens=skip)


def test_knows_what_transformers_knows(tokenizer: Tokenizer, oracle: PreTrainedTokenizerFast) -> None:
    assert tokenizer.vocab_size == len(oracle)
    assert tokenizer.eos_token_id == oracle.eos_token_id
    assert set(oracle.all_special_ids) <= tokenizer.special_token_ids


@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_tokens_are_the_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    joined = b"".join(map(tokenizer.token_bytes, ids)).decode()
    assert joined in (text, " " + text), "some tokenizers put a space before every text"


def test_token_text_is_readable_or_names_its_bytes(tokenizer: Tokenizer) -> None:
    for token_id in range(tokenizer.vocab_size):
        raw, text = tokenizer.token_bytes(token_id), tokenizer.token_text(token_id)
        if text.startswith("bytes:"):
            assert bytes.fromhex(text.removeprefix("bytes:").replace("\\x", "")) == raw
        else:
            assert text.encode() == raw
    assert any(tokenizer.token_text(token_id).startswith("bytes:") for token_id in range(tokenizer.vocab_size))
    assert tokenizer.token_bytes(tokenizer.vocab_size + 5) == b""


def test_ids_without_a_token_have_no_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("expert", add_special_tokens=False)
    assert tokenizer.decode([*ids, tokenizer.vocab_size + 5]) == tokenizer.decode(ids)


def test_a_saved_truncation_does_not_cut_prompts(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode(TEXTS[0])) == TEXTS[0]


def test_older_files_are_converted(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "new")
    content = json.loads((tmp_path / "new" / "tokenizer.json").read_text())
    old = tmp_path / "old"
    old.mkdir()
    (old / "vocab.json").write_text(json.dumps(content["model"]["vocab"]))
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in content["model"]["merges"]]
    (old / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    (old / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    converted = load_tokenizer(old)
    assert converted.encode(TEXTS[0]) == load_tokenizer(tmp_path / "new").encode(TEXTS[0])


def test_nothing_to_read_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the tokenizer in"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot read the tokenizer in"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        load_tokenizer(tmp_path)


MESSAGES: Sequence[dict[str, Any]] = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Où est l'expert? <b>&amp;</b>"},
    {"role": "assistant", "content": "Là."},
    {"role": "user", "content": "Merci"},
)
TEMPLATES = {
    "whitespace control": """
        {%- for message in messages %}
            {{- '<' + message.role + '> ' + message['content'] | trim }}
            {% if loop.last %}
            (last)
            {% endif %}
        {%- endfor %}
        {% if add_generation_prompt %}assistant: {% endif %}""",
    "break and continue": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}"
    "{% if loop.index == 3 %}{% break %}{% endif %}{% endfor %}",
    "tojson": "{{ messages | tojson }}{{ messages[1] | tojson(indent=2) }}",
    "special tokens": "{{ eos_token }}{{ pad_token }}{% if bos_token is defined %}{{ bos_token }}{% endif %}",
    "generation blocks": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "tools and documents": "{% if tools is none and documents is none %}none{% endif %}",
    "own variables": "{{ enable_thinking }}",
    "date": "{{ strftime_now('%Y') }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_renders_like_transformers(tmp_path: Path, name: str, add_generation_prompt: bool) -> None:
    write_tokenizer(tmp_path, chat_template=TEMPLATES[name])
    arguments = {"add_generation_prompt": add_generation_prompt, "enable_thinking": False}
    oracle = AutoTokenizer.from_pretrained(tmp_path)
    expected = oracle.apply_chat_template(list(MESSAGES), tokenize=False, **arguments)
    assert load_tokenizer(tmp_path).apply_chat_template(MESSAGES, **arguments) == expected


def test_template_of_its_own_file_wins(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert load_tokenizer(tmp_path).apply_chat_template(MESSAGES) == "from the file"


def test_the_default_of_named_templates_is_taken(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": named}))
    assert load_tokenizer(tmp_path).apply_chat_template(MESSAGES) == "plain"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[9].content.upper() }}", "no element 9"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for %}", "does not compile"),
    ],
)
def test_a_template_that_refuses(tmp_path: Path, template: str, reason: str) -> None:
    write_tokenizer(tmp_path, chat_template=template)
    tokenizer = load_tokenizer(tmp_path)
    with pytest.raises(ChatTemplateError, match=reason):
        tokenizer.apply_chat_template(list(MESSAGES))


def test_no_template(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, chat_template=None)
    with pytest.raises(ChatTemplateError, match="no chat template"):
        load_tokenizer(tmp_path).apply_chat_template(MESSAGES)


def test_special_tokens_of_the_config_are_special(tmp_path: Path) -> None:
    """A checkpoint may name an ordinary token as its end of text."""
    write_tokenizer(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.add_tokens(["<turn>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": "<turn>"}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eos_token_id == backend.token_to_id("<turn>")
    assert tokenizer.decode(tokenizer.encode("a<turn>b")) == "ab"
    assert {backend.token_to_id(token) for token in SPECIAL_TOKENS} <= tokenizer.special_token_ids
