"""The state of a model with parallel layers: whole, as the plain model has it, and back.

    full_state_dict        parts of all ranks   ->  {"mlp.up.weight": the whole, ...}
    load_full_state_dict   the whole            ->  this rank's part of it

`module.state_dict()` itself is this rank's part, under the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from phalanx.errors import SizeMismatchError
from phalanx.parallel.tensor.layer import ParallelLayer, Split
from phalanx.parallel.tensor.moves import Ranks, all_gather
from phalanx.parallel.wrapper import Wrapper


def full_state_dict(module: nn.Module, *, rank0_only: bool = False) -> dict[str, Any]:
    """The state dict that the plain model would have: same keys, whole tensors.

    rank0_only   only rank 0 of each layer's group keeps it; the others get {}

    Every rank that shares layers calls it. Blocks for an all_gather of each parameter that is cut;
    what is gathered is a copy, all else the module's own. For a model in DDP, too, and in FSDP,
    whose shards are gathered first.
    """
    places = _cut_places(module)
    state: dict[str, Any] = {}
    empty = False
    sharded = _of_shards(module)
    own = module.state_dict() if sharded is None else sharded()
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
    nothing is changed then. For a model in DDP or FSDP, too.
    """
    places = _cut_places(module)
    own = module.state_dict()
    parts = dict(state)
    for key, value in state.items():
        place = places.get(key)
        if not isinstance(value, Tensor) or not isinstance(own.get(key), Tensor):
            continue
        if _of_shards(module) is None:
            shape = list(own[key].shape)
        elif place is not None:  # it knows itself how large its parameters are
            shape = list(value.shape)
        else:
            continue
        if place is not None:
            shape[place.split.dim] = place.split.cut.total
        if list(value.shape) != shape:
            raise SizeMismatchError(
                f"{key} is of shape {shape} in the whole model, and of shape {list(value.shape)} "
                "in this state: nothing was loaded. A rank's own state_dict() goes into "
                "load_state_dict() of the same rank"
            )
        if place is not None:
            rank = place.ranks.backend.rank
            parts[key] = place.split.cut.shard(value, place.split.dim, rank)
    module.load_state_dict(parts, strict=strict)


class _Place(NamedTuple):
    """Where the other parts of a parameter are, and how it is cut."""

    split: Split
    ranks: Ranks


def _cut_places(module: nn.Module) -> dict[str, _Place]:
    """By the key in the state dict."""
    places = {}
    while isinstance(module, Wrapper):
        module = module.module
    for name, layer in module.named_modules(remove_duplicate=False):
        if isinstance(layer, ParallelLayer):
            for own, split in layer.splits.items():
                key = f"{name}.{own}" if name else own
                places[key] = _Place(split, Ranks(layer.backend, f"full_state_dict of {key}"))
    return places


def _of_shards(module: nn.Module) -> Callable[[], dict[str, Any]] | None:
    """How a wrapper that shards its parameters gathers them; None for one that does not."""
    return getattr(module, "full_state_dict", None)
