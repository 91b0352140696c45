"""The random checkpoint: transformers loads it, its sizes are those promised, its tokenizer is a real one."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.make_checkpoint import SHAPES, ensure_checkpoint

TINY = SHAPES["tiny"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("checkpoints") / "tiny"
    assert ensure_checkpoint(target, TINY)
    return target


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def test_transformers_loads_every_weight_and_counts_as_we_do(folder: Path, model: Any) -> None:
    assert sum(parameter.numel() for parameter in model.parameters()) == TINY.num_parameters
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    tables = 2 * TINY.vocab_size * TINY.hidden_size
    of_experts = sum(weight.numel() for name, weight in model.named_parameters() if ".experts." in name)
    share = TINY.num_experts_per_token / TINY.num_experts
    assert TINY.num_active_parameters == TINY.num_parameters - tables - of_experts * (1 - share)
    assert json.loads((folder / "config.json").read_text())["num_experts"] == TINY.num_experts


def test_what_comes_next_depends_on_the_token_and_is_finite(model: Any) -> None:
    prompts = torch.randint(3, TINY.vocab_size, (16, 8), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        logits = model(prompts).logits[:, -1]
    assert torch.isfinite(logits).all()
    assert len(set(logits.argmax(-1).tolist())) >= 12


def test_the_tokenizer_fills_the_vocabulary_and_gives_the_text_back(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "def serve(experts):\n    return 'größer' # ünïcode → 漢字\n"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) < len(text.encode())
    assert len(tokenizer) == TINY.vocab_size
    assert tokenizer.eos_token_id == json.loads((folder / "config.json").read_text())["eos_token_id"]


def test_a_second_call_leaves_it_alone_and_another_folder_gets_the_same_weights(folder: Path, tmp_path: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert not ensure_checkpoint(folder, TINY)
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert ensure_checkpoint(tmp_path / "again", TINY)
    first, second = (
        hashlib.sha256((where / "model.safetensors").read_bytes()).hexdigest() for where in (folder, tmp_path / "again")
    )
    assert first == second
    assert [path.name for path in tmp_path.iterdir()] == ["again"]


def test_the_shapes_of_the_comparison() -> None:
    mid = SHAPES["mid"]
    assert (mid.hidden_size, mid.num_layers, mid.num_experts, mid.num_experts_per_token) == (1024, 16, 32, 4)
    assert round(mid.num_parameters / 1e6) == 865
    assert round(mid.num_active_parameters / 1e6) == 143
