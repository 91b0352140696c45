"""Token embedding and output head, the vocabulary split over the tensor-parallel ranks."""

from dataclasses import dataclass

import torch
from torch.nn import functional

from moeserve.layers.linear import Linear, column_linear
from moeserve.models.parameters import ParameterReader
from moeserve.models.spec import ModelSpec
from moeserve.parallel import Group, ParallelContext, shard_range


@dataclass(frozen=True, slots=True)
class VocabEmbedding:
    """Rows of the embedding for this rank's part of the vocabulary."""

    weight_vD: torch.Tensor
    first_token_id: int
    group: Group

    @staticmethod
    def build(spec: ModelSpec, reader: ParameterReader, parallel: ParallelContext) -> "VocabEmbedding":
        """Read this rank's rows."""
        rows = _vocab_shard(spec, parallel)
        weight = reader.read("embed_tokens.weight", rows).to(parallel.device)
        return VocabEmbedding(weight, rows.start, parallel.tp)

    def forward(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """[T, D] on every rank of the group."""
        local_T = token_ids_T - self.first_token_id
        if self.group.size == 1:
            return functional.embedding(local_T, self.weight_vD)
        elsewhere_T = (local_T < 0) | (local_T >= len(self.weight_vD))
        hidden_TD = functional.embedding(local_T.masked_fill(elsewhere_T, 0), self.weight_vD)
        return self.group.all_reduce(hidden_TD.masked_fill(elsewhere_T.unsqueeze(1), 0.0))


@dataclass(frozen=True, slots=True)
class LmHead:
    """Hidden states to logits of the whole vocabulary."""

    proj: Linear
    """To the logits of this rank's part."""
    vocab_size: int
    group: Group

    @staticmethod
    def build(
        spec: ModelSpec, reader: ParameterReader, parallel: ParallelContext, embedding: VocabEmbedding
    ) -> "LmHead":
        """Read this rank's rows, or pack those of the embedding where the model ties them."""
        if spec.tie_word_embeddings:
            proj = Linear.build(embedding.weight_vD, quantization=reader.quantization)
        else:
            proj = column_linear(reader, "lm_head", _vocab_shard(spec, parallel), parallel.device)
        return LmHead(proj, spec.vocab_size, parallel.tp)

    def forward(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """[N, V] float32 on every rank; N is the same on all ranks of the group, and may be 0."""
        logits_Nv = self.proj.forward(hidden_ND).float()
        if self.group.size == 1:
            return logits_Nv
        shards = [shard_range(self.vocab_size, self.group.size, rank) for rank in range(self.group.size)]
        sizes = [shard.stop - shard.start for shard in shards]
        padded_Nv = functional.pad(logits_Nv, (0, max(sizes) - logits_Nv.shape[1]))
        gathered_GNv = self.group.all_gather(padded_Nv)
        return torch.cat([gathered_GNv[rank, :, :size] for rank, size in enumerate(sizes)], dim=1)


def _vocab_shard(spec: ModelSpec, parallel: ParallelContext) -> slice:
    return shard_range(spec.vocab_size, parallel.tp.size, parallel.tp.rank)
