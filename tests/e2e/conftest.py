"""What the end-to-end tests share: the demo model's text by transformers, as the truth for every layout."""

from pathlib import Path

import pytest

from moeserve.models.checkpoint import resolve_model_folder

PROMPTS = (
    "The captain of the ship",
    "def read_config(path):\n",
    "#include <stdio.h>\n#define",
    "KING HENRY:\nMy lord,",
)


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    return resolve_model_folder("demo")


@pytest.fixture(scope="session")
def num_tokens() -> int:
    """Length of the continuations in `expected_texts`."""
    return 24


@pytest.fixture(scope="session")
def expected_texts(demo_folder: Path, num_tokens: int) -> dict[str, str]:
    """Greedy continuation of each prompt in float32, as transformers writes it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_folder)
    model = AutoModelForCausalLM.from_pretrained(demo_folder, dtype=torch.float32).eval()
    texts = {}
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        output = model.generate(**inputs, do_sample=False, max_new_tokens=num_tokens)
        texts[prompt] = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return texts
