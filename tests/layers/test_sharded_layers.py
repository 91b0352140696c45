"""Linear, embedding, output head and MLP: any number of ranks gives what one gives, also where sizes do not divide."""

import dataclasses

import pytest
import torch
from torch.nn import functional

from moeserve.layers.embedding import LmHead, VocabEmbedding
from moeserve.layers.linear import column_linear, merged_column_linear, row_linear
from moeserve.layers.mlp import DenseMlp
from moeserve.layers.norm import RmsNorm
from moeserve.models.parameters import DictReader
from moeserve.models.spec import DenseMlpSpec, GqaSpec, LayerSpec, ModelSpec, RopeSpec
from moeserve.parallel import ParallelContext, shard_range
from moeserve.testing.thread_ranks import run_thread_ranks
from moeserve.testing.tiny_models import forward_batch, random_parameters

CPU = torch.device("cpu")
RANKS = [1, 2, 3, 4]
ATTENTION = GqaSpec(num_heads=1, num_kv_heads=1, head_dim=2, softmax_scale=1.0, rope=RopeSpec(theta=1.0, rotary_dim=2))
SPEC = ModelSpec(
    architecture="test",
    vocab_size=11,
    hidden_size=6,
    rms_norm_eps=1e-6,
    layers=(LayerSpec(attention=ATTENTION, mlp=DenseMlpSpec(intermediate_size=3)),),
    tie_word_embeddings=False,
    max_position_embeddings=8,
    dtype="float32",
)
TIED = dataclasses.replace(SPEC, tie_word_embeddings=True)
TENSORS = random_parameters(SPEC)


def _randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("tp_size", RANKS)
def test_embedding(tp_size: int) -> None:
    token_ids = torch.tensor([0, 10, 5, 5, 3, 7])
    expected = TENSORS["embed_tokens.weight"][token_ids]
    for actual in run_thread_ranks(
        lambda parallel: VocabEmbedding.build(SPEC, DictReader(TENSORS), parallel).forward(token_ids), tp_size=tp_size
    ):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("tp_size", RANKS)
@pytest.mark.parametrize("spec", [SPEC, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("num_rows", [0, 1, 3])
def test_lm_head(tp_size: int, spec: ModelSpec, num_rows: int) -> None:
    hidden = _randn(num_rows, 6)
    weight = TENSORS["embed_tokens.weight" if spec.tie_word_embeddings else "lm_head.weight"]

    def run(parallel: ParallelContext) -> torch.Tensor:
        reader = DictReader(TENSORS)
        embedding = VocabEmbedding.build(spec, reader, parallel)
        return LmHead.build(spec, reader, parallel, embedding).forward(hidden)

    for actual in run_thread_ranks(run, tp_size=tp_size):
        torch.testing.assert_close(actual, hidden @ weight.T)


def test_logits_of_halves_are_float32() -> None:
    def run(parallel: ParallelContext) -> torch.Tensor:
        reader = DictReader(TENSORS, torch.bfloat16)
        embedding = VocabEmbedding.build(SPEC, reader, parallel)
        return LmHead.build(SPEC, reader, parallel, embedding).forward(_randn(2, 6).bfloat16())

    assert [logits.dtype for logits in run_thread_ranks(run, tp_size=2)] == [torch.float32] * 2


@pytest.mark.parametrize("tp_size", RANKS)
@pytest.mark.parametrize("num_tokens", [0, 5])
def test_mlp(tp_size: int, num_tokens: int) -> None:
    """A width of 3 leaves the last of four ranks without any."""
    hidden = _randn(num_tokens, 6)
    gate, up, down = (TENSORS[f"layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    expected = (functional.silu(hidden @ gate.T) * (hidden @ up.T)) @ down.T

    def run(parallel: ParallelContext) -> tuple[torch.Tensor, torch.Tensor]:
        mlp = DenseMlp.build(DictReader(TENSORS), "layers.0.mlp", intermediate_size=3, parallel=parallel)
        return mlp.forward(hidden, forward_batch([[0] * num_tokens])), mlp.forward_partial(hidden)

    results = run_thread_ranks(run, tp_size=tp_size)
    for whole, _ in results:
        torch.testing.assert_close(whole, expected)
    torch.testing.assert_close(torch.stack([partial for _, partial in results]).sum(dim=0), expected)


@pytest.mark.parametrize("num_shards", RANKS)
def test_shards_of_a_linear_layer(num_shards: int) -> None:
    """Columns lie side by side, rows add up, and the bias is in the sum once."""
    tensors = {"proj.weight": _randn(7, 5), "proj.bias": _randn(7)}
    reader, x = DictReader(tensors), _randn(3, 5)
    expected = functional.linear(x, tensors["proj.weight"], tensors["proj.bias"])
    outputs = [shard_range(7, num_shards, rank) for rank in range(num_shards)]
    columns = [column_linear(reader, "proj", rows, CPU, bias=True).forward(x) for rows in outputs]
    torch.testing.assert_close(torch.cat(columns, dim=1), expected)
    shares = [shard_range(5, num_shards, rank) for rank in range(num_shards)]
    addends = [
        row_linear(reader, "proj", share, CPU, adds_bias=rank == 0).forward(x[:, share])
        for rank, share in enumerate(shares)
    ]
    torch.testing.assert_close(torch.stack(addends).sum(dim=0), expected)


@pytest.mark.parametrize("bias", [False, True])
def test_merged_columns_are_the_layers_side_by_side(bias: bool) -> None:
    tensors = {"q.weight": _randn(4, 5), "q.bias": _randn(4), "k.weight": _randn(7, 5), "k.bias": _randn(7)}
    reader, x, parts = DictReader(tensors), _randn(3, 5), {"q": slice(1, 4), "k": slice(0, 2)}
    merged = merged_column_linear(reader, parts, CPU, bias=bias).forward(x)
    apart = [column_linear(reader, name, rows, CPU, bias=bias).forward(x) for name, rows in parts.items()]
    torch.testing.assert_close(merged, torch.cat(apart, dim=1))


def test_norm_reads_its_weight_and_epsilon() -> None:
    norm = RmsNorm.build(DictReader({"norm.weight": torch.full((2,), 3.0)}), "norm", 7.0, CPU)
    torch.testing.assert_close(norm.forward(torch.tensor([[3.0, -3.0]])), torch.tensor([[9.0, -9.0]]) / 4.0)
    normed, total = norm.forward_add(torch.tensor([[1.0, -1.0]]), torch.tensor([[2.0, -2.0]]))
    torch.testing.assert_close(normed, torch.tensor([[9.0, -9.0]]) / 4.0)
    assert total.tolist() == [[3.0, -3.0]]
