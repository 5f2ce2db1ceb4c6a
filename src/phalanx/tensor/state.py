"""A model with parallel layers as one: its whole state dict, and a check of it.

    full_state_dict        parts of all ranks   ->  {"mlp.up.weight": the whole, ...}
    load_full_state_dict   the whole            ->  this rank's part of it

`module.state_dict()` itself is this rank's part, under the same names.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from phalanx.core.backend import Backend
from phalanx.errors import SizeMismatchError
from phalanx.parallel.compressor_state import with_versions
from phalanx.parallel.guards import check_agreement, describe_with_values
from phalanx.parallel.wrapper import Slice, Wrapper, slices_in, walk
from phalanx.tensor.functions import all_gather_shards
from phalanx.tensor.layer import ParallelLayer, Split, owners


def full_state_dict(module: nn.Module, *, rank0_only: bool = False) -> dict[str, Any]:
    """Return the state dict that the plain model would have: same keys, whole tensors.

    rank0_only   only rank 0 of each layer's group keeps it; the others get {}

    Every rank that shares layers calls it. Blocks for an all_gather of each parameter that is cut.
    A gathered tensor is a copy, any other the module's own. Also for a model in DDP or FSDP, or
    with such parts: FSDP's shards are gathered first. Of a pipeline, it gives this rank's layers.
    """
    local = module.state_dict()
    own = dict(local)
    for prefix, part in walk(module):
        gather = getattr(part, "full_state_dict", None)  # of a wrapper that shards its parameters
        if gather is not None:
            gathered = {prefix + key: value for key, value in gather().items()}
            own = {
                key: gathered.get(key, value)
                for key, value in own.items()
                if key in gathered or not key.startswith(prefix)
            }
    cut = _cut_parameters(module)
    state: dict[str, Any] = {}
    keep = True
    for key, value in own.items():
        if key in cut:
            split, backend = cut[key]
            label = f"full_state_dict of {key}"
            whole = all_gather_shards(value, split.cut, split.dim, backend, label)
            keep = keep and not (rank0_only and backend.rank != 0)
        else:
            whole = value
        if keep:
            state[key] = whole
    return with_versions(state, local) if keep else {}


def load_full_state_dict(
    module: nn.Module, state: Mapping[str, Any], *, strict: bool = True
) -> None:
    """Load the plain model's state: each rank takes its own part of it. Nothing is sent.

    state    as `full_state_dict` or the plain model's `state_dict()` gives it, from any number of
        ranks; the same on every rank
    strict   the keys have to be exactly the model's, as in `Module.load_state_dict`

    Raises `SizeMismatchError`, naming the first, for a tensor that is not as large as the whole;
    nothing is changed then. Also for a model in DDP or FSDP, or with such parts, and a pipeline.
    Every rank that shards parameters with others (FSDP) calls it.
    """
    cut, own = _cut_parameters(module), module.state_dict(keep_vars=True)
    slices, parts = slices_in(module), with_versions(state, state)
    for key, value in state.items():
        mine = own.get(key)
        if not isinstance(value, Tensor) or not isinstance(mine, Tensor):
            continue
        piece = slices.get(mine, Slice.whole(tuple(mine.shape)))
        shape, part = list(piece.shape), value
        if key in cut:
            split, backend = cut[key]
            shape[split.dim] = split.cut.total
        if list(value.shape) != shape:
            raise SizeMismatchError(
                f"{key} is of shape {shape} in the whole model, and of shape {list(value.shape)} "
                "in this state: nothing was loaded. A rank's own state_dict() goes into "
                "load_state_dict() of the same rank"
            )
        if key in cut:
            part = split.cut.shard(part, split.dim, backend.rank)
        if part.shape != mine.shape:  # a shard, of one dimension
            part = part.reshape(-1)[piece.start : piece.stop].view(mine.shape)
        parts[key] = part
    with ExitStack() as writing:
        for _, inner in walk(module):
            if isinstance(inner, Wrapper) and inner is not module:  # it enters its own by itself
                writing.enter_context(inner.writing())
        module.load_state_dict(parts, strict=strict)


def _cut_parameters(module: nn.Module) -> dict[str, tuple[Split, Backend]]:
    """Return the parameters' cuts, and the ranks with the other parts, by the state dict's keys."""
    return {
        prefix + own: (split, layer.backend)
        for prefix, layer in walk(module)
        if isinstance(layer, ParallelLayer)
        for own, split in layer.splits.items()
    }


# ------------------------------------------------------------------------------
# Whether the parameters that are whole on every rank are still equal.

REMEDY = (
    "It is whole on every rank, and stays equal only if its gradients are. A norm that sees a part "
    'of the features, the heads or the sequence has to be a "sequence_norm"; another parameter '
    "there goes through copy_to_ranks before it is used; dropout where activations are whole "
    "has to drop the same on every rank"
)


def check_whole_parameters(module: nn.Module) -> None:
    """Raise `DesyncError`, on every rank, unless the parameters that are not cut are the same bits.

    They are equal at first, and stay so if the plan is right. A plan that leaves out a norm in a
    region where ranks have parts has the right shapes, so no other check finds it: call this after
    the first step of a new model, and as often as you like. Names the first parameter that differs,
    and the ranks in the minority. Every rank that shares layers calls it. Blocks for a message of 8
    bytes; costs reading the parameters once.
    """
    cut = owners(module)
    whole = [
        describe_with_values(name, parameter)
        for name, parameter in module.named_parameters()
        if parameter not in cut
    ]
    layers = [layer for layer in module.modules() if isinstance(layer, ParallelLayer)]
    for backend in dict.fromkeys(layer.backend for layer in layers):
        check_agreement(whole, backend, op="check_whole_parameters", remedy=REMEDY)
