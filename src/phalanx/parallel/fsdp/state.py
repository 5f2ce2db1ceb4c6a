"""Full values of all parameters, and shards out of full values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from phalanx.errors import SizeMismatchError
from phalanx.parallel.fsdp.flat import Flat


def full_values(flats: Sequence[Flat]) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Each parameter's full value, in the dtype of the shards, one flat after the other.

    Memory that may be the model's own: it is not to be written, and to be copied to be kept. Every
    rank of the group takes all of them.
    """
    for flat in flats:
        yield from zip(flat.parameters, flat.views(flat.all_shards()), strict=True)


def full_state(module: nn.Module, flats: Sequence[Flat], *, wanted: bool) -> dict[str, Any]:
    """The state of the plain module; empty, if it is not wanted here. A collective of the group."""
    values = {}
    for parameter, value in full_values(flats):
        if wanted:
            values[parameter] = value.clone()
    if not wanted:
        return {}
    local = module.state_dict(keep_vars=True)
    return {
        name: values[value]
        if isinstance(value, nn.Parameter) and value in values
        else value.detach().clone()
        if isinstance(value, Tensor)
        else value
        for name, value in local.items()
    }


def shards_of(
    state: Mapping[str, Any], module: nn.Module, flats: Sequence[Flat], rank: int
) -> dict[str, Any]:
    """A state whose tensors are full or shards already, as a state of shards.

    Raises `SizeMismatchError`, which names the first tensor that is neither; nothing is changed.
    """
    where = {
        parameter: (flat, number)
        for flat in flats
        for number, parameter in enumerate(flat.parameters)
    }
    own = module.state_dict(keep_vars=True)
    result = dict(state)
    for name, value in state.items():
        mine = own.get(name)
        if not isinstance(mine, nn.Parameter) or mine not in where or not isinstance(value, Tensor):
            continue
        flat, number = where[mine]
        shape = flat.layout.shapes[number]
        if tuple(value.shape) == shape:
            start, stop = flat.layout.part(number, flat.place)
            result[name] = value.detach().reshape(-1)[start:stop].view(mine.shape)
        elif value.shape != mine.shape:
            raise SizeMismatchError(
                f"rank {rank}: FSDP: {name} is to be loaded from a tensor of shape "
                f"{list(value.shape)}; it takes the full one, {list(shape)}, or this rank's shard "
                f"of it, {list(mine.shape)}",
                rank=rank,
                op="FSDP",
            )
    return result
