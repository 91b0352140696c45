"""The reader: every layout gives the same tensors, slices are those of the whole, and nothing else is read."""

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from moeserve.models.checkpoint import CheckpointError, open_checkpoint
from moeserve.models.checkpoint_reader import CheckpointReader
from moeserve.models.hf_config import read_model_spec
from moeserve.models.spec import ModelSpec, canonical_shapes
from moeserve.parallel import shard_range
from moeserve.testing.random_checkpoints import random_hf_model

Tensors = dict[str, torch.Tensor]
BASE: dict[str, Any] = {
    "vocab_size": 19,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "eos_token_id": None,
    "pad_token_id": None,
    "bos_token_id": None,
}


def open_folder(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[ModelSpec, CheckpointReader]:
    spec = read_model_spec(folder)
    return spec, open_checkpoint(folder, spec, dtype)


def save(folder: Path, model_type: str, tensors: Tensors, architecture: str, **fields: Any) -> Path:
    config = AutoConfig.for_model(model_type, **BASE | fields).to_dict() | {"architectures": [architecture]}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def fuse(tensors: Tensors, block: str, parts: tuple[str, str, str]) -> Tensors:
    """Experts of one tensor each as [E, 2F, D] and [E, D, F]."""
    experts = f"model.layers.0.{block}.experts"
    gate, up, down = (
        torch.stack([tensors.pop(f"{experts}.{expert}.{part}.weight") for expert in range(6)]) for part in parts
    )
    return tensors | {f"{experts}.gate_up_proj": torch.cat((gate, up), dim=1), f"{experts}.down_proj": down}


def transpose(tensors: Tensors) -> Tensors:
    return {name: tensor.mT if tensor.dim() == 3 else tensor for name, tensor in tensors.items()}


def rename(tensors: Tensors, old: str, new: str) -> Tensors:
    return {name.replace(old, new): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("width", [8, 16, 12], ids=["2F = D", "F = D", "neither"])
@pytest.mark.parametrize("layout", ["fused", "transposed"])
def test_qwen3_experts_in_every_layout(layout: str, width: int, tmp_path: Path) -> None:
    """With 2F = D one of the fused tensors is square, with F = D the other: they still tell which way round it is."""
    fields: dict[str, Any] = {"moe_intermediate_size": width, "num_experts": 6}
    random_hf_model(AutoConfig.for_model("qwen3_moe", **BASE | fields)).save_pretrained(tmp_path)
    spec, reader = open_folder(tmp_path)
    expected = {name: reader.read(name) for name in canonical_shapes(spec)}
    tensors = fuse(load_file(tmp_path / "model.safetensors"), "mlp", ("gate_proj", "up_proj", "down_proj"))
    if layout == "transposed":
        tensors = transpose(tensors)
    _, reader = open_folder(save(tmp_path, "qwen3_moe", tensors, "Qwen3MoeForCausalLM", **fields))
    for name, tensor in expected.items():
        torch.testing.assert_close(reader.read(name), tensor, atol=0, rtol=0)


@pytest.mark.parametrize("block", ["mlp", "block_sparse_moe"])
def test_mixtral_experts_fused_under_either_name(block: str, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"intermediate_size": 12, "num_local_experts": 6}
    random_hf_model(AutoConfig.for_model("mixtral", **BASE | fields)).save_pretrained(tmp_path)
    spec, reader = open_folder(tmp_path)
    expected = {name: reader.read(name) for name in canonical_shapes(spec)}
    tensors = fuse(load_file(tmp_path / "model.safetensors"), "block_sparse_moe", ("w1", "w3", "w2"))
    tensors = rename(tensors, "block_sparse_moe", block)
    _, reader = open_folder(save(tmp_path, "mixtral", tensors, "MixtralForCausalLM", **fields))
    for name, tensor in expected.items():
        torch.testing.assert_close(reader.read(name), tensor, atol=0, rtol=0)


def test_canonical_experts_are_the_parameters_of_transformers(tmp_path: Path) -> None:
    config = AutoConfig.for_model("olmoe", **BASE, intermediate_size=12, num_experts=6)
    model = random_hf_model(config)
    model.save_pretrained(tmp_path)
    _, reader = open_folder(tmp_path)
    experts = model.model.layers[0].mlp.experts
    assert torch.equal(reader.read("layers.0.moe.experts.gate_up_proj"), experts.gate_up_proj)
    assert torch.equal(reader.read("layers.0.moe.experts.down_proj"), experts.down_proj)


def test_gpt_oss_experts_come_with_gate_rows_first(tmp_path: Path) -> None:
    config = AutoConfig.for_model("gpt_oss", **BASE, intermediate_size=12, num_local_experts=6, head_dim=8)
    model = random_hf_model(config)
    model.save_pretrained(tmp_path)
    _, reader = open_folder(tmp_path)
    experts = model.model.layers[0].mlp.experts
    gate, up = experts.gate_up_proj[..., ::2], experts.gate_up_proj[..., 1::2]
    assert torch.equal(reader.read("layers.0.moe.experts.gate_up_proj"), torch.cat((gate.mT, up.mT), dim=1))
    bias = experts.gate_up_proj_bias
    assert torch.equal(reader.read("layers.0.moe.experts.gate_up_bias"), torch.cat((bias[:, ::2], bias[:, 1::2]), 1))
    assert torch.equal(reader.read("layers.0.moe.experts.down_proj"), experts.down_proj.mT)


@pytest.fixture(
    params=[
        ("qwen2_moe", {"moe_intermediate_size": 12, "shared_expert_intermediate_size": 20, "num_experts": 7}),
        ("gpt_oss", {"intermediate_size": 12, "num_local_experts": 7, "head_dim": 8}),
    ],
    ids=["per expert", "interleaved"],
)
def reader_and_spec(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[ModelSpec, CheckpointReader]:
    model_type, fields = request.param
    random_hf_model(AutoConfig.for_model(model_type, **BASE | fields)).save_pretrained(tmp_path)
    return open_folder(tmp_path)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 32])
def test_shards_of_every_axis_make_up_the_whole(size: int, reader_and_spec: tuple[ModelSpec, CheckpointReader]) -> None:
    """size 32 is more ranks than most axes have entries: some shards are empty."""
    spec, reader = reader_and_spec
    for name, shape in canonical_shapes(spec).items():
        whole = reader.read(name)
        assert whole.shape == shape
        for axis, length in enumerate(shape):
            lead = (slice(None),) * axis
            shards = [reader.read(name, *lead, shard_range(length, size, rank)) for rank in range(size)]
            assert torch.equal(torch.cat(shards, dim=axis), whole)


@pytest.mark.parametrize(
    "index",
    [
        (2,),
        (-1,),
        (slice(1, 3), slice(2, 9)),
        (0, slice(5, 19), slice(3, 4)),
        (slice(None), 3, slice(None, None, 2)),
        (slice(None, None, 3), slice(1, None, 5), -2),
        (slice(4, 4),),
    ],
    ids=str,
)
def test_indices_mean_what_they_mean_to_torch(
    index: tuple[slice | int, ...], reader_and_spec: tuple[ModelSpec, CheckpointReader]
) -> None:
    name = "layers.0.moe.experts.gate_up_proj"
    _, reader = reader_and_spec
    found = reader.read(name, *index)
    assert torch.equal(found, reader.read(name)[index])
    assert found.is_contiguous()


def test_an_index_out_of_range_is_a_programming_error(reader_and_spec: tuple[ModelSpec, CheckpointReader]) -> None:
    _, reader = reader_and_spec
    with pytest.raises(AssertionError, match="out of range"):
        reader.read("layers.0.moe.experts.gate_up_proj", 7)
    with pytest.raises(AssertionError, match="has 1 axes, got 2"):
        reader.read("final_norm.weight", 0, 0)
    with pytest.raises(AssertionError, match="forward"):
        reader.read("final_norm.weight", slice(None, None, -1))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_tensors_come_in_the_dtype_asked_for(stored: torch.dtype, dtype: torch.dtype, tmp_path: Path) -> None:
    config = AutoConfig.for_model("olmoe", **BASE, intermediate_size=12, num_experts=6)
    model = random_hf_model(config).to(stored)
    model.save_pretrained(tmp_path)
    _, reader = open_folder(tmp_path, dtype)
    weight = model.model.layers[0].mlp.gate.weight
    assert torch.equal(reader.read("layers.0.moe.gate.weight"), weight.to(dtype))
    assert torch.equal(reader.read("layers.0.moe.gate.weight", dtype=torch.float32), weight.float())


def test_what_is_read_is_ones_own(tmp_path: Path) -> None:
    config = AutoConfig.for_model("olmoe", **BASE, intermediate_size=12, num_experts=6)
    random_hf_model(config).save_pretrained(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    _, reader = open_folder(tmp_path)
    first = reader.read("embed_tokens.weight")
    kept = first.clone()
    first.zero_()
    assert torch.equal(reader.read("embed_tokens.weight"), kept)
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_a_file_that_has_gone_since_is_named(tmp_path: Path) -> None:
    config = AutoConfig.for_model("olmoe", **BASE, intermediate_size=12, num_experts=6)
    random_hf_model(config).save_pretrained(tmp_path)
    _, reader = open_folder(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        reader.read("embed_tokens.weight")


def test_only_the_slice_asked_for_is_read(tmp_path: Path) -> None:
    """A sparse file of 1 GiB, from which a few rows are read: its pages would show in the process's memory."""
    config = AutoConfig.for_model("olmoe", **BASE, intermediate_size=12, num_experts=6)
    random_hf_model(config).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    values = json.loads((tmp_path / "config.json").read_text()) | {"vocab_size": 2**24}
    (tmp_path / "config.json").write_text(json.dumps(values))
    header, offset = {}, 0
    for name, tensor in tensors.items():
        shape = [2**24, 16] if tensor.shape[0] == 19 else list(tensor.shape)
        num_bytes = 4 * torch.Size(shape).numel()
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, offset + num_bytes]}
        offset += num_bytes
    raw = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + offset)
    process = psutil.Process()
    _, reader = open_folder(tmp_path)
    before = process.memory_info().rss
    assert not reader.read("embed_tokens.weight", slice(2**23, 2**23 + 100)).any()
    assert process.memory_info().rss - before < 2**26
