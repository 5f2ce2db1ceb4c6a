"""Tensor parallelism: layers of which each rank holds a part.

shards           the cut of a dimension over ranks
functions        activations and gradients between ranks: f and g of the papers
layer            the common base of the parallel layers
linear, embedding, cross_entropy
parallelize      put parallel layers into an existing model
state            the whole model's state, and whether the ranks are still equal
"""

from phalanx.tensor.cross_entropy import parallel_cross_entropy
from phalanx.tensor.embedding import (
    EmbeddingStyle,
    ParallelEmbedding,
    SequenceNormStyle,
    SequenceParallelNorm,
)
from phalanx.tensor.functions import (
    copy_to_ranks,
    gather_from_ranks,
    gather_sequence,
    reduce_from_ranks,
    scatter_sum,
    scatter_to_ranks,
)
from phalanx.tensor.linear import ColumnParallelLinear, ColumnStyle, RowParallelLinear, RowStyle
from phalanx.tensor.parallelize import parallelize
from phalanx.tensor.shards import gather_shards, shard_tensor
from phalanx.tensor.state import (
    check_whole_parameters,
    full_state_dict,
    load_full_state_dict,
)

__all__ = [
    "ColumnParallelLinear",
    "ColumnStyle",
    "EmbeddingStyle",
    "ParallelEmbedding",
    "RowParallelLinear",
    "RowStyle",
    "SequenceNormStyle",
    "SequenceParallelNorm",
    "check_whole_parameters",
    "copy_to_ranks",
    "full_state_dict",
    "gather_from_ranks",
    "gather_sequence",
    "gather_shards",
    "load_full_state_dict",
    "parallel_cross_entropy",
    "parallelize",
    "reduce_from_ranks",
    "scatter_sum",
    "scatter_to_ranks",
    "shard_tensor",
]
