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
from typing import Any

from torch import Tensor

from phalanx.aggregation.cut import WHOLE, Cut, shared_out
from phalanx.aggregation.intact import check_intact
from phalanx.backends.base import Backend
from phalanx.compression import Compressor
from phalanx.compression.memory import under
from phalanx.compression.residuals import RESIDUAL

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
    left = [name for one in alike if one is not None for name in under(RESIDUAL, one)]
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
