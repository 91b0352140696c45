"""`config.json` to model spec: defaults and rope against transformers, layer patterns, spellings, refusals."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from moeserve.models.hf_config import SUPPORTED_ARCHITECTURES, read_model_spec
from moeserve.models.spec import DenseMlpSpec, GqaSpec, MlaSpec, ModelSpec, MoeSpec, RopeSpec

MODEL_TYPES = {
    "MixtralForCausalLM": "mixtral",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "OlmoeForCausalLM": "olmoe",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "GptOssForCausalLM": "gpt_oss",
}
# Published configs, as far as they matter, in the spelling they were published in.
PUBLISHED: dict[str, dict[str, Any]] = {
    "mixtral-8x7b": {
        "architectures": ["MixtralForCausalLM"],
        "eos_token_id": 2,
        "hidden_act": "silu",
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "torch_dtype": "bfloat16",
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_size": 2048,
        "max_position_embeddings": 40960,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
    },
    "deepseek-v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "eos_token_id": 100001,
        "first_k_dense_replace": 1,
        "hidden_size": 2048,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": 1408,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "q_lora_rank": None,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "scoring_func": "softmax",
        "topk_group": 1,
        "topk_method": "greedy",
        "torch_dtype": "bfloat16",
    },
    "deepseek-v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "max_position_embeddings": 163840,
        "num_nextn_predict_layers": 1,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "experts_per_token": 4,
        "initial_context_length": 4096,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "num_hidden_layers": 24,
        "num_local_experts": 32,
        "quantization_config": {"modules_to_not_convert": ["model.layers.*.self_attn"], "quant_method": "mxfp4"},
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
    },
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "yarn with its own factor": YARN,
    "yarn with a given factor": YARN | {"attention_factor": 1.5, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn with two mscales": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


def write_config(folder: Path, *, name: str = "config.json", **values: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(values))
    return folder


def read(folder: Path, **values: Any) -> ModelSpec:
    return read_model_spec(
        write_config(folder, **{"architectures": ["MixtralForCausalLM"], "dtype": "float32"} | values)
    )


def gqa(spec: ModelSpec, layer: int = 0) -> GqaSpec:
    attention = spec.layers[layer].attention
    assert isinstance(attention, GqaSpec)
    return attention


def moe(spec: ModelSpec, layer: int = -1) -> MoeSpec:
    mlp = spec.layers[layer].mlp
    assert isinstance(mlp, MoeSpec)
    return mlp


def mla(spec: ModelSpec) -> MlaSpec:
    attention = spec.layers[0].attention
    assert isinstance(attention, MlaSpec)
    return attention


@pytest.mark.parametrize("architecture", SUPPORTED_ARCHITECTURES)
def test_defaults_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    required = {"num_experts_per_tok": 6} if architecture == "DeepseekV2ForCausalLM" else {}
    full = AutoConfig.for_model(MODEL_TYPES[architecture], **required).to_dict()
    from_nothing = read(tmp_path / "nothing", architectures=[architecture], **required)
    from_all = read(tmp_path / "all", **full | {"architectures": [architecture], "dtype": "float32"})
    assert from_nothing == from_all


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read(name: str, tmp_path: Path) -> None:
    spec = read_model_spec(write_config(tmp_path, **PUBLISHED[name]))
    facts: dict[str, Callable[[], tuple[object, object]]] = {
        "mixtral-8x7b": lambda: ((len(spec.layers), gqa(spec).rope.theta, spec.dtype), (32, 1e6, "bfloat16")),
        "qwen3-30b-a3b": lambda: (
            (len(spec.moe_layer_ids), gqa(spec).head_dim, moe(spec).router.renormalize, gqa(spec).qk_norm),
            (48, 128, True, "head"),
        ),
        "deepseek-v2-lite": lambda: (
            (
                spec.moe_layer_ids[0],
                mla(spec).q_lora_rank,
                moe(spec).shared_intermediate_size,
                moe(spec).router.num_groups,
            ),
            (1, None, 2816, 1),
        ),
        "deepseek-v3": lambda: (
            (
                spec.moe_layer_ids[0],
                moe(spec).router.num_groups,
                moe(spec).router.scaling_factor,
                mla(spec).q_lora_rank,
            ),
            (3, 8, 2.5, 1536),
        ),
        "gpt-oss-20b": lambda: (
            (
                [layer.sliding_window for layer in spec.layers[:3]],
                spec.num_experts,
                gqa(spec).rope.truncate,
                spec.dtype,
            ),
            ([128, None, 128], 32, False, "float32"),
        ),
    }
    found, expected = facts[name]()
    assert found == expected


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())
def test_rope_is_read_as_transformers_reads_it_in_every_spelling(rope: dict[str, Any], tmp_path: Path) -> None:
    common = {"max_position_embeddings": 512, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    new = read(tmp_path / "new", **common, rope_parameters=rope | {"rope_theta": 500.0})
    old = read(tmp_path / "old", **common, rope_theta=500.0, rope_scaling=rope)
    oldest = {key: value for key, value in rope.items() if key != "rope_type"} | {"type": rope["rope_type"]}
    assert new == old == read(tmp_path / "oldest", **common, rope_theta=500.0, rope_scaling=oldest)
    oracle = AutoConfig.for_model("mixtral", **common, rope_parameters=rope | {"rope_theta": 500.0})
    attention_factor = 1.0
    if rope["rope_type"] != "default":
        attention_factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](oracle, torch.device("cpu"))[1]
    found = gqa(new).rope
    assert (found.theta, found.rotary_dim, found.attention_factor) == (500.0, 16, pytest.approx(attention_factor))


def test_rope_by_layer_type(tmp_path: Path) -> None:
    spec = read(
        tmp_path,
        architectures=["GptOssForCausalLM"],
        num_hidden_layers=2,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": YARN | {"rope_theta": 1000.0},
        },
    )
    assert gqa(spec, 0).rope == RopeSpec(theta=100.0, rotary_dim=64)
    assert (gqa(spec, 1).rope.scaling, gqa(spec, 1).rope.theta) == ("yarn", 1000.0)


def test_yarn_without_a_factor_has_the_ratio_of_the_context_lengths(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "original_max_position_embeddings": 64, "rope_theta": 1e4}
    assert gqa(read(tmp_path, max_position_embeddings=256, rope_parameters=rope)).rope.factor == 4.0


def test_mscale_all_dim_scales_the_logits_of_latent_attention(tmp_path: Path) -> None:
    plain = read(tmp_path / "plain", architectures=["DeepseekV3ForCausalLM"])
    yarn = PUBLISHED["deepseek-v3"]["rope_scaling"]
    scaled = read(tmp_path / "yarn", architectures=["DeepseekV3ForCausalLM"], rope_scaling=yarn)
    # 0.1 ln 40 + 1, squared: once for the queries, once for the keys.
    assert mla(scaled).softmax_scale / mla(plain).softmax_scale == pytest.approx(1.3688879454**2)
    assert mla(scaled).rope.attention_factor == 1.0


@pytest.mark.parametrize(
    ("values", "sparse"),
    [
        ({}, [0, 1, 2, 3]),
        ({"decoder_sparse_step": 2}, [1, 3]),
        ({"mlp_only_layers": [0, 2]}, [1, 3]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, [1]),
    ],
)
def test_qwen_layers_without_experts(values: dict[str, Any], sparse: list[int], tmp_path: Path) -> None:
    spec = read(tmp_path, architectures=["Qwen3MoeForCausalLM"], num_hidden_layers=4, **values)
    assert list(spec.moe_layer_ids) == sparse
    assert all(
        layer.mlp == DenseMlpSpec(intermediate_size=6144) for i, layer in enumerate(spec.layers) if i not in sparse
    )


@pytest.mark.parametrize(
    ("values", "sparse"), [({}, [1, 2, 3]), ({"first_k_dense_replace": 0}, [0, 1, 2, 3]), ({"moe_layer_freq": 2}, [2])]
)
def test_deepseek_layers_without_experts(values: dict[str, Any], sparse: list[int], tmp_path: Path) -> None:
    base = {"num_hidden_layers": 4, "first_k_dense_replace": 1}
    assert list(read(tmp_path, architectures=["DeepseekV3ForCausalLM"], **base | values).moe_layer_ids) == sparse


@pytest.mark.parametrize(
    ("architecture", "values", "windows"),
    [
        ("MixtralForCausalLM", {"sliding_window": 7}, [7, 7, 7]),
        ("MixtralForCausalLM", {"sliding_window": None}, [None, None, None]),
        ("Qwen3MoeForCausalLM", {"sliding_window": 7}, [None, None, None]),
        ("Qwen3MoeForCausalLM", {"sliding_window": 7, "use_sliding_window": True}, [7, 7, 7]),
        ("Qwen2MoeForCausalLM", {"sliding_window": 7, "use_sliding_window": True}, [7, None, 7]),
        (
            "Qwen2MoeForCausalLM",
            {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1},
            [7, None, None],
        ),
        ("Qwen2MoeForCausalLM", {"sliding_window": 0}, [None, None, None]),
        ("GptOssForCausalLM", {"sliding_window": 7}, [7, None, 7]),
        (
            "GptOssForCausalLM",
            {"layer_types": ["full_attention", "full_attention", "sliding_attention"]},
            [None, None, 128],
        ),
    ],
)
def test_sliding_windows(architecture: str, values: dict[str, Any], windows: list[int | None], tmp_path: Path) -> None:
    spec = read(tmp_path, architectures=[architecture], num_hidden_layers=3, **values)
    assert [layer.sliding_window for layer in spec.layers] == windows


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
@pytest.mark.parametrize("architecture", SUPPORTED_ARCHITECTURES)
def test_the_number_of_experts_has_two_names(architecture: str, key: str, tmp_path: Path) -> None:
    assert read(tmp_path, architectures=[architecture], num_experts_per_tok=2, **{key: 16}).num_experts == 16


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        (5, None, (5,)),
        ([5, 6], None, (5, 6)),
        (5, {"eos_token_id": [7, 8]}, (7, 8)),
        (5, {"eos_token_id": 7}, (7,)),
        (5, {"eos_token_id": None}, (5,)),
        (5, {}, (5,)),
        (None, None, ()),
    ],
)
def test_eos_tokens(
    in_config: object, in_generation: dict[str, Any] | None, expected: tuple[int, ...], tmp_path: Path
) -> None:
    if in_generation is not None:
        write_config(tmp_path, name="generation_config.json", **in_generation)
    assert read(tmp_path, architectures=["Qwen3MoeForCausalLM"], eos_token_id=in_config).eos_token_ids == expected


def test_dtype_by_either_name_else_of_the_checkpoint(tmp_path: Path) -> None:
    assert read(tmp_path, dtype=None, torch_dtype="float16").dtype == "float16"
    assert read(tmp_path, dtype="bfloat16", torch_dtype="float16").dtype == "bfloat16"
    assert read(tmp_path, dtype=None).dtype == "float32"
    save_file({"x": torch.zeros(1, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    assert read(tmp_path, dtype=None).dtype == "bfloat16"


def test_a_spec_is_a_value(tmp_path: Path) -> None:
    spec = read(tmp_path)
    assert spec == dataclasses.replace(spec)
    assert hash(spec) == hash(dataclasses.replace(spec))
