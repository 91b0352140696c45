"""Every architecture against transformers, on random checkpoints that transformers wrote.

In float32 the logits agree within 1e-4 at every position, however the tokens are cut into steps, and 64 greedy tokens
are the same. In bfloat16 and float16 we are as close to float32 as transformers is.
"""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from moeserve.models.checkpoint import open_checkpoint, validate_checkpoint
from moeserve.models.decoder import Decoder
from moeserve.models.hf_config import read_model_spec
from moeserve.parallel import single_rank_context
from moeserve.testing.random_checkpoints import random_hf_model
from moeserve.testing.stepping import greedy_with_logits, logits_in_chunks
from moeserve_placement import ExpertPlacement

PROMPT = [11, 3, 90, 42, 7]
NUM_GREEDY = 64
BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MIXTRAL = {"intermediate_size": 24, "num_local_experts": 5}
QWEN2 = {
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 28,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}
QWEN3 = {
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "head_dim": 16,
}
OLMOE = {"intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 4}
MLA = {
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 6,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
}
V2 = MLA | {"n_shared_experts": 2, "q_lora_rank": 12}
V3 = MLA | {"n_shared_experts": 1, "q_lora_rank": 12, "n_group": 4, "topk_group": 2}
GPT_OSS = {
    "num_hidden_layers": 4,
    "intermediate_size": 24,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "head_dim": 8,
    "sliding_window": 9,
    "rope_parameters": YARN | {"truncate": False},
}
MSCALES = {"mscale": 0.8, "mscale_all_dim": 0.6}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", MIXTRAL),
    "mixtral: sliding window": ("mixtral", MIXTRAL | {"sliding_window": 9, "num_experts_per_tok": 1}),
    "mixtral: llama3 rope, tied embeddings": (
        "mixtral",
        MIXTRAL | {"rope_parameters": LLAMA3, "tie_word_embeddings": True},
    ),
    "qwen2_moe": ("qwen2_moe", QWEN2),
    "qwen2_moe: normalised, dense layer, some windows": (
        "qwen2_moe",
        QWEN2 | {"norm_topk_prob": True, "mlp_only_layers": [1], "use_sliding_window": True, "sliding_window": 9},
    ),
    "qwen2_moe: no bias, every other layer": ("qwen2_moe", QWEN2 | {"qkv_bias": False, "decoder_sparse_step": 2}),
    "qwen3_moe: normalised, dense layer": ("qwen3_moe", QWEN3 | {"norm_topk_prob": True, "mlp_only_layers": [0]}),
    "qwen3_moe: not normalised, biases, window": (
        "qwen3_moe",
        QWEN3 | {"norm_topk_prob": False, "attention_bias": True, "use_sliding_window": True, "sliding_window": 9},
    ),
    "olmoe": ("olmoe", OLMOE),
    "olmoe: clipped, grouped heads, biases, linear rope": (
        "olmoe",
        OLMOE
        | {"clip_qkv": 0.7, "num_key_value_heads": 2, "attention_bias": True, "norm_topk_prob": True}
        | {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}},
    ),
    "deepseek_v2: greedy, no q_lora": ("deepseek_v2", V2 | {"q_lora_rank": None, "topk_method": "greedy"}),
    "deepseek_v2: group limited, scaled, yarn": (
        "deepseek_v2",
        V2
        | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7}
        | {"rope_parameters": YARN | MSCALES, "attention_bias": True, "rms_norm_eps": 1e-3},
    ),
    "deepseek_v3": ("deepseek_v3", V3),
    "deepseek_v3: yarn, not normalised, biases": (
        "deepseek_v3",
        V3 | {"rope_parameters": YARN | MSCALES, "norm_topk_prob": False, "attention_bias": True, "rms_norm_eps": 1e-3},
    ),
    "deepseek_v3: one group, no q_lora, halved rope": (
        "deepseek_v3",
        V3 | {"n_group": 1, "topk_group": 1, "q_lora_rank": None, "rope_interleave": False},
    ),
    "gpt_oss": ("gpt_oss", GPT_OSS),
    "gpt_oss: full attention first, no biases, tight clamp": (
        "gpt_oss",
        GPT_OSS
        | {"layer_types": ["full_attention", "sliding_attention"] * 2, "attention_bias": False, "swiglu_limit": 0.5},
    ),
}


# One of each architecture, with most of its features.
LOW_PRECISION = [
    "mixtral: sliding window",
    "qwen2_moe",
    "qwen3_moe: normalised, dense layer",
    "olmoe: clipped, grouped heads, biases, linear rope",
    "deepseek_v2: group limited, scaled, yarn",
    "deepseek_v3",
    "gpt_oss",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A checkpoint on disk, its model in transformers, and a text with the logits of transformers."""

    folder: Path
    oracle: Any
    decoder: Decoder
    token_ids: list[int]
    decode_logits_TV: torch.Tensor
    """Ours, computed while decoding the text greedily; one less than there are tokens."""
    oracle_logits_TV: torch.Tensor


@pytest.fixture(scope="module")
def make_case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    @functools.cache
    def make(variant: str) -> Case:
        model_type, overrides = VARIANTS[variant]
        oracle = random_hf_model(AutoConfig.for_model(model_type, **BASE | overrides))
        folder = tmp_path_factory.mktemp(model_type)
        oracle.save_pretrained(folder, max_shard_size="40KB")
        decoder = load(folder)
        token_ids, logits_TV = greedy_with_logits(decoder, PROMPT, NUM_GREEDY)
        return Case(
            folder=folder,
            oracle=oracle,
            decoder=decoder,
            token_ids=token_ids,
            decode_logits_TV=logits_TV,
            oracle_logits_TV=oracle_logits(oracle, token_ids),
        )

    return make


@pytest.fixture(params=VARIANTS)
def case(request: pytest.FixtureRequest, make_case: Callable[[str], Case]) -> Case:
    return make_case(request.param)


@torch.inference_mode()
def oracle_logits(oracle: Any, token_ids: list[int]) -> torch.Tensor:
    logits: torch.Tensor = oracle(torch.tensor([token_ids]), use_cache=False).logits[0].float()
    return logits


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    spec = read_model_spec(folder)
    validate_checkpoint(folder, spec)
    placement = ExpertPlacement.identity(
        num_layers=len(spec.moe_layer_ids), num_logical_experts=spec.num_experts, num_ranks=1
    )
    return Decoder.build(spec, open_checkpoint(folder, spec, dtype), single_rank_context(), placement, dtype=dtype)


def typical_error(found_TV: torch.Tensor, expected_TV: torch.Tensor) -> float:
    """Relative to the logits at the position, in the median: near ties in routing make a few positions jump."""
    error_T = (found_TV - expected_TV).norm(dim=-1) / expected_TV.norm(dim=-1)
    return float(error_T.median())


def test_the_checkpoint_is_sharded(case: Case) -> None:
    assert len(list(case.folder.glob("model-*.safetensors"))) > 2


def test_the_oracle_would_decode_the_same_text(case: Case) -> None:
    """Its best token behind every prefix of our text is our next token, so its greedy text is ours."""
    best = case.oracle_logits_TV.argmax(dim=-1).tolist()
    assert best[len(PROMPT) - 1 : -1] == case.token_ids[len(PROMPT) :]
    assert len(case.token_ids) == len(PROMPT) + NUM_GREEDY


def test_decode_gives_the_logits_of_transformers(case: Case) -> None:
    torch.testing.assert_close(case.decode_logits_TV, case.oracle_logits_TV[:-1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("chunk_size", [1000, 7, 17], ids=["whole", "within blocks", "across blocks"])
def test_prefill_gives_the_logits_of_transformers(case: Case, chunk_size: int) -> None:
    logits_TV = logits_in_chunks(case.decoder, case.token_ids, chunk_size)
    torch.testing.assert_close(logits_TV, case.oracle_logits_TV, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("variant", LOW_PRECISION)
def test_low_precision_is_as_close_as_in_transformers(
    variant: str, dtype: torch.dtype, make_case: Callable[[str], Case]
) -> None:
    case = make_case(variant)
    ours = typical_error(logits_in_chunks(load(case.folder, dtype), case.token_ids, 17), case.oracle_logits_TV)
    theirs = typical_error(oracle_logits(copy.deepcopy(case.oracle).to(dtype), case.token_ids), case.oracle_logits_TV)
    assert ours < 1.5 * theirs
