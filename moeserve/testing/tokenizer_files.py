"""The tokenizer of a made-up checkpoint: a small byte-level BPE, trained on the spot, with a chat template."""

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TEXT = (
    "The expert sits where the tokens are, and the tokens go where the expert sits.",
    "A placement remembers; a planner that forgets moves everything to win half a percent.",
    "def combine(outputs, weights): return sum(w * y for w, y in zip(weights, outputs))",
    "Grüße aus Köln, 東京からこんにちは, привет из Москвы 🙂🙃",
)


def write_tokenizer(folder: Path, *, vocab_size: int = 400, chat_template: str | None = CHAT_TEMPLATE) -> None:
    """`tokenizer.json` and `tokenizer_config.json`; ids 0, 1, 2 are SPECIAL_TOKENS, the last one ends a turn."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_TEXT * 4, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
    }
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
