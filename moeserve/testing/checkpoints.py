"""Small random checkpoints in the Hugging Face format, written by transformers, which is also their oracle."""

import json
from pathlib import Path
from typing import Any

EOS_TOKEN = "<|im_end|>"
_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", EOS_TOKEN)
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CORPUS = (
    "the quick brown fox jumps over the lazy dog and the experts of the layer are spread over the ranks",
    "a router gives each token to a few experts, and the sum of what they say goes on to the next layer",
)
_VOCAB_SIZE = 320

_COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    # Wide enough that attention and routing matter, and that the best two logits differ clearly.
    "initializer_range": 0.2,
}
_MLA: dict[str, Any] = {
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
_TINY: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
    "qwen2_moe": {
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "num_key_value_heads": 2,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    "mixtral": {
        "intermediate_size": 24,
        "num_key_value_heads": 2,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "olmoe": {
        "intermediate_size": 24,
        "num_key_value_heads": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    "deepseek_v2": _MLA | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    "deepseek_v3": _MLA | {"q_lora_rank": 16, "n_group": 4, "topk_group": 2},
    "gpt_oss": {
        "intermediate_size": 24,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "truncate": False,
        },
    },
}
TINY_ARCHITECTURES = tuple(_TINY)
"""The `model_type`s that `write_tiny_checkpoint` knows."""


def write_tiny_checkpoint(
    folder: Path, architecture: str = "qwen3_moe", *, seed: int = 0, dtype: str = "float32", **overrides: Any
) -> Path:
    """Write a random checkpoint with tokenizer and chat template; returns `folder`.

    architecture: a `model_type` of TINY_ARCHITECTURES. overrides: fields of its Hugging Face config.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokens = write_tiny_tokenizer(folder)
    fields = _COMMON | {"vocab_size": len(tokens), "bos_token_id": None, "eos_token_id": tokens[EOS_TOKEN]}
    fields |= {"pad_token_id": tokens[_SPECIAL_TOKENS[0]]} | _TINY[architecture] | overrides
    config = AutoConfig.for_model(architecture, **fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    return folder


def write_tiny_tokenizer(folder: Path) -> dict[str, int]:
    """Write a byte-level BPE tokenizer of some 300 tokens with a chat template; returns its vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB_SIZE,
        special_tokens=list(_SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS_TOKEN,
        "pad_token": _SPECIAL_TOKENS[0],
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(_CHAT_TEMPLATE)
    return dict(tokenizer.get_vocab())
