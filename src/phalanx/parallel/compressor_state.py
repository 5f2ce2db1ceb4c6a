"""A compressor's state by ranks, as part of a state dict.

    compression@2/4.residual.layer.weight          the residual of layer.weight on rank 2 of 4
    compression@2/2x4.residual.0-9.layer.weight    of elements 0:9, rank 2 of 2 x 4: gradients are
                                                   sharded over 4 ranks, then averaged over 2

Every rank has another state, so each key names its rank: the states of all ranks can be joined, a
missing one is noticed, and none is taken for another rank's.
"""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from phalanx.compression import Compressor
from phalanx.compression.compressor import is_finite, strip_prefix
from phalanx.compression.error_feedback import (
    OWNED,
    RESIDUAL,
    join_slices,
    read_slice_key,
    split_residual,
    total_residual,
)
from phalanx.core.backend import Backend
from phalanx.errors import SizeMismatchError

log = logging.getLogger("phalanx")

States = Mapping[int, Mapping[str, Tensor]]
"""States of compressors, by rank."""

# ------------------------------------------------------------------------------
# Keys of a state dict that name their rank.

_KEY = re.compile(r"compression@(\d{1,6})/(\d{1,6})(?:x(\d{1,6}))?\.(.*)", re.DOTALL)
_OWN_KEY = re.compile(r"\w+@(\d{1,6}/\d{1,6}(?:x\d{1,6})?|all)\..*", re.DOTALL)
"""No job has more than six digits of ranks; a damaged key costs no loop over more."""


class GradientSharding(NamedTuple):
    """The sharding of gradients over ranks before a compressor averages them.

    2 x 4 ranks     rank 0    1    2    3      the shards of one copy
                    rank 4    5    6    7      those of another one; 0 and 4 average theirs

    shards   number of consecutive ranks that share one copy
    slices   this rank's part of them, by elements and name (`slice_key`)
    """

    shards: int
    slices: frozenset[str]

    def has(self, names: Iterable[str]) -> bool:
        """Return whether this rank has all of these."""
        return self.shards == 1 or self.slices.issuperset(names)

    def rank_in_keys(self, backend: Backend) -> str:
        """Return this rank as in keys: `2/4`, or `2/2x4` of 2 copies with 4 shards each."""
        copies = f"{backend.world_size // self.shards}x" if self.shards > 1 else ""
        return f"{backend.rank}/{copies}{self.shards if copies else backend.world_size}"


UNSHARDED = GradientSharding(1, frozenset())


def own_state(
    compressor: Compressor, backend: Backend, sharding: GradientSharding = UNSHARDED
) -> dict[str, Tensor]:
    """Return the compressor's state on this rank, under keys that name the rank."""
    prefix = f"compression@{sharding.rank_in_keys(backend)}."
    return {prefix + key: value for key, value in compressor.state_dict().items()}


def is_own_key(key: str) -> bool:
    """Return whether a key of a state dict names its rank: `<what>@<rank>/<ranks>.<key>`, or
    `<what>@all.<key>` for values that all ranks share. Keys of parameters do not.
    """
    return _OWN_KEY.fullmatch(key) is not None


def needed(
    keys: Iterable[str], backend: Backend, sharding: GradientSharding = UNSHARDED
) -> list[str]:
    """Return the keys of all ranks that this rank loads: its own and the common ones, if ranks and
    sharding are as before; else all.
    """
    listed, mine = list(keys), sharding.rank_in_keys(backend)
    owner = {key: match[1] for key in listed if (match := _OWN_KEY.fullmatch(key))}
    own = [key for key in listed if owner.get(key) == mine]
    residual = f"compression@{mine}.{RESIDUAL}"
    if not own or not sharding.has(k.removeprefix(residual) for k in own if k.startswith(residual)):
        return listed
    return [key for key in listed if owner.get(key) in (mine, "all")]


def without_own(state: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """Return a state dict without such keys, itself if it has none; and their entries."""
    own = {key: value for key, value in state.items() if is_own_key(key)}
    if not own:
        return state, own
    return with_versions({k: value for k, value in state.items() if k not in own}, state), own


def with_versions(entries: Mapping[str, Any], state: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Return entries as a state dict, with the versions of modules in `state`, if it has any."""
    versioned = OrderedDict(entries)
    if hasattr(state, "_metadata"):
        versioned._metadata = state._metadata  # type: ignore[attr-defined]
    return versioned


# ------------------------------------------------------------------------------
# Load states, of any number of ranks.


def load_own(
    compressor: Compressor | None,
    state: Mapping[str, Any],
    backend: Backend,
    *,
    sizes_of: Mapping[str, int] | None = None,
    sharding: GradientSharding = UNSHARDED,
) -> None:
    """Load the states in a dict, and ignore its other keys.

    sizes_of   of each gradient, by name, if they are known: `SizeMismatchError`, which names it,
               for the residual of one that is not there, or has another size
    sharding   the part of them that this rank's compressor averages

    Without any, the compressor keeps its state. A warning in the log names the loss. If gradients
    were sharded otherwise, residuals are shared out anew, and other state of compressors
    (PowerSGD's Q) begins anew, too. Raises ValueError for states of different numbers of ranks, and
    for entries that are no state; the compressor stays as it was then.
    """
    states, layouts = _states_in(state)
    if not states:
        return
    warn = partial(log.warning, "rank %d: the state dict %s", backend.rank)
    if compressor is None:
        warn("has what compressors had left over, and it is lost: there is no compression now")
        return
    if len(layouts) > 1:
        raise ValueError(
            f"rank {backend.rank}: the state dict has states of compressors of "
            f"{sorted(p * k for p, k in layouts)} ranks: load those of one save"
        )
    layout = copies_then, shards_then = layouts.pop()
    _check_intact(states, backend, sizes_of if shards_then == 1 else None)
    forgets = RESIDUAL not in compressor.remembers()
    if forgets and any(key.startswith(RESIDUAL) for each in states.values() for key in each):
        warn(
            f"has what an ErrorFeedback had left over, and it is lost: {compressor!r} forgets what "
            f"it leaves out; ErrorFeedback({compressor!r}) would go on"
        )
    ranks = max(copies_then * shards_then, *(rank + 1 for rank in states))
    place, copy = backend.rank % sharding.shards, backend.rank // sharding.shards
    alike = [states.get(rank) for rank in range(place, ranks, sharding.shards)]
    residuals = [name for one in alike if one is not None for name in strip_prefix(RESIDUAL, one)]
    fits = shards_then == sharding.shards and sharding.has(residuals)
    missing = sorted({*range(ranks)} - states.keys())
    alone_is_enough = fits and ranks == backend.world_size and backend.rank not in missing
    if missing and not alone_is_enough:
        warn(
            f"lacks what the compressors of ranks {', '.join(map(str, missing))} had left over (of "
            f"{ranks} ranks), and it is lost: save the state dict of every rank"
        )
    if fits:
        own = compressor.reshard(alike, backend.world_size // sharding.shards)[copy]
    else:
        own = _share_of(states, layout, backend, sharding, sizes_of)
    compressor.load_state_dict(own)


def _states_in(state: Mapping[str, Any]) -> tuple[States, set[tuple[int, int]]]:
    """Return the compressors' states in a dict, and their numbers of copies and shards."""
    states: dict[int, dict[str, Tensor]] = {}
    layouts = set()
    for key, value in state.items():
        if match := _KEY.fullmatch(key):
            rank, copies, shards, name = match.groups()
            states.setdefault(int(rank), {})[name] = value
            layouts.add((int(copies), int(shards or 1)))
    return states, layouts


def _share_of(
    states: States,
    layout: tuple[int, int],
    backend: Backend,
    sharding: GradientSharding,
    sizes_of: Mapping[str, int] | None,
) -> dict[str, Tensor]:
    """Return this rank's share of the residuals, if gradients are sharded otherwise now.

    layout   the states' numbers of copies and shards
    """
    copies_then, shards_then = layout
    dtype = torch.float32
    short: dict[str, Tensor] = {}
    for place in range(shards_then):
        group = [state for rank, state in states.items() if rank % shards_then == place]
        short.update(total_residual(group, copies_then))
        kept = [left.dtype for state in group for left in strip_prefix(RESIDUAL, state).values()]
        dtype = torch.float64 if torch.float64 in kept else dtype
    mine = whole = short if shards_then == 1 else join_slices(short, sizes_of or {})
    if sizes_of is not None:
        for name, values in whole.items():
            _check_size(name, values.numel(), sizes_of, backend.rank)
    if sharding.shards > 1:
        places = {key: read_slice_key(key) for key in sharding.slices}
        mine = {k: whole[n][start:stop] for k, (n, start, stop) in places.items() if n in whole}
    copies, copy = backend.world_size // sharding.shards, backend.rank // sharding.shards
    return {RESIDUAL + key: split_residual(left, copies, dtype)[copy] for key, left in mine.items()}


def _check_intact(states: States, backend: Backend, sizes_of: Mapping[str, int] | None) -> None:
    """Raise, before anything is loaded, unless these can be states of compressors.

    `SizeMismatchError`, which names it, for the residual of a gradient that is not there, or has
    another size, here or on another rank; ValueError for entries that are no state: values that are
    not finite would come back in every average.
    """
    rank = backend.rank
    sizes = dict(sizes_of or {})

    def refuse(owner: int, key: str, problem: str) -> NoReturn:
        raise ValueError(
            f"rank {rank}: the state dict is damaged: {key!r}, of rank {owner}'s compressor, "
            f"{problem}"
        )

    for owner, state in states.items():
        for key, value in state.items():
            if not isinstance(value, Tensor):
                refuse(owner, key, f"is a {type(value).__name__}, not a tensor")
        for name, left in strip_prefix(RESIDUAL, state).items():
            if not left.is_floating_point() or left.dim() != 1 or not is_finite(left):
                refuse(owner, RESIDUAL + name, "is no row of finite numbers")
            if sizes_of is None:
                sizes.setdefault(name, left.numel())
            _check_size(name, left.numel(), sizes, rank)
    for owner, state in states.items():
        for key, left in strip_prefix(OWNED, state).items():
            name, start, stop = "", 0, 0
            with suppress(ValueError):
                name, start, stop = read_slice_key(key)
            fits = 0 <= start <= stop <= sizes.get(name, -1) and left.shape == (stop - start,)
            if not (fits and left.is_floating_point() and is_finite(left)):
                refuse(owner, OWNED + key, "is no part of a gradient that is there")


def _check_size(name: str, count: int, sizes: Mapping[str, int], rank: int) -> None:
    if sizes.get(name) != count:
        has = f"{sizes[name]} values" if name in sizes else "no such gradient"
        raise SizeMismatchError(
            f"rank {rank}: the state dict has {count} values that were left over of {name}, and "
            f"this model has {has}: it is the state of another model",
            rank=rank,
        )
