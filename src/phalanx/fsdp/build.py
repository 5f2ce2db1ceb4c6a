"""How an FSDP comes to be: the model is cut, gets its values, and is given hooks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from phalanx.collectives.request import in_place
from phalanx.collectives.resolve import start
from phalanx.compression import Compressor
from phalanx.core.backend import Backend
from phalanx.errors import MisuseError
from phalanx.fsdp.flat_param import Flat, Pool, Ranks, ranks_of, trim
from phalanx.fsdp.gradients import Compression, Gradients
from phalanx.fsdp.parameter_group import Part, Sites, Unit, cut, sites_of
from phalanx.fsdp.runtime import Conductor
from phalanx.fsdp.strategy import MixedPrecision, ShardingStrategy
from phalanx.fsdp.unsharded import Presence, Whole
from phalanx.fsdp.write_epoch import Writing
from phalanx.parallel.buckets import broadcast_all_
from phalanx.parallel.guards import check_same_model

if TYPE_CHECKING:
    from phalanx.fsdp.parameter_group import UnitRule


class Built(NamedTuple):
    """The parts of an FSDP. `hooks` removes it from the module."""

    ranks: Ranks
    units: list[Unit]
    flats: list[Flat]
    writing: Writing
    conductor: Conductor
    sites: Sites
    compression: Compression | None
    hooks: Callable[[], None]


def build(
    module: nn.Module,
    backend: Backend,
    *,
    strategy: ShardingStrategy,
    rule: UnitRule | None,
    precision: MixedPrecision | None,
    prefetch: int,
    initialize: Initialize | None,
    compressor: Compressor | None,
) -> Built:
    """Cut a model over the ranks. Every rank calls this; nothing is changed if ranks disagree."""
    strategy.ranks_per_copy(backend.world_size)
    parts = cut(module, rule)
    options = {
        "strategy": strategy,
        "mixed_precision": precision,
        "prefetch": prefetch,
        "compression": compressor,
        "units": [part.name for part in parts],
    }
    check_same_model(module, backend, options, who="FSDP")
    ranks = ranks_of(backend, strategy)
    compression = Compression(compressor, ranks) if compressor is not None else None
    made: dict[str, Unit] = {}
    pool = Pool()
    for part in completed(module, parts, initialize, backend.rank):
        made[part.name] = _unit(part, ranks, pool, strategy, precision, compression)
    trim()  # the values that the model was built with are gone
    broadcast_all_([*module.buffers()], backend, 0, label="FSDP's buffers")
    units = [made[part.name] for part in parts]
    for unit in units:
        unit.surrounds = any(unit.is_around(other) for other in units)
    flats = [flat for unit in units for flat in unit.flats]
    wholes: dict[nn.Parameter, Whole] = {
        parameter: whole
        for flat in flats
        for parameter, whole in zip(flat.parameters, flat.wholes, strict=True)
    }
    sites = Sites(sites_of(module), wholes, backend.rank)
    writing = Writing(flats, ranks.shards)
    conductor = Conductor(units, sites, writing, backend, prefetch, compressor)
    hooks = _hook(units, conductor, precision)
    return Built(ranks, units, flats, writing, conductor, sites, compression, hooks)


def _unit(
    part: Part,
    ranks: Ranks,
    pool: Pool,
    strategy: ShardingStrategy,
    precision: MixedPrecision | None,
    compression: Compression | None,
) -> Unit:
    presence = Presence(part.name or "the model itself")
    kinds: dict[tuple[torch.dtype, torch.device, bool], dict[str, nn.Parameter]] = {}
    for name, p in part.parameters.items():
        kinds.setdefault((p.dtype, p.device, p.requires_grad), {})[name] = p
    flats = [
        Flat(
            alike,
            ranks,
            presence,
            pool,
            keeps_whole=strategy.keeps_whole,
            keeps_shape=strategy.name == "no_shard",
            compute_dtype=precision.compute_dtype if precision is not None else None,
        )
        for alike in kinds.values()
    ]
    for flat in flats:
        adopt(flat, ranks.world)
    reduce_dtype = precision.reduce_dtype if precision is not None else None
    gradients = [
        Gradients(
            flat, ranks, pool, reduce_dtype if flat.dtype.is_floating_point else None, compression
        )
        for flat in flats
    ]
    return Unit(part.name, part.module, flats, gradients, presence)


def _hook(
    units: list[Unit], conductor: Conductor, precision: MixedPrecision | None
) -> Callable[[], None]:
    """Tell the conductor of passes, as long as it lives; the function removes all hooks."""
    handles: list[Any] = []
    told = weakref.ref(conductor)
    for unit in units:
        handles += _hook_forward(unit, told, precision if not unit.name else None)
        for f, flat in enumerate(unit.flats):
            for n, (parameter, whole) in enumerate(zip(flat.parameters, flat.wholes, strict=True)):
                if parameter.is_floating_point() or parameter.is_complex():
                    whole.requires_grad_(True)
                    handles.append(
                        whole.register_post_accumulate_grad_hook(_came(unit, f, n, told))  # type: ignore[no-untyped-call]
                    )
                    whole.requires_grad_(parameter.requires_grad)

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


def _came(
    unit: Unit, flat: int, number: int, told: weakref.ref[Conductor]
) -> Callable[[object], None]:
    @torch.no_grad()
    def came(_: object) -> None:
        conductor = told()
        if conductor is not None:
            conductor.backward.gradient_came(unit, flat, number)

    return came


def _hook_forward(
    unit: Unit, told: weakref.ref[Conductor], precision: MixedPrecision | None
) -> list[Any]:
    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        conductor = told()
        if conductor is not None:
            conductor.begin_forward(unit)
        return precision.cast((args, kwargs)) if precision is not None else None

    def after(_: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
        conductor = told()
        if conductor is not None:
            conductor.end_forward(unit, (args, kwargs), outputs)

    return [
        # First of all, for other hooks may use parameters.
        unit.module.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
        unit.module.register_forward_hook(after, with_kwargs=True, always_call=True),
    ]


# ------------------------------------------------------------------------------
# Where the values of parameters come from: a model on the meta device gets them unit by unit.
#
# Modules are asked to `reset_parameters` in the order of the model, as when it is built, so they
# draw the same random numbers. A unit is cut as soon as it is complete, and its full values are
# dropped. So a rank holds one whole unit at a time, and what is in no smaller unit.

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
