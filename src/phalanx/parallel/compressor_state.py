"""A compressor's state by ranks, as part of a state dict.

    compression@2/4.residual.layer.weight          what rank 2 of 4 has left over of layer.weight
    compression@2/2x4.residual.0-9.layer.weight    of elements 0:9, rank 2 of 2 x 4: gradients are
                                                   cut over 4 ranks, then averaged over 2

Every rank has another state, so each key says whose it is: the states of all ranks can be joined,
one that is missing is noticed, and none is taken for another rank's.
"""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from phalanx.compression import Compressor
from phalanx.compression.compressor import is_finite
from phalanx.compression.state import (
    OWNED,
    RESIDUAL,
    join_slices,
    read_slice_key,
    split_residual,
    strip_prefix,
    total_residual,
)
from phalanx.core.backend import Backend
from phalanx.errors import SizeMismatchError

# ------------------------------------------------------------------------------
# Gradients that are cut over ranks before a compressor averages them: whose state is of what.
#
# 2 x 4 ranks     rank 0    1    2    3      the shards of one copy
#                 rank 4    5    6    7      those of another one; 0 and 4 average theirs


class Cut(NamedTuple):
    """What of gradients a compressor averages on a rank, if that is not all of them.

    shards   over how many consecutive ranks they are cut
    pieces   what this rank has of them, by elements and name (`slice_key`)
    """

    shards: int
    pieces: frozenset[str]

    def fits(self, names: Iterable[str]) -> bool:
        """Whether all of these are of what this rank has."""
        return self.shards == 1 or self.pieces.issuperset(names)

    def whose(self, backend: Backend) -> str:
        """This rank, in keys: `2/4`, or `2/2x4` of 2 copies with 4 shards each."""
        copies = f"{backend.world_size // self.shards}x" if self.shards > 1 else ""
        return f"{backend.rank}/{copies}{self.shards if copies else backend.world_size}"


WHOLE = Cut(1, frozenset())


def shared_out(
    states: Mapping[int, Mapping[str, Tensor]],
    parts: int,
    shards: int,
    sizes_of: Mapping[str, int] | None,
    backend: Backend,
    cut: Cut,
) -> dict[str, Tensor]:
    """This rank's share of what averages were short of, where gradients are cut otherwise now.

    states    of the ranks that there were, `parts` copies of `shards` each
    sizes_of  of each gradient, by name, if they are known: `SizeMismatchError` if what was left
              over is of another model
    """
    dtype = torch.float32
    short: dict[str, Tensor] = {}
    for place in range(shards):
        group = [state for rank, state in states.items() if rank % shards == place]
        short.update(total_residual(group, parts))
        kept = [left.dtype for state in group for left in strip_prefix(RESIDUAL, state).values()]
        dtype = torch.float64 if torch.float64 in kept else dtype
    whole = short if shards == 1 else join_slices(short, sizes_of or {})
    if sizes_of is not None:
        _check_sizes(whole, sizes_of, backend)
    copies, copy = backend.world_size // cut.shards, backend.rank // cut.shards
    if cut.shards == 1:
        mine = whole
    else:
        places = {key: read_slice_key(key) for key in cut.pieces}
        mine = {k: whole[n][start:stop] for k, (n, start, stop) in places.items() if n in whole}
    return {RESIDUAL + key: split_residual(left, copies, dtype)[copy] for key, left in mine.items()}


def _check_sizes(left: Mapping[str, Tensor], sizes: Mapping[str, int], backend: Backend) -> None:
    for name, values in left.items():
        if sizes.get(name) != values.numel():
            has = f"{sizes[name]} values" if name in sizes else "no such gradient"
            raise SizeMismatchError(
                f"rank {backend.rank}: the state dict has {values.numel()} values that were left "
                f"over of {name}, and this model has {has}: it is the state of another model",
                rank=backend.rank,
            )


# ------------------------------------------------------------------------------

log = logging.getLogger("phalanx")

_KEY = re.compile(r"compression@(\d{1,6})/(\d{1,6})(?:x(\d{1,6}))?\.(.*)", re.DOTALL)
_OWN_KEY = re.compile(r"\w+@(\d{1,6}/\d{1,6}(?:x\d{1,6})?|all)\..*", re.DOTALL)
"""Nobody has more ranks; a key that says so does not make anybody count to there."""


def own_state(compressor: Compressor, backend: Backend, cut: Cut = WHOLE) -> dict[str, Tensor]:
    """The compressor's state on this rank, and whose it is."""
    prefix = f"compression@{cut.whose(backend)}."
    return {prefix + key: value for key, value in compressor.state_dict().items()}


def is_own_key(key: str) -> bool:
    """Whether a key of a state dict says whose it is: of a compressor's state, or of another that
    parameters are not part of. `<what>@<rank>/<ranks>.<key>`, or `<what>@all.<key>`: the same on
    every rank.
    """
    return _OWN_KEY.fullmatch(key) is not None


def needed(keys: Iterable[str], backend: Backend, cut: Cut = WHOLE) -> list[str]:
    """Those of all ranks' keys that this rank loads: its own, if there were as many ranks, which
    cut gradients alike, and those of all; else every one.
    """
    listed, mine = list(keys), cut.whose(backend)
    whose = {key: match[1] for key in listed if (match := _OWN_KEY.fullmatch(key))}
    own = [key for key in listed if whose.get(key) == mine]
    left = f"compression@{mine}.{RESIDUAL}"
    if not own or not cut.fits(key[len(left) :] for key in own if key.startswith(left)):
        return listed
    return [key for key in listed if whose.get(key) in (mine, "all")]


def without_own(state: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """A state dict without such keys, itself if it has none; and what is under them."""
    own = {key: value for key, value in state.items() if is_own_key(key)}
    if not own:
        return state, own
    plain = OrderedDict((key, value) for key, value in state.items() if key not in own)
    if hasattr(state, "_metadata"):  # versions of modules, which torch keeps there
        plain._metadata = state._metadata  # type: ignore[attr-defined]
    return plain, own


def load_own(
    compressor: Compressor | None,
    state: Mapping[str, Any],
    backend: Backend,
    *,
    sizes_of: Mapping[str, int] | None = None,
    cut: Cut = WHOLE,
) -> None:
    """Go on from the states in a dict, of which other keys are left alone.

    sizes_of   of each gradient, by name, if they are known: `SizeMismatchError`, which names it,
               for what was left over of one that is not there, or has another size
    cut        what of them this rank's compressor averages

    Without any the compressor keeps the state that it has. A warning in the log says what is lost.
    Where gradients were cut otherwise, what was left over of them is shared out anew, and what else
    compressors remember (where PowerSGD begins) begins anew, too. Raises ValueError if there are
    states of different numbers of ranks, and what `check_intact` does; the compressor is as before
    then.
    """
    states: dict[int, dict[str, Tensor]] = {}
    sizes = set()
    for key, value in state.items():
        match = _KEY.fullmatch(key)
        if match is not None:
            rank, parts, shards, name = match.groups()
            states.setdefault(int(rank), {})[name] = value
            sizes.add((int(parts), int(shards or 1)))
    if not sizes:
        return
    if compressor is None:
        log.warning(
            "rank %d: the state dict has what compressors had left over, and it is lost: there is "
            "no compression now",
            backend.rank,
        )
        return
    if len(sizes) > 1:
        raise ValueError(
            f"rank {backend.rank}: the state dict has states of compressors of "
            f"{sorted(p * k for p, k in sizes)} ranks: load those of one save"
        )
    ((parts, shards),) = sizes
    check_intact(states, backend, sizes_of if shards == 1 else None)
    if RESIDUAL not in compressor.remembers() and any(
        key.startswith(RESIDUAL) for state in states.values() for key in state
    ):
        log.warning(
            "rank %d: the state dict has what an ErrorFeedback had left over, and it is lost: %r "
            "forgets what it leaves out; ErrorFeedback(%r) would go on",
            backend.rank,
            compressor,
            compressor,
        )
    size = max(parts * shards, *(rank + 1 for rank in states))
    missing = sorted(set(range(size)) - states.keys())
    mine = backend.rank
    place, copy = mine % cut.shards, mine // cut.shards
    alike = [states.get(rank) for rank in range(place, size, cut.shards)]
    left = [name for one in alike if one is not None for name in strip_prefix(RESIDUAL, one)]
    fits = shards == cut.shards and cut.fits(left)
    if missing and (size != backend.world_size or mine in missing or not fits):
        log.warning(
            "rank %d: the state dict lacks what the compressors of ranks %s had left over (of %d "
            "ranks), and it is lost: save the state dict of every rank",
            mine,
            ", ".join(map(str, missing)),
            size,
        )
    if fits:
        own = compressor.reshard(alike, backend.world_size // cut.shards)[copy]
    else:
        own = shared_out(states, parts, shards, sizes_of, backend, cut)
    compressor.load_state_dict(own)


# ------------------------------------------------------------------------------
# Whether the states of compressors that are loaded can be what some ranks had left over.

States = Mapping[int, Mapping[str, Tensor]]


def check_intact(
    states: States, backend: Backend, sizes_of: Mapping[str, int] | None = None
) -> None:
    """Raise unless they are; nothing has been loaded then.

    states     by the rank whose they were
    sizes_of   of each gradient, by name, if they are known

    `SizeMismatchError`, which names it, for what was left over of a gradient that is not there, or
    has another size, here or on another of the ranks; ValueError for what is no state: values that
    are not finite would come back in every average.
    """
    rank = backend.rank
    sizes = dict(sizes_of) if sizes_of is not None else {}
    for whose, state in states.items():
        for key, value in state.items():
            if not isinstance(value, Tensor):
                _refuse(rank, whose, key, f"is a {type(value).__name__}, not a tensor")
        for name, left in strip_prefix(RESIDUAL, state).items():
            if not left.is_floating_point() or left.dim() != 1 or not is_finite(left):
                _refuse(rank, whose, RESIDUAL + name, "is no row of finite numbers")
            if sizes_of is None:
                sizes.setdefault(name, left.numel())
            if sizes.get(name) != left.numel():
                has = f"{sizes[name]} values" if name in sizes else "no such gradient"
                raise SizeMismatchError(
                    f"rank {rank}: the state dict has {left.numel()} values that were left over "
                    f"of {name}, and this model has {has}: it is the state of another model",
                    rank=rank,
                )
    for whose, state in states.items():
        for key, left in strip_prefix(OWNED, state).items():
            if not _is_slice(key, left, sizes):
                _refuse(rank, whose, OWNED + key, "is no part of a gradient that is there")


def _is_slice(key: str, left: Tensor, sizes: Mapping[str, int]) -> bool:
    try:
        name, start, stop = read_slice_key(key)
    except ValueError:
        return False
    fits = 0 <= start <= stop <= sizes.get(name, -1) and left.shape == (stop - start,)
    return fits and left.is_floating_point() and is_finite(left)


def _refuse(rank: int, whose: int, key: str, problem: str) -> NoReturn:
    raise ValueError(
        f"rank {rank}: the state dict is damaged: {key!r}, of rank {whose}'s compressor, {problem}"
    )
