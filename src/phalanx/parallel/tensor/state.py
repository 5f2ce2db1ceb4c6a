"""The state of a model with parallel layers: whole, as the plain model has it, and back.

    full_state_dict        parts of all ranks   ->  {"mlp.up.weight": the whole, ...}
    load_full_state_dict   the whole            ->  this rank's part of it

`module.state_dict()` itself is this rank's part, under the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

from torch import Tensor, nn

from phalanx.errors import SizeMismatchError
from phalanx.parallel.slices import Slice
from phalanx.parallel.tensor.layer import ParallelLayer, Split
from phalanx.parallel.tensor.moves import Ranks, all_gather
from phalanx.parallel.wrapper import Wrapper, walk


def full_state_dict(module: nn.Module, *, rank0_only: bool = False) -> dict[str, Any]:
    """The state dict that the plain model would have: same keys, whole tensors.

    rank0_only   only rank 0 of each layer's group keeps it; the others get {}

    Every rank that shares layers calls it. Blocks for an all_gather of each parameter that is cut;
    what is gathered is a copy, all else the module's own. For a model in DDP, too, or in FSDP,
    whose shards are gathered first, and one that has such in it; of a pipeline, this rank's layers.
    """
    places = _cut_places(module)
    state: dict[str, Any] = {}
    empty = False
    own = dict(module.state_dict())
    for prefix, gather in _sharded(module).items():
        gathered = {prefix + key: value for key, value in gather().items()}
        own = {
            key: gathered.get(key, value)
            for key, value in own.items()
            if key in gathered or not key.startswith(prefix)
        }
    for key, value in own.items():
        place = places.get(key)
        if place is None:
            state[key] = value
            continue
        whole = all_gather(value, place.split.cut, place.split.dim, place.ranks)
        empty = empty or (rank0_only and place.ranks.backend.rank != 0)
        if not empty:
            state[key] = whole
    return {} if empty else state


def load_full_state_dict(
    module: nn.Module, state: Mapping[str, Any], *, strict: bool = True
) -> None:
    """Load the plain model's state: each rank takes its own part of it. Nothing is sent.

    state    as `full_state_dict` or the plain model's `state_dict()` gives it, from any number of
        ranks; the same on every rank
    strict   the keys have to be exactly the model's, as in `Module.load_state_dict`

    Raises `SizeMismatchError`, naming the first, for a tensor that is not as large as the whole;
    nothing is changed then. For a model in DDP or FSDP, too, or with such in it, and a pipeline.
    Every rank that shards parameters with others (FSDP) calls it.
    """
    places, slices = _cut_places(module), _slices(module)
    own = module.state_dict(keep_vars=True)
    parts = dict(state)
    for key, value in state.items():
        mine, place = own.get(key), places.get(key)
        if not isinstance(value, Tensor) or not isinstance(mine, Tensor):
            continue
        piece = slices.get(mine, Slice.whole(tuple(mine.shape)))
        shape = list(piece.shape)
        if place is not None:
            shape[place.split.dim] = place.split.cut.total
        if list(value.shape) != shape:
            raise SizeMismatchError(
                f"{key} is of shape {shape} in the whole model, and of shape {list(value.shape)} "
                "in this state: nothing was loaded. A rank's own state_dict() goes into "
                "load_state_dict() of the same rank"
            )
        part = value
        if place is not None:
            part = place.split.cut.shard(part, place.split.dim, place.ranks.backend.rank)
        if part.shape != mine.shape:  # a shard, of one dimension
            part = part.reshape(-1)[piece.start : piece.stop].view(mine.shape)
        parts[key] = part
    with ExitStack() as writing:
        for _, inner in walk(module):
            if isinstance(inner, Wrapper) and inner is not module:  # which sees to it by itself
                writing.enter_context(inner.writing())
        module.load_state_dict(parts, strict=strict)


class _Place(NamedTuple):
    """Where the other parts of a parameter are, and how it is cut."""

    split: Split
    ranks: Ranks


def _cut_places(module: nn.Module) -> dict[str, _Place]:
    """By the key in the state dict."""
    places = {}
    for prefix, layer in walk(module):
        if isinstance(layer, ParallelLayer):
            for own, split in layer.splits.items():
                key = prefix + own
                places[key] = _Place(split, Ranks(layer.backend, f"full_state_dict of {key}"))
    return places


def _sharded(module: nn.Module) -> dict[str, Callable[[], dict[str, Any]]]:
    """How the wrappers that shard their parameters gather them, by the prefix of their keys."""
    found = ((prefix, getattr(part, "full_state_dict", None)) for prefix, part in walk(module))
    return {prefix: gather for prefix, gather in found if gather is not None}


def _slices(module: nn.Module) -> dict[Tensor, Slice]:
    """What part of a parameter there is here, for those in wrappers."""
    wrappers = (part for _, part in walk(module) if isinstance(part, Wrapper) and not part.spreads)
    return {
        parameter: slices[name]
        for wrapper in wrappers
        for slices in [wrapper.slices()]
        for name, parameter in wrapper.named_parameters()
    }
