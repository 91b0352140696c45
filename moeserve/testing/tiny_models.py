"""Tiny randomly initialised models that every test can afford, and steps for them without a scheduler."""

import dataclasses
import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

import torch

from moeserve.layers.attention.kv_cache import KVCache
from moeserve.layers.forward_batch import ForwardBatch
from moeserve.models.decoder import Decoder
from moeserve.models.spec import (
    ActivationSpec,
    DenseMlpSpec,
    GqaSpec,
    LayerSpec,
    MlaSpec,
    ModelSpec,
    MoeSpec,
    RopeSpec,
    RouterSpec,
    canonical_shapes,
)

Style = Literal["qwen3", "qwen2", "deepseek", "gpt_oss"]
BLOCK_SIZE = 4
BLOCKS_PER_REQUEST = 16
"""Each request owns a range of the cache for itself: up to 64 tokens."""

_HEAD_DIM = 8


def tiny_spec(
    style: Style = "qwen3",
    *,
    num_layers: int = 2,
    num_experts: int = 8,
    top_k: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    hidden_size: int = 32,
    vocab_size: int = 96,
) -> ModelSpec:
    """A model in the style of a family.

    qwen3: GQA with per-head norms. qwen2: biases and a gated shared expert. deepseek: MLA, a leading dense layer,
    group-limited sigmoid routing with correction bias, shared experts; num_experts must be a multiple of 4.
    gpt_oss: sinks, alternating sliding window, biases, clamped SwiGLU.
    """
    layer = LayerSpec(attention=_attention(style, num_heads, num_kv_heads), mlp=_moe(style, num_experts, top_k))
    layers = [layer] * num_layers
    if style == "deepseek":
        layers[0] = dataclasses.replace(layer, mlp=DenseMlpSpec(intermediate_size=24))
    elif style == "gpt_oss":
        layers[::2] = [dataclasses.replace(layer, sliding_window=5)] * len(layers[::2])
    return ModelSpec(
        architecture=f"tiny-{style}",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        rms_norm_eps=1e-6,
        layers=tuple(layers),
        tie_word_embeddings=style == "qwen3",
        max_position_embeddings=256,
        dtype="float32",
    )


def random_parameters(spec: ModelSpec, seed: int = 0) -> dict[str, torch.Tensor]:
    """All canonical tensors in float32, whole; a function of (spec, seed), so every rank can make the same ones."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: _random_parameter(name, torch.randn(shape, generator=generator))
        for name, shape in canonical_shapes(spec).items()
    }


def forward_batch(
    new_tokens: Sequence[Sequence[int]],
    *,
    num_computed: Sequence[int] | None = None,
    num_tokens_by_dp_rank: tuple[int, ...] | None = None,
) -> ForwardBatch:
    """One step on the CPU that computes `new_tokens[i]` of request i behind its first `num_computed[i]` tokens.

    Requests without new tokens in this step are left out of the batch and keep their blocks. By default nothing is
    computed yet and the engine is this one DP replica.
    """
    computed = list(num_computed) if num_computed is not None else [0] * len(new_tokens)
    rows = [i for i, tokens in enumerate(new_tokens) if tokens]
    query_lens = tuple(len(new_tokens[i]) for i in rows)
    seq_lens = tuple(computed[i] + len(new_tokens[i]) for i in rows)
    assert max(seq_lens, default=0) <= BLOCK_SIZE * BLOCKS_PER_REQUEST
    positions = [list(range(seq_len - n, seq_len)) for n, seq_len in zip(query_lens, seq_lens, strict=True)]
    tables = [_block_ids(i) for i in rows]
    slots = [
        table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        for table, row_positions in zip(tables, positions, strict=True)
        for position in row_positions
    ]
    return ForwardBatch(
        token_ids_T=_int64([token for i in rows for token in new_tokens[i]]),
        positions_T=_int64([position for row_positions in positions for position in row_positions]),
        slot_mapping_T=_int64(slots),
        query_start_loc=_int64(list(accumulate(query_lens, initial=0))),
        seq_lens_R=_int64(list(seq_lens)),
        block_tables_RB=torch.tensor(tables, dtype=torch.int64).view(len(rows), BLOCKS_PER_REQUEST),
        query_lens=query_lens,
        max_seq_len=max(seq_lens, default=0),
        num_tokens_by_dp_rank=num_tokens_by_dp_rank or (sum(query_lens),),
    )


def tiny_kv_cache(decoder: Decoder, *, num_requests: int, dtype: torch.dtype | None = None) -> KVCache:
    """A cache for the batches above; by default in the decoder's dtype."""
    return KVCache.allocate(
        decoder.spec,
        num_blocks=max(1, num_requests) * BLOCKS_PER_REQUEST,
        block_size=BLOCK_SIZE,
        dtype=dtype or decoder.dtype,
        parallel=decoder.parallel,
    )


@torch.inference_mode()
def greedy_tokens(
    decoder: Decoder, prompts_by_dp_rank: Sequence[Sequence[Sequence[int]]], *, num_tokens: int
) -> list[list[int]]:
    """Greedy continuations of this replica's prompts, stepping together with the engine's other replicas.

    All ranks are given the prompts of all replicas, and so know every step's token counts without talking; a replica
    may have no prompt at all.
    """
    layout = decoder.parallel.layout
    prompts = prompts_by_dp_rank[layout.dp_rank]
    kv_cache = tiny_kv_cache(decoder, num_requests=len(prompts))
    new_tokens = [list(prompt) for prompt in prompts]
    num_computed = [0] * len(prompts)
    outputs: list[list[int]] = [[] for _ in prompts]
    for step in range(num_tokens):
        counts = tuple(
            sum(len(prompt) for prompt in theirs) if step == 0 else len(theirs) for theirs in prompts_by_dp_rank
        )
        batch = forward_batch(new_tokens, num_computed=num_computed, num_tokens_by_dp_rank=counts)
        hidden_TD = decoder.forward(batch, kv_cache)
        logits_RV = decoder.compute_logits(hidden_TD[batch.query_start_loc[1:] - 1])
        num_computed = [n + len(tokens) for n, tokens in zip(num_computed, new_tokens, strict=True)]
        new_tokens = [[token] for token in logits_RV.argmax(dim=-1).tolist()]
        for output, tokens in zip(outputs, new_tokens, strict=True):
            output.extend(tokens)
    return outputs


def _random_parameter(name: str, noise: torch.Tensor) -> torch.Tensor:
    """Scaled so that activations keep their size and no two logits are close by chance."""
    if name.endswith("norm.weight"):
        return 1.0 + 0.1 * noise
    if name.endswith(("bias", "sinks")):
        return 0.2 * noise
    if name == "embed_tokens.weight":
        return noise
    return noise * (2.0 / math.sqrt(noise.shape[-1]))


def _attention(style: Style, num_heads: int, num_kv_heads: int) -> GqaSpec | MlaSpec:
    if style == "deepseek":
        return MlaSpec(
            num_heads=num_heads,
            q_lora_rank=12,
            kv_lora_rank=16,
            qk_nope_head_dim=_HEAD_DIM,
            qk_rope_head_dim=4,
            v_head_dim=6,
            softmax_scale=(_HEAD_DIM + 4) ** -0.5,
            rope=RopeSpec(theta=1e4, rotary_dim=4, interleaved=True),
        )
    return GqaSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_HEAD_DIM,
        softmax_scale=_HEAD_DIM**-0.5,
        rope=RopeSpec(theta=1e4, rotary_dim=_HEAD_DIM),
        qkv_bias=style in ("qwen2", "gpt_oss"),
        o_bias=style == "gpt_oss",
        qk_norm="head" if style == "qwen3" else "none",
        sinks=style == "gpt_oss",
    )


def _moe(style: Style, num_experts: int, top_k: int) -> MoeSpec:
    width = 16
    if style == "deepseek":
        router = RouterSpec(
            num_experts=num_experts,
            top_k=top_k,
            scoring="sigmoid",
            renormalize=True,
            scaling_factor=1.5,
            num_groups=4,
            num_selected_groups=2,
            group_score="top2_sum" if num_experts >= 8 else "max",
            correction_bias=True,
        )
        return MoeSpec(router=router, expert_intermediate_size=width, shared_intermediate_size=8)
    if style == "gpt_oss":
        return MoeSpec(
            router=RouterSpec(
                num_experts=num_experts, top_k=top_k, scoring="topk_softmax", renormalize=False, gate_bias=True
            ),
            expert_intermediate_size=width,
            activation=ActivationSpec(kind="swiglu_clamped"),
            expert_bias=True,
        )
    router = RouterSpec(num_experts=num_experts, top_k=top_k, scoring="softmax", renormalize=style == "qwen3")
    if style == "qwen2":
        return MoeSpec(router=router, expert_intermediate_size=width, shared_intermediate_size=8, shared_gate=True)
    return MoeSpec(router=router, expert_intermediate_size=width)


def _block_ids(request: int) -> list[int]:
    """Blocks of a request in descending order: a layer that ignores the block table reads the wrong ones."""
    start = request * BLOCKS_PER_REQUEST
    return list(range(start, start + BLOCKS_PER_REQUEST))[::-1]


def _int64(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)
