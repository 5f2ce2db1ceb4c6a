"""How an FSDP comes to be: the model is cut, gets its values, and is given hooks."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from phalanx.backends.base import Backend
from phalanx.compression import Compressor
from phalanx.parallel.fsdp.compression import Compression
from phalanx.parallel.fsdp.conductor import Conductor
from phalanx.parallel.fsdp.flat import Flat
from phalanx.parallel.fsdp.gradients import Gradients
from phalanx.parallel.fsdp.materialize import Initialize, adopt, completed
from phalanx.parallel.fsdp.pool import Pool, trim
from phalanx.parallel.fsdp.precision import MixedPrecision
from phalanx.parallel.fsdp.ranks import Ranks, ranks_of
from phalanx.parallel.fsdp.sites import Sites
from phalanx.parallel.fsdp.strategy import ShardingStrategy
from phalanx.parallel.fsdp.unit import Unit
from phalanx.parallel.fsdp.units import Part, cut, sites_of
from phalanx.parallel.fsdp.whole import Presence, Whole
from phalanx.parallel.fsdp.writing import Writing
from phalanx.parallel.replicas import check_same_model
from phalanx.parallel.tensors import broadcast_all_

if TYPE_CHECKING:
    from phalanx.parallel.fsdp.units import UnitRule


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
