"""What cannot be served is refused in one line that names file, key, value and what is accepted."""

import json
from pathlib import Path
from typing import Any

import pytest

from moeserve.config import ConfigError
from moeserve.models.hf_config import read_model_spec


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "one of MixtralForCausalLM, Qwen2MoeForCausalLM"),
        ({"architectures": None}, "architectures must be one of"),
        ({"architectures": "MixtralForCausalLM"}, "architectures must be a list of strings"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ({"hidden_size": "64"}, "hidden_size must be a whole number of at least 1, got '64'"),
        ({"hidden_size": 0}, "hidden_size must be a whole number of at least 1, got 0"),
        ({"num_local_experts": True}, "num_local_experts must be a whole number"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false, got 1"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok must be at most the number of experts, 8, got 9"),
        ({"num_key_value_heads": 5}, "num_key_value_heads must be a divisor of the 32 attention heads, got 5"),
        ({"sliding_window": 0}, "sliding_window must be a whole number of at least 1, got 0"),
        ({"dtype": "float64"}, "dtype must be 'float32' or 'bfloat16' or 'float16', got 'float64'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type must be 'default', 'linear'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor must be a number, got None"),
        ({"rope_scaling": [1]}, "rope_scaling must be a JSON object"),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "rope_parameters.partial_rotary_factor must be 1, got 0.5",
        ),
        ({"rope_parameters": {"sliding_attention": {}}}, "rope_parameters.full_attention must be the rope parameters"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quant_method must be 'fp8' or 'mxfp4', got 'gptq'"),
        (
            {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}},
            "quantization_config.activation_scheme must be 'dynamic', got 'static'",
        ),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 1]}}, "must be two positive numbers"),
        (
            {"architectures": ["DeepseekV2ForCausalLM"]},
            "num_experts_per_tok must be a whole number of at least 1, got None",
        ),
        (
            {"architectures": ["DeepseekV2ForCausalLM"], "num_experts_per_tok": 2, "topk_method": "noaux_tc"},
            "topk_method must be 'greedy' or 'group_limited_greedy'",
        ),
        ({"architectures": ["DeepseekV3ForCausalLM"], "scoring_func": "softmax"}, "scoring_func must be 'sigmoid'"),
        (
            {"architectures": ["DeepseekV3ForCausalLM"], "n_group": 7},
            "n_group must be a divisor of the number of experts",
        ),
        ({"architectures": ["DeepseekV3ForCausalLM"], "topk_group": 9}, "topk_group must be at most n_group, 8, got 9"),
        (
            {"architectures": ["DeepseekV3ForCausalLM"], "topk_group": 1, "num_experts_per_tok": 40},
            "at most the number of experts in the selected groups",
        ),
        ({"architectures": ["DeepseekV2ForCausalLM"], "mlp_bias": True}, "mlp_bias must be false"),
        ({"architectures": ["GptOssForCausalLM"], "layer_types": ["full_attention"]}, "one for each of the 36 layers"),
        (
            {"architectures": ["GptOssForCausalLM"], "num_hidden_layers": 1, "layer_types": ["chunked_attention"]},
            "layer_types must be a list of sliding_attention and full_attention",
        ),
        ({"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": ["0"]}, "must be a list of whole numbers"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(values: dict[str, Any], expected: str, tmp_path: Path) -> None:
    config = {"architectures": ["MixtralForCausalLM"], "dtype": "float32"} | values
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError) as caught:
        read_model_spec(tmp_path)
    message = str(caught.value)
    assert expected in message
    assert message.startswith(str(tmp_path / "config.json"))
    assert "\n" not in message


@pytest.mark.parametrize(
    ("content", "expected"),
    [(None, "No such file"), ("{", "not a JSON file"), ("[]", "must hold a JSON object"), ("\xff", "not a JSON file")],
)
def test_a_config_that_is_none(content: str | None, expected: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(ConfigError, match=expected):
        read_model_spec(tmp_path)
