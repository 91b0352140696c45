"""Attention layers: every option against a float64 oracle, in every cutting into steps and on every number of ranks."""

import dataclasses
from typing import Any

import pytest
import torch

from moeserve.layers.attention import Attention, KVCache, build_attention
from moeserve.layers.forward_batch import ForwardBatch
from moeserve.layers.rope import RotaryEmbedding
from moeserve.models.parameters import DictReader
from moeserve.models.spec import DenseMlpSpec, GqaSpec, LayerSpec, MlaSpec, ModelSpec, RopeSpec
from moeserve.parallel import ParallelContext, ParallelLayout, init_parallel, single_rank_context
from moeserve.testing.multiprocess import run_ranks
from moeserve.testing.thread_ranks import run_thread_ranks
from moeserve.testing.tiny_models import BLOCK_SIZE, BLOCKS_PER_REQUEST, forward_batch, random_parameters

HIDDEN, HEAD_DIM, LENGTH = 16, 8, 13
PREFIX = "layers.0.attention"


def _gqa(sliding_window: int | None = None, **options: Any) -> LayerSpec:
    attention = GqaSpec(
        num_heads=options.pop("num_heads", 4),
        num_kv_heads=options.pop("num_kv_heads", 2),
        head_dim=HEAD_DIM,
        softmax_scale=0.3,
        rope=options.pop("rope", RopeSpec(theta=100.0, rotary_dim=HEAD_DIM)),
        **options,
    )
    return LayerSpec(attention=attention, mlp=DenseMlpSpec(intermediate_size=8), sliding_window=sliding_window)


def _mla(**options: Any) -> LayerSpec:
    attention = MlaSpec(
        num_heads=4,
        q_lora_rank=options.pop("q_lora_rank", 6),
        kv_lora_rank=10,
        qk_nope_head_dim=6,
        qk_rope_head_dim=4,
        v_head_dim=5,
        softmax_scale=0.3,
        rope=options.pop("rope", RopeSpec(theta=100.0, rotary_dim=4, interleaved=True)),
        **options,
    )
    return LayerSpec(attention=attention, mlp=DenseMlpSpec(intermediate_size=8))


LAYERS = {
    "plain": _gqa(),
    "multi_head": _gqa(num_kv_heads=4),
    "multi_query": _gqa(num_kv_heads=1),
    "head_norm": _gqa(qk_norm="head"),
    "full_norm": _gqa(qk_norm="full"),
    "full_norm_one_kv_head": _gqa(qk_norm="full", num_kv_heads=1),
    "full_norm_and_clip": _gqa(qk_norm="full", qkv_clip=0.5),
    "biases": _gqa(qkv_bias=True, o_bias=True),
    "sinks_and_window": _gqa(sliding_window=5, sinks=True),
    "partial_rope": _gqa(rope=RopeSpec(theta=100.0, rotary_dim=4)),
    "scaled_rope": _gqa(rope=RopeSpec(theta=100.0, rotary_dim=HEAD_DIM, attention_factor=1.3)),
    "mla": _mla(),
    "mla_full_rank_query": _mla(q_lora_rank=None),
    "mla_biases": _mla(bias=True),
    "mla_half_split_rope": _mla(rope=RopeSpec(theta=100.0, rotary_dim=4)),
}


def _model(layer: LayerSpec) -> ModelSpec:
    return ModelSpec(
        architecture="test",
        vocab_size=8,
        hidden_size=HIDDEN,
        rms_norm_eps=1e-3,
        layers=(layer,),
        tie_word_embeddings=True,
        max_position_embeddings=64,
        dtype="float32",
    )


def _hidden(seed: int = 0, length: int = LENGTH) -> torch.Tensor:
    return torch.randn(length, HIDDEN, generator=torch.Generator().manual_seed(100 + seed))


def _reference(spec: ModelSpec, hidden_TD: torch.Tensor) -> torch.Tensor:
    """The attention of one whole sequence, float64, nothing absorbed, nothing cached."""
    layer = spec.layers[0]
    tensors = {name.removeprefix(f"{PREFIX}."): x.double() for name, x in random_parameters(spec).items()}
    heads = _gqa_heads if isinstance(layer.attention, GqaSpec) else _mla_heads
    q_THD, k_THD, v_THD = heads(spec, tensors, hidden_TD.double())
    scores_HTT = torch.einsum("thd,shd->hts", q_THD, k_THD) * layer.attention.softmax_scale
    distance = torch.arange(len(hidden_TD)).unsqueeze(1) - torch.arange(len(hidden_TD))
    visible = (distance >= 0) & (distance < (layer.sliding_window or len(hidden_TD)))
    powers_HTT = scores_HTT.exp() * visible
    totals_HT1 = powers_HTT.sum(dim=-1, keepdim=True)
    if "sinks" in tensors:
        totals_HT1 = totals_HT1 + tensors["sinks"].exp()[:, None, None]
    out_THD = torch.einsum("hts,shd->thd", powers_HTT / totals_HT1, v_THD)
    return _project(tensors, "o_proj", out_THD.flatten(1))


def _gqa_heads(spec: ModelSpec, tensors: dict[str, torch.Tensor], hidden: torch.Tensor) -> list[torch.Tensor]:
    attention = spec.layers[0].attention
    assert isinstance(attention, GqaSpec)
    parts = {}
    for name in "qkv":
        x = _project(tensors, f"{name}_proj", hidden)
        if attention.qk_norm == "full" and name != "v":
            x = _norm(x, tensors[f"{name}_norm.weight"], spec.rms_norm_eps)
        if attention.qkv_clip is not None:
            x = x.clamp(-attention.qkv_clip, attention.qkv_clip)
        x = x.view(len(hidden), -1, HEAD_DIM)
        if attention.qk_norm == "head" and name != "v":
            x = _norm(x, tensors[f"{name}_norm.weight"], spec.rms_norm_eps)
        parts[name] = x if name == "v" else _rope(x, attention.rope)
    group_size = attention.num_heads // attention.num_kv_heads
    return [parts["q"], *(parts[name].repeat_interleave(group_size, dim=1) for name in "kv")]


def _mla_heads(spec: ModelSpec, tensors: dict[str, torch.Tensor], hidden: torch.Tensor) -> list[torch.Tensor]:
    attention = spec.layers[0].attention
    assert isinstance(attention, MlaSpec)
    nope, num_heads = attention.qk_nope_head_dim, attention.num_heads
    if attention.q_lora_rank is None:
        q = _project(tensors, "q_proj", hidden)
    else:
        latent = _norm(_project(tensors, "q_a_proj", hidden), tensors["q_a_norm.weight"], 1e-6)
        q = _project(tensors, "q_b_proj", latent)
    q = q.view(len(hidden), num_heads, -1)
    kv_a = _project(tensors, "kv_a_proj", hidden)
    latent = _norm(kv_a[:, : attention.kv_lora_rank], tensors["kv_a_norm.weight"], 1e-6)
    kv = _project(tensors, "kv_b_proj", latent).view(len(hidden), num_heads, -1)
    rope_key = _rope(kv_a[:, None, attention.kv_lora_rank :], attention.rope).expand(-1, num_heads, -1)
    return [
        torch.cat([q[..., :nope], _rope(q[..., nope:], attention.rope)], dim=-1),
        torch.cat([kv[..., :nope], rope_key], dim=-1),
        kv[..., nope:],
    ]


def _project(tensors: dict[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
    out = x @ tensors[f"{name}.weight"].T
    return out + tensors[f"{name}.bias"] if f"{name}.bias" in tensors else out


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt() * weight


def _rope(x_THD: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
    """By complex numbers."""
    num_pairs = rope.rotary_dim // 2
    pairs = torch.arange(num_pairs)
    first, second = (2 * pairs, 2 * pairs + 1) if rope.interleaved else (pairs, pairs + num_pairs)
    angles = torch.arange(len(x_THD)).double().unsqueeze(1) * rope.theta ** (-pairs.double() / num_pairs)
    factor = torch.polar(torch.full_like(angles, rope.attention_factor), angles).unsqueeze(1)
    turned = torch.complex(x_THD[..., first], x_THD[..., second]) * factor
    out = x_THD.clone()
    out[..., first], out[..., second] = turned.real, turned.imag
    return out


def _forward(
    spec: ModelSpec, attention: Attention, hidden_TD: torch.Tensor, batch: ForwardBatch, cache: KVCache
) -> torch.Tensor:
    angles = RotaryEmbedding.build(spec.layers[0].attention.rope, torch.device("cpu")).angles(batch.positions_T)
    return attention.forward(hidden_TD, batch, cache.layer(0), angles)


def _run_steps(spec: ModelSpec, chunks: list[int], parallel: ParallelContext, seed: int = 0) -> torch.Tensor:
    """The layer over one sequence, `chunks` tokens a step."""
    attention = build_attention(spec, 0, DictReader(random_parameters(spec)), parallel)
    cache = KVCache.allocate(
        spec, num_blocks=BLOCKS_PER_REQUEST, block_size=BLOCK_SIZE, dtype=torch.float32, parallel=parallel
    )
    hidden, outputs, start = _hidden(seed, sum(chunks)), [], 0
    for size in chunks:
        batch = forward_batch([[0] * size], num_computed=[start])
        outputs.append(_forward(spec, attention, hidden[start : start + size], batch, cache))
        start += size
    return torch.cat(outputs)


def _assert_right(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("chunks", [[LENGTH], [1] * LENGTH, [6, 1, 1, 5]], ids=["prefill", "decode", "chunks"])
def test_one_rank(name: str, chunks: list[int]) -> None:
    spec = _model(LAYERS[name])
    _assert_right(_run_steps(spec, chunks, single_rank_context()), _reference(spec, _hidden()))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("tp_size", [2, 4])
def test_ranks_share_the_heads(name: str, tp_size: int) -> None:
    """4 ranks have fewer key-value heads than ranks in most cases: those are replicated."""
    spec = _model(LAYERS[name])
    expected = _reference(spec, _hidden())
    for actual in run_thread_ranks(lambda parallel: _run_steps(spec, [9, 1, 3], parallel), tp_size=tp_size):
        _assert_right(actual, expected)


@pytest.mark.parametrize("name", ["sinks_and_window", "mla"])
def test_requests_of_a_batch_are_strangers(name: str) -> None:
    spec, parallel = _model(LAYERS[name]), single_rank_context()
    attention = build_attention(spec, 0, DictReader(random_parameters(spec)), parallel)
    cache = KVCache.allocate(
        spec, num_blocks=3 * BLOCKS_PER_REQUEST, block_size=BLOCK_SIZE, dtype=torch.float32, parallel=parallel
    )
    sequences = [_hidden(0), _hidden(1, 6), _hidden(2, 1)]
    expected = [_reference(spec, sequence) for sequence in sequences]
    steps = [[12, 2, 1], [1, 3, 0], [0, 1, 0]]
    done = [0, 0, 0]
    for sizes in steps:
        parts = [x[start : start + size] for x, start, size in zip(sequences, done, sizes, strict=True)]
        batch = forward_batch([[0] * size for size in sizes], num_computed=done)
        actual = _forward(spec, attention, torch.cat(parts), batch, cache)
        wanted = [x[start : start + size] for x, start, size in zip(expected, done, sizes, strict=True)]
        _assert_right(actual, torch.cat(wanted))
        done = [start + size for start, size in zip(done, sizes, strict=True)]


@pytest.mark.parametrize("name", LAYERS)
def test_no_tokens(name: str) -> None:
    """The empty step of a replica that has no work."""
    spec = _model(LAYERS[name])
    for actual in run_thread_ranks(lambda parallel: _run_steps(spec, [0], parallel), tp_size=2):
        assert actual.shape == (0, HIDDEN)


@pytest.mark.parametrize("name", ["head_norm", "sinks_and_window", "mla"])
def test_bfloat16(name: str) -> None:
    spec, parallel = _model(LAYERS[name]), single_rank_context()
    attention = build_attention(spec, 0, DictReader(random_parameters(spec), torch.bfloat16), parallel)
    cache = KVCache.allocate(
        spec, num_blocks=BLOCKS_PER_REQUEST, block_size=BLOCK_SIZE, dtype=torch.bfloat16, parallel=parallel
    )
    actual = _forward(spec, attention, _hidden().bfloat16(), forward_batch([[0] * LENGTH]), cache)
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual.double(), _reference(spec, _hidden()), rtol=0.1, atol=0.1)


def test_unwritten_tokens_leave_the_cache_alone() -> None:
    spec, parallel = _model(LAYERS["plain"]), single_rank_context()
    attention = build_attention(spec, 0, DictReader(random_parameters(spec)), parallel)
    cache = KVCache.allocate(
        spec, num_blocks=BLOCKS_PER_REQUEST, block_size=BLOCK_SIZE, dtype=torch.float32, parallel=parallel
    )
    batch = forward_batch([[0] * 3])
    unwritten = dataclasses.replace(batch, slot_mapping_T=torch.full_like(batch.slot_mapping_T, -1))
    _forward(spec, attention, _hidden(length=3), unwritten, cache)
    assert all(not tensor.any() for tensor in (cache.layers[0].key_NSGD, cache.layers[0].value_NSGD))


def _gloo_rank(rank: int, names: list[str]) -> list[torch.Tensor]:
    parallel = init_parallel(ParallelLayout(tp_size=2, dp_size=1, rank=rank), torch.device("cpu"))
    return [_run_steps(_model(LAYERS[name]), [9, 1, 3], parallel) for name in names]


@pytest.mark.distributed
def test_two_processes() -> None:
    names = ["full_norm_one_kv_head", "biases", "mla"]
    for outputs in run_ranks(_gloo_rank, 2, names):
        for name, actual in zip(names, outputs, strict=True):
            _assert_right(actual, _reference(_model(LAYERS[name]), _hidden()))
