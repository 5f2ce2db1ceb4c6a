"""Where the values of parameters come from: a model on the meta device gets them unit by unit.

Modules are asked to `reset_parameters` in the order of the model, as when it is built, so they draw
the same random numbers. A unit is cut as soon as it is complete, and its full values are dropped.
So a rank holds one whole unit at a time, and what is in no smaller unit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from phalanx.backends.base import Backend
from phalanx.collectives.run import start
from phalanx.collectives.task import in_place
from phalanx.errors import MisuseError
from phalanx.parallel.fsdp.flat import Flat
from phalanx.parallel.fsdp.units import Part, sites_of

Initialize = Callable[[nn.Module], None]


def adopt(flat: Flat, backend: Backend) -> None:
    """Give each rank its shard of rank 0's values. Moves the whole values once."""
    joined = flat.joined()
    if backend.world_size > 1:
        label = f"FSDP takes rank 0's values of {', '.join(flat.names)}"
        start(in_place("broadcast", joined, root=0), backend, label=label).wait()
    flat.adopt(joined)


def completed(
    model: nn.Module, parts: Sequence[Part], initialize: Initialize | None, rank: int
) -> Iterator[Part]:
    """Each part, once its parameters have values; those on the meta device are given some before.

    Raises `MisuseError` for a module that has parameters or buffers there and cannot be asked.
    """
    waiting = list(parts)
    yield from _take_complete(waiting)
    drawn: set[nn.Parameter] = set()
    for name, module in model.named_modules():
        if _is_on_meta(module):
            _materialize(model, module, parts, drawn)
            _initialize(name, module, drawn, initialize, rank)
            yield from _take_complete(waiting)


def _take_complete(waiting: list[Part]) -> Iterator[Part]:
    for part in list(waiting):
        if not any(p.is_meta for p in part.parameters.values()):
            waiting.remove(part)
            yield part


def _own(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module._parameters.items() if p is not None}


def _is_on_meta(module: nn.Module) -> bool:
    buffers = [value for value in module._buffers.values() if value is not None]
    return any(tensor.is_meta for tensor in (*_own(module).values(), *buffers))


def _materialize(
    model: nn.Module, module: nn.Module, parts: Sequence[Part], drawn: set[nn.Parameter]
) -> None:
    """Memory for a module's own parameters and buffers, wherever else these are used."""
    for old in [p for p in _own(module).values() if p.is_meta]:
        fresh = nn.Parameter(torch.empty_like(old, device="cpu"), requires_grad=old.requires_grad)
        for site in sites_of(model).values():
            if site.parameter is old:
                site.module._parameters[site.attribute] = fresh
        for part in parts:
            for name, parameter in part.parameters.items():
                if parameter is old:
                    part.parameters[name] = fresh
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[name] = torch.empty_like(buffer, device="cpu")


def _initialize(
    name: str,
    module: nn.Module,
    drawn: set[nn.Parameter],
    initialize: Initialize | None,
    rank: int,
) -> None:
    """Give them values. What another module has initialized, and this one shares, keeps its own."""
    ask = getattr(module, "reset_parameters", None)
    if initialize is None and not callable(ask):
        raise MisuseError(
            f"rank {rank}: FSDP: {name or 'the model'} ({type(module).__name__}) has parameters or "
            "buffers of its own on the meta device, and no reset_parameters() to give them values: "
            "write one, or pass initialize=, a function of a module",
            rank=rank,
            op="FSDP",
        )
    shared = {attribute: p for attribute, p in _own(module).items() if p in drawn}
    for attribute, parameter in shared.items():  # the numbers are drawn all the same
        module._parameters[attribute] = nn.Parameter(torch.empty_like(parameter))
    if initialize is not None:
        initialize(module)
    elif callable(ask):
        ask()
    module._parameters.update(shared)
    drawn.update(_own(module).values())
