"""What a checkpoint must hold: missing, extra, misshaped and mistyped tensors are named in one line, without torch."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moeserve.config import ConfigError
from moeserve.models.checkpoint import CheckpointError, open_checkpoint, resolve_model_folder, validate_checkpoint
from moeserve.models.hf_config import read_model_spec
from moeserve.testing.checkpoints import TINY_ARCHITECTURES, write_tiny_checkpoint

Tensors = dict[str, torch.Tensor]
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def change(tiny: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the tiny checkpoint with its tensors (and config) changed."""

    def make(edit: Callable[[Tensors], object], **config: Any) -> Path:
        tensors = load_file(tiny / "model.safetensors")
        edit(tensors)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
        values = json.loads((tiny / "config.json").read_text()) | config
        (tmp_path / "config.json").write_text(json.dumps(values))
        return tmp_path

    return make


def validate(folder: Path) -> None:
    validate_checkpoint(folder, read_model_spec(folder))


def refusal(folder: Path) -> str:
    spec = read_model_spec(folder)
    with pytest.raises(CheckpointError) as caught:
        validate_checkpoint(folder, spec)
    message = str(caught.value)
    assert str(folder) in message
    assert "\n" not in message
    with pytest.raises(CheckpointError):
        open_checkpoint(folder, spec, torch.float32)
    return message


@pytest.mark.parametrize("architecture", TINY_ARCHITECTURES)
def test_what_transformers_writes_is_whole(architecture: str, tmp_path: Path) -> None:
    validate(write_tiny_checkpoint(tmp_path, architecture))


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight", "model.norm.weight", EXPERT])
def test_a_missing_tensor(name: str, change: Callable[..., Path]) -> None:
    assert f"tensor {name} is missing" in refusal(change(lambda tensors: tensors.pop(name)))


def test_of_several_missing_tensors_one_is_named(change: Callable[..., Path]) -> None:
    def edit(tensors: Tensors) -> None:
        for name in [name for name in tensors if ".layers.1.mlp." in name]:
            del tensors[name]

    assert "tensor model.layers.1.mlp.gate.weight is missing (and 24 more)" in refusal(change(edit))


def test_an_extra_tensor(change: Callable[..., Path]) -> None:
    folder = change(lambda tensors: tensors.update({"model.layers.0.mlp.experts.8.up_proj.weight": torch.zeros(1)}))
    expected = (
        "model.safetensors: tensor model.layers.0.mlp.experts.8.up_proj.weight is not one of Qwen3MoeForCausalLM's"
    )
    assert expected in refusal(folder)


@pytest.mark.parametrize("name", [EXPERT, "model.layers.0.self_attn.q_norm.weight", "lm_head.weight"])
def test_a_misshaped_tensor(name: str, change: Callable[..., Path]) -> None:
    shape: list[int] = []

    def edit(tensors: Tensors) -> None:
        shape.extend(tensors[name].shape)
        tensors[name] = torch.zeros(*shape[:-1], shape[-1] + 1)

    message = refusal(change(edit))
    found = [*shape[:-1], shape[-1] + 1]
    assert f"model.safetensors: tensor {name} should have the shape {shape}, found {found}" in message


def test_a_tensor_of_whole_numbers(change: Callable[..., Path]) -> None:
    message = refusal(change(lambda tensors: tensors.update({EXPERT: tensors[EXPERT].to(torch.int32)})))
    assert f"tensor {EXPERT} should have one of the types F32, BF16, F16, F64, F8_E4M3, found I32" in message


def test_a_quantised_tensor_needs_its_scales(change: Callable[..., Path]) -> None:
    folder = change(lambda tensors: tensors.update({EXPERT: tensors[EXPERT].to(torch.float8_e4m3fn)}))
    assert f"tensor {EXPERT}_scale_inv is missing" in refusal(folder)


def test_a_norm_is_never_quantised(change: Callable[..., Path]) -> None:
    name = "model.norm.weight"
    folder = change(lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn)}))
    assert f"tensor {name} should have one of the types F32, BF16, F16, F64, found F8_E4M3" in refusal(folder)


def test_scales_of_another_block_size(change: Callable[..., Path]) -> None:
    def edit(tensors: Tensors) -> None:
        tensors[EXPERT] = tensors[EXPERT].to(torch.float8_e4m3fn)
        tensors[f"{EXPERT}_scale_inv"] = torch.ones(2, 2)

    block = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    validate(change(edit, quantization_config=block))
    message = refusal(change(edit))
    assert f"tensor {EXPERT}_scale_inv should have the shape [1, 1], found [2, 2]" in message


def test_a_tied_output_matrix_may_be_there_or_not(change: Callable[..., Path]) -> None:
    validate(change(lambda tensors: None, tie_word_embeddings=True))
    validate(change(lambda tensors: tensors.pop("lm_head.weight"), tie_word_embeddings=True))


def test_rope_tables_are_ignored(change: Callable[..., Path]) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    validate(change(lambda tensors: tensors.update({name: torch.zeros(4)})))


def test_draft_layers_are_ignored_in_deepseek_v3_only(change: Callable[..., Path], tmp_path: Path) -> None:
    extra = {"model.layers.2.eh_proj.weight": torch.zeros(4)}
    assert "model.layers.2.eh_proj.weight is not one of" in refusal(change(lambda tensors: tensors.update(extra)))
    folder = write_tiny_checkpoint(tmp_path / "v3", "deepseek_v3")
    path = folder / "model.safetensors"
    save_file(load_file(path) | extra, path)
    validate(folder)


def test_a_cut_file(tiny: Path, change: Callable[..., Path]) -> None:
    folder = change(lambda tensors: None)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert f"{path}: cut" in refusal(folder)


def test_a_folder_without_weights(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((tiny / "config.json").read_text())
    assert "no safetensors file" in refusal(tmp_path)


def test_checking_needs_no_torch(tiny: Path) -> None:
    program = (
        "import sys, pathlib; from moeserve.models import checkpoint, hf_config; folder = pathlib.Path(sys.argv[1]);"
        "checkpoint.validate_checkpoint(folder, hf_config.read_model_spec(folder));"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", program, tiny], timeout=60, check=False).returncode == 0


def test_a_model_is_found_by_its_folder(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model_folder(str(tiny)) == tiny
    monkeypatch.setenv("HOME", str(tiny.parent))
    assert resolve_model_folder(f"~/{tiny.name}") == tiny
    with pytest.raises(ConfigError, match="model must be `demo` or the folder of a Hugging Face checkpoint, got 'no'"):
        resolve_model_folder("no")
    with pytest.raises(ConfigError, match=r"model must be a folder with a config\.json"):
        resolve_model_folder(str(tmp_path))


def test_the_demo_model_is_whole() -> None:
    validate(resolve_model_folder("demo"))
