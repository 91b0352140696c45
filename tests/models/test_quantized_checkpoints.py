"""FP8 and MXFP4 checkpoints, written here with number formats of our own in float64, read back exactly.

Then whole models: the logits are those of transformers with the decoded weights.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from moeserve.models.checkpoint import open_checkpoint, validate_checkpoint
from moeserve.models.decoder import Decoder
from moeserve.models.dequantize import dequantize_fp8, dequantize_mxfp4
from moeserve.models.hf_config import read_model_spec
from moeserve.models.spec import canonical_shapes
from moeserve.parallel import shard_range, single_rank_context
from moeserve.testing.random_checkpoints import random_hf_model
from moeserve.testing.stepping import logits_in_chunks
from moeserve_placement import ExpertPlacement

BLOCK = (8, 12)
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "eos_token_id": None,
    "pad_token_id": None,
    "bos_token_id": None,
}


def e4m3_values() -> Any:
    """The number of every byte: sign, 4 bits of exponent biased by 7, 3 of mantissa, no infinities."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    magnitude = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    magnitude[code & 127 == 127] = np.nan
    return np.where(code < 128, magnitude, -magnitude)


def quantize_fp8(weight: Any, block: tuple[int, int]) -> tuple[Any, Any, Any]:
    """Codes, scales, and the float64 numbers they stand for, of a [..., R, C] float64 matrix."""
    values = e4m3_values()
    grid = np.sort(values[np.isfinite(values)])
    *lead, rows, columns = weight.shape
    scales = np.empty((*lead, -(-rows // block[0]), -(-columns // block[1])), dtype=np.float32)
    decoded, scaled = np.empty_like(weight), np.empty_like(weight)
    for i in range(scales.shape[-2]):
        for j in range(scales.shape[-1]):
            at = (..., slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
            scale = (np.abs(weight[at]).max(axis=(-1, -2)) / 448).astype(np.float32)
            scales[..., i, j] = scale
            nearest = grid[np.abs(weight[at][..., None] / scale[..., None, None, None] - grid).argmin(axis=-1)]
            scaled[at], decoded[at] = nearest, nearest * np.float64(scale)[..., None, None]
    codes = np.array([np.flatnonzero(values == value)[0] for value in scaled.ravel()], dtype=np.uint8)
    return codes.reshape(weight.shape), scales, decoded


def quantize_mxfp4(weight: Any) -> tuple[Any, Any, Any]:
    """Packed codes, biased exponents, and the float64 numbers they stand for, of a [..., C] float64 tensor."""
    blocks = weight.reshape(*weight.shape[:-1], -1, 32)
    exponents = np.floor(np.log2(np.abs(blocks).max(axis=-1, keepdims=True))) - 2
    codes = np.abs(np.abs(blocks / 2.0**exponents)[..., None] - E2M1).argmin(axis=-1)
    decoded = (np.sign(blocks) * E2M1[codes] * 2.0**exponents).reshape(weight.shape)
    codes = (codes | np.where(blocks < 0, 8, 0)).astype(np.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponents[..., 0] + 127).astype(np.uint8), decoded


def as_fp8(codes: Any) -> torch.Tensor:
    return torch.from_numpy(codes).view(torch.float8_e4m3fn)


def test_every_fp8_code_is_decoded() -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(16, 16)
    found = dequantize_fp8(as_fp8(codes), torch.full((1, 1), 0.3), (range(16), range(16)), (16, 16))
    expected = (e4m3_values().reshape(16, 16) * np.float64(np.float32(0.3))).astype(np.float32)
    np.testing.assert_array_equal(found.numpy(), expected)


@pytest.mark.parametrize("exponent", [0, 1, 100, 127, 128, 200, 250])
def test_every_mxfp4_code_is_decoded_at_any_scale(exponent: int) -> None:
    codes = np.tile(np.arange(16, dtype=np.uint8), 2)
    packed = torch.from_numpy(codes[0::2] | codes[1::2] << 4).view(1, 16)
    found = dequantize_mxfp4(packed, torch.tensor([exponent], dtype=torch.uint8), (range(32),))
    expected = np.concatenate((E2M1, -E2M1))[codes] * 2.0 ** (exponent - 127)
    np.testing.assert_array_equal(found.numpy(), expected.astype(np.float32))


@pytest.mark.parametrize("shape", [(16, 24), (17, 25), (1, 1), (3, 9, 13)], ids=str)
def test_slices_of_fp8_with_ragged_blocks(shape: tuple[int, ...]) -> None:
    codes, scales, decoded = quantize_fp8(np.random.default_rng(0).normal(size=shape), BLOCK)
    *lead, rows, columns = shape
    for at in [
        (range(rows), range(columns)),
        (range(rows // 2, rows), range(columns // 3, columns // 2 + 1)),
        (range(0, rows, 3), range(1, columns, 2)),
        (range(0), range(columns)),
    ]:
        ranges = (*map(range, lead), *at)
        found = dequantize_fp8(as_fp8(codes), torch.from_numpy(scales), ranges, BLOCK)
        np.testing.assert_array_equal(found.numpy(), decoded[np.ix_(*ranges)].astype(np.float32))


@pytest.mark.parametrize("columns", [range(64), range(5, 37), range(40, 41), range(31, 64, 3), range(7, 7)], ids=str)
def test_slices_of_mxfp4(columns: range) -> None:
    blocks, scales, decoded = quantize_mxfp4(np.random.default_rng(0).normal(size=(3, 10, 64)))
    ranges = (range(1, 3), range(1, 10, 2), columns)
    found = dequantize_mxfp4(torch.from_numpy(blocks), torch.from_numpy(scales), ranges)
    np.testing.assert_array_equal(found.numpy(), decoded[np.ix_(*ranges)].astype(np.float32))


def write_quantized(folder: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, Any]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))


def fp8_checkpoint(folder: Path, scale_dtype: torch.dtype) -> Any:
    """DeepSeek-V3 with every linear weight in FP8 but the gate's and the output's; returns the decoded model."""
    config = AutoConfig.for_model(
        "deepseek_v3",
        **BASE,
        num_key_value_heads=4,
        intermediate_size=40,
        moe_intermediate_size=20,
        kv_lora_rank=16,
        q_lora_rank=12,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=10,
        n_routed_experts=8,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
    )
    random_hf_model(config).save_pretrained(folder)
    tensors, decoded = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        tensors[name] = decoded[name] = tensor
        if name.endswith(("_proj.weight", "_proj_with_mqa.weight")):
            codes, scales, _ = quantize_fp8(tensor.double().numpy(), BLOCK)
            scale_inv = torch.from_numpy(scales).to(scale_dtype)
            tensors |= {name: as_fp8(codes), f"{name}_scale_inv": scale_inv}
            rows, columns = tensor.shape
            factors = np.kron(scale_inv.double().numpy(), np.ones(BLOCK))[:rows, :columns]
            decoded[name] = torch.from_numpy(e4m3_values()[codes] * factors).float()
    write_quantized(folder, tensors, {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK)})
    oracle_folder = folder / "oracle"
    oracle_folder.mkdir()
    save_file(decoded, oracle_folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(oracle_folder)
    return from_pretrained(oracle_folder)


def from_pretrained(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def mxfp4_checkpoint(folder: Path) -> Any:
    """gpt-oss with its experts in MXFP4, rows out, as published; returns the decoded model."""
    config = AutoConfig.for_model(
        "gpt_oss", **BASE, intermediate_size=64, num_local_experts=4, num_key_value_heads=2, head_dim=8
    )
    model = random_hf_model(config)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for i, layer in enumerate(model.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            stored = f"model.layers.{i}.mlp.experts.{name}"
            blocks, scales, decoded = quantize_mxfp4(tensors.pop(stored).mT.double().numpy())
            tensors |= {f"{stored}_blocks": torch.from_numpy(blocks), f"{stored}_scales": torch.from_numpy(scales)}
            getattr(layer.mlp.experts, name).data.copy_(torch.from_numpy(decoded).mT)
    write_quantized(folder, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]})
    return model


def check_against(oracle: Any, folder: Path) -> None:
    spec = read_model_spec(folder)
    validate_checkpoint(folder, spec)
    placement = ExpertPlacement.identity(
        num_layers=len(spec.moe_layer_ids), num_logical_experts=spec.num_experts, num_ranks=1
    )
    reader = open_checkpoint(folder, spec, torch.float32)
    decoder = Decoder.build(spec, reader, single_rank_context(), placement, dtype=torch.float32)
    token_ids = torch.randint(96, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.inference_mode():
        expected_TV = oracle(torch.tensor([token_ids]), use_cache=False).logits[0]
    torch.testing.assert_close(logits_in_chunks(decoder, token_ids, 17), expected_TV, atol=1e-4, rtol=0)
    for name, shape in canonical_shapes(spec).items():
        for axis, length in enumerate(shape):
            lead = (slice(None),) * axis
            shards = [reader.read(name, *lead, shard_range(length, 3, rank)) for rank in range(3)]
            assert torch.equal(torch.cat(shards, dim=axis), reader.read(name))


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_fp8_model_gives_the_logits_of_its_decoded_weights(scale_dtype: torch.dtype, tmp_path: Path) -> None:
    check_against(fp8_checkpoint(tmp_path, scale_dtype), tmp_path)


def test_an_mxfp4_model_gives_the_logits_of_its_decoded_weights(tmp_path: Path) -> None:
    check_against(mxfp4_checkpoint(tmp_path), tmp_path)


def test_mxfp4_is_decoded_as_transformers_decodes_it(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    mxfp4_checkpoint(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    spec = read_model_spec(tmp_path)
    found = open_checkpoint(tmp_path, spec, torch.float32).read("layers.0.moe.experts.down_proj")
    stored = "model.layers.0.mlp.experts.down_proj"
    expected = convert_moe_packed_tensors(tensors[f"{stored}_blocks"], tensors[f"{stored}_scales"], dtype=torch.float32)
    assert torch.equal(found, expected.mT)
