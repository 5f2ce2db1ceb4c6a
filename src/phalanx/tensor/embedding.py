r"""The embedding, cut by its words, and norms of a sequence that is cut.

ParallelEmbedding: each rank has the vectors of some of the words.

    vocabulary     | 0 1 2 3 | 4 5 6 7 |          tokens        5  1  7
    rank 0            E_0                   ->                  0  e1 0  --\
                                                                            sum --> e5 e1 e7
    rank 1                       E_1        ->                  e5 0  e7 --/

(Shoeybi et al. 2019, "Megatron-LM", section 3: the input embedding.)

SequenceParallelNorm: a norm that each rank computes for its part of the sequence, or of the heads.

  rank 0   x[0:3] --> norm --> y[0:3]        gradients of weight and bias: summed over the ranks,
  rank 1   x[3:5] --> norm --> y[3:5]        since each has seen other rows

(Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models".)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from phalanx.core.backend import Backend
from phalanx.errors import UnsupportedOperationError
from phalanx.tensor.functions import copy_to_ranks
from phalanx.tensor.layer import ParallelLayer, Split, Style, check_units
from phalanx.tensor.shards import ShardSpec


class ParallelEmbedding(ParallelLayer):
    """An embedding of which each rank has the vectors of some of the words.

    num_embeddings, embedding_dim, padding_idx, device, dtype   as `nn.Embedding` has them
    backend        the ranks that share it
    sequence_dim   give every rank its part of the sequence, which is cut along this dimension
        (sequence parallelism); else every rank gets the whole

    Tokens, of any shape [...], are the same on every rank; the result, [..., embedding_dim], is the
    plain embedding's, bit for bit, on every rank. Forward sums it, an all_reduce of its bytes, and
    backward sends nothing; with `sequence_dim` they are a reduce_scatter and an all_gather.

    Initial values and the names of parameters are as for `ColumnParallelLinear`; `from_embedding`
    takes a plain one. `max_norm`, `scale_grad_by_freq` and `sparse` are refused. Raises
    `IndexError`, on every rank, for a token that is not in the vocabulary.
    """

    style: EmbeddingStyle
    weight: nn.Parameter
    padding_idx: int | None

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        backend: Backend,
        *,
        padding_idx: int | None = None,
        sequence_dim: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        plain = nn.Embedding(
            num_embeddings, embedding_dim, padding_idx=padding_idx, device=device, dtype=dtype
        )
        super().__init__(plain, backend, EmbeddingStyle(sequence_dim=sequence_dim))

    @classmethod
    def from_embedding(
        cls, embedding: nn.Embedding, backend: Backend, **options: Any
    ) -> ParallelEmbedding:
        """Return this rank's part of a plain embedding, which is not changed.

        options   sequence_dim

        Raises `UnsupportedOperationError` for subclasses, and for one with hooks.
        """
        return cls.from_plain(embedding, backend, EmbeddingStyle(**options))

    def shard_from(self, plain: nn.Module, *args: Any, **options: Any) -> None:
        super().shard_from(plain, *args, **options)
        self.padding_idx = cast(nn.Embedding, plain).padding_idx

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the vectors, or their sequence's part here. Blocks until all ranks call it."""
        if tokens.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{self.label} takes tokens of int64 or int32, not {tokens.dtype}")
        lowest, highest = map(int, torch.aminmax(tokens)) if tokens.numel() else (0, 0)
        if lowest < 0 or highest >= self.num_embeddings:
            wrong = lowest if lowest < 0 else highest
            raise IndexError(
                f"rank {self.backend.rank}: {self.label}: token {wrong} is not in the vocabulary "
                f"of {self.num_embeddings}"
            )
        ((start, end),) = self.splits["weight"].cut.runs[self.backend.rank]
        elsewhere = (tokens < start) | (tokens >= end)
        own = (tokens - start).masked_fill(elsewhere, 0)
        padding = self.padding_idx
        here = padding - start if padding is not None and start <= padding < end else None
        vectors = F.embedding(own, self.weight, here).masked_fill(elsewhere.unsqueeze(-1), 0)
        return self.sum_over_ranks(vectors, self.style.sequence_dim)

    @property
    def num_embeddings(self) -> int:
        """Number of words of all ranks together."""
        return self.whole_size(0)

    @property
    def embedding_dim(self) -> int:
        """Length of a word's vector: its features."""
        return self.whole_size(1)

    def extra_repr(self) -> str:
        """Return the whole embedding's sizes, and this rank's part."""
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.describe_part()}"


@dataclass(frozen=True, kw_only=True)
class EmbeddingStyle(Style):
    """The options of a `ParallelEmbedding`, which explains them."""

    sequence_dim: int | None = None

    takes = (nn.Embedding,)
    makes = ParallelEmbedding

    def splits(self, plain: nn.Module, ranks: int) -> dict[str, Split]:
        embedding = cast(nn.Embedding, plain)
        given = {
            "max_norm": embedding.max_norm is not None,
            "scale_grad_by_freq": embedding.scale_grad_by_freq,
            "sparse": embedding.sparse,
        }
        if any(given.values()):
            names = ", ".join(name for name, is_given in given.items() if is_given)
            raise UnsupportedOperationError(
                f"a ParallelEmbedding has no {names}: leave it out of the embedding"
            )
        check_units(embedding.num_embeddings, 1, ranks, "num_embeddings")
        return {"weight": Split(0, ShardSpec.of(embedding.num_embeddings, ranks))}


class SequenceParallelNorm(ParallelLayer):
    """A `LayerNorm` or `RMSNorm` of inputs of which each rank has a part.

    A part of the sequence, between layers with `sequence_dim`; or of the heads, for norms of
    queries and keys. Made by `from_norm`, or by `parallelize`. Weight and bias are whole on every
    rank, and so are their gradients: backward sums them, an all_reduce of their bytes. A plain norm
    there would learn on each rank from its own rows only, and the ranks would drift apart.
    """

    style: SequenceNormStyle
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    @classmethod
    def from_norm(cls, norm: nn.LayerNorm | nn.RMSNorm, backend: Backend) -> SequenceParallelNorm:
        """Copy a plain norm's parameters. Blocks for a message of 8 bytes."""
        return cls.from_plain(norm, backend, SequenceNormStyle())

    def shard_from(self, plain: nn.Module, *args: Any, **options: Any) -> None:
        """Take a plain norm's part, and its kind and options, too."""
        super().shard_from(plain, *args, **options)
        norm = cast("nn.LayerNorm | nn.RMSNorm", plain)
        self.kind = type(norm)
        self.normalized_shape = tuple(norm.normalized_shape)
        self.eps = norm.eps
        if "bias" not in self._parameters:
            self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the input. Sends nothing; backward does."""
        weight: Tensor | None = self.weight
        bias: Tensor | None = self.bias
        if weight is not None and bias is not None:  # one message for both
            both = copy_to_ranks(torch.stack([weight, bias]), self.backend, label=self.label)
            weight, bias = both.unbind()
        elif weight is not None:
            weight = copy_to_ranks(weight, self.backend, label=self.label)
        if self.kind is nn.RMSNorm:
            return F.rms_norm(x, self.normalized_shape, weight, self.eps)
        return F.layer_norm(x, self.normalized_shape, weight, bias, cast(float, self.eps))

    def extra_repr(self) -> str:
        """As of the plain norm."""
        return f"{self.kind.__name__}, {self.normalized_shape}, eps={self.eps}"


@dataclass(frozen=True, kw_only=True)
class SequenceNormStyle(Style):
    """A `SequenceParallelNorm` has no options."""

    takes = (nn.LayerNorm, nn.RMSNorm)
    makes = SequenceParallelNorm
