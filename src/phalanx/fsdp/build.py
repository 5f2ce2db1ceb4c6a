"""The construction of an FSDP: the model is cut, and gets its values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TypeAlias

import torch
from torch import nn

from phalanx.compression import Compressor
from phalanx.core.backend import Backend
from phalanx.core.replaceable import ReplaceableBackend
from phalanx.errors import MisuseError
from phalanx.fsdp.flat_param import ShardingPlan, trim_heap
from phalanx.fsdp.gradients import CompressedReduction
from phalanx.fsdp.parameter_group import ParameterGroup
from phalanx.fsdp.runtime import FsdpRuntime
from phalanx.fsdp.strategy import MixedPrecision, ShardingStrategy
from phalanx.fsdp.unsharded import registrations
from phalanx.parallel.averaging import broadcast_all_
from phalanx.parallel.guards import check_same_model, refuse
from phalanx.torch_internals import copy_hooks

Initialize = Callable[[nn.Module], None]
UnitRule: TypeAlias = type[nn.Module] | Collection[type[nn.Module]] | Callable[[nn.Module], bool]
Cuts = dict[str, dict[str, nn.Parameter]]
"""The names of the modules that are groups; of each its parameters, by their names in the model."""


def build(
    model: nn.Module,
    backend: Backend,
    *,
    strategy: ShardingStrategy,
    rule: UnitRule | None,
    precision: MixedPrecision | None,
    prefetch: int,
    initialize: Initialize | None,
    compressor: Compressor | None,
) -> FsdpRuntime:
    """Cut a model over the ranks. Every rank calls this; nothing is changed if ranks disagree."""
    if backend.world_size > 1 or not isinstance(backend, ReplaceableBackend):  # it has yet to enter
        strategy.ranks_per_copy(backend.world_size)
    cuts = cut(model, rule)
    options = {
        "strategy": strategy,
        "mixed_precision": precision,
        "prefetch": prefetch,
        "compression": compressor,
        "units": list(cuts),
    }
    check_same_model(model, backend, options, who="FSDP")
    plan = ShardingPlan.of(backend, strategy, precision)
    compression = CompressedReduction(compressor, plan) if compressor is not None else None
    made: dict[str, ParameterGroup] = {}
    for name in _with_values(model, cuts, initialize, backend.rank):
        module = model.get_submodule(name)
        made[name] = group = ParameterGroup.of(name, module, cuts, plan, compression)
        for flat in group.flats:
            flat.adopt()
    trim_heap()  # the values that the model was built with are gone
    broadcast_all_([*model.buffers()], backend, 0, label="FSDP's buffers")
    return FsdpRuntime(model, [made[name] for name in cuts], plan, compression, prefetch)


def rebuild(runtime: FsdpRuntime, model: nn.Module) -> FsdpRuntime:
    """Cut its model, which is in shards, over the ranks that its backend has now.

    Parameters are other shards then, with any contents; if an error is raised, perhaps not yet.
    """
    old = runtime.plan
    plan = ShardingPlan.of(old.world, old.strategy, old.precision)
    compression = None
    if runtime.compression is not None:
        compression = CompressedReduction(runtime.compression.compressor, plan)
    names = [group.name for group in runtime.groups]
    groups = [group.regrouped(names, plan, compression) for group in runtime.groups]
    for group in groups:
        for flat in group.flats:
            flat.move_in()
    return FsdpRuntime(model, groups, plan, compression, runtime.prefetch)


# How a model is cut into groups -----------------------------------------------------------------


def cut(model: nn.Module, rule: UnitRule | None) -> Cuts:
    """Return a model's groups, that of the model itself first; each parameter is in one.

        model                    group ""        everything that is in no other group
        ├── embed                group embed
        └── blocks (ModuleList)
            ├── 0                group blocks.0
            └── 1                group blocks.1

    A parameter is in the innermost group around it; one that several modules share, in the
    innermost group around all of them. Raises `MisuseError` for a rule that fits no module, or one
    that is never called, such as an `nn.ModuleList`.
    """
    modules = dict(model.named_modules())
    cuts: Cuts = {"": {}}
    found = _children(model) if rule is None else _fitting(modules, rule)
    if rule is None and len(found) == 1:
        found = []  # a hull, which may call what is inside of that (as peft's models do)
    cuts |= {name: {} for name in found}
    groups = {modules[name]: parameters for name, parameters in cuts.items()}
    first: dict[nn.Parameter, str] = {}
    around: dict[nn.Parameter, list[list[nn.Module]]] = {}
    for at in registrations(model):
        path = [model]
        for step in at.name.split(".")[:-1]:
            path.append(path[-1].get_submodule(step))
        first.setdefault(at.parameter, at.name)
        around.setdefault(at.parameter, []).append(path)
    for parameter, paths in around.items():
        innermost = next(
            module
            for module in reversed(paths[0])
            if module in groups and all(module in path for path in paths)
        )
        groups[innermost][first[parameter]] = parameter
    return cuts


def _children(module: nn.Module, prefix: str = "") -> list[str]:
    """Return the direct children with parameters; of one that is only a list, its members."""
    found = []
    for name, child in module.named_children():
        if next(child.parameters(), None) is None:
            continue
        if _is_called(child):
            found.append(prefix + name)
        else:
            found += _children(child, f"{prefix}{name}.")
    return found


def _fitting(modules: dict[str, nn.Module], rule: UnitRule) -> list[str]:
    fits = _predicate(rule)
    found = [name for name, module in modules.items() if name and fits(module)]
    if not found and not fits(modules[""]):
        kinds = sorted({type(module).__name__ for module in modules.values()})
        raise MisuseError(
            f"FSDP: unit={rule!r} fits none of the model's modules, which are {', '.join(kinds)}"
        )
    for name in found:
        if not _is_called(modules[name]):
            raise MisuseError(
                f"FSDP: unit={rule!r} fits {name}, a {type(modules[name]).__name__}, which has no "
                "forward and is never called: name the modules inside it"
            )
    return found


def _predicate(rule: UnitRule) -> Callable[[nn.Module], bool]:
    if isinstance(rule, (type, Iterable)):
        kinds = (rule,) if isinstance(rule, type) else tuple(rule)
        if kinds and all(isinstance(kind, type) for kind in kinds):
            return lambda module: isinstance(module, kinds)
    elif callable(rule):
        return rule
    raise TypeError(
        f"unit is a class of modules, several of them, or a function of a module, not {rule!r}"
    )


def _is_called(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


# Models on the meta device ----------------------------------------------------------------------
#
# Modules are asked to `reset_parameters` in the order of the model, as when it is built, so they
# draw the same random numbers. A group is cut as soon as it is complete, and its full values are
# dropped. So a rank holds one full group at a time, and parameters in no smaller group.


def _with_values(
    model: nn.Module, cuts: Cuts, initialize: Initialize | None, rank: int
) -> Iterator[str]:
    """Yield each group, once its parameters have values; those on the meta device get some first.

    Raises `MisuseError` for a module that has parameters or buffers there and cannot be asked.
    """
    waiting = dict(cuts)
    yield from _take_complete(waiting)
    drawn: dict[nn.Parameter, torch.Size] = {}
    for name, module in model.named_modules():
        tensors = (*module._parameters.values(), *module._buffers.values())
        if any(tensor is not None and tensor.is_meta for tensor in tensors):
            _materialize(model, module, cuts)
            _initialize(name, module, drawn, initialize, rank)
            yield from _take_complete(waiting)


def _take_complete(waiting: Cuts) -> list[str]:
    """Remove the groups whose parameters all have values."""
    complete = [name for name, own in waiting.items() if not any(p.is_meta for p in own.values())]
    for name in complete:
        del waiting[name]
    return complete


def _materialize(model: nn.Module, module: nn.Module, cuts: Cuts) -> None:
    """Allocate a module's own parameters and buffers, and replace them in all modules."""
    for old in list(module._parameters.values()):
        if old is None or not old.is_meta:
            continue
        fresh = nn.Parameter(torch.empty_like(old, device="cpu"), requires_grad=old.requires_grad)
        vars(fresh).update(vars(old))
        copy_hooks(old, fresh, keep=lambda _: True)
        for at in registrations(model):
            if at.parameter is old:
                at.module._parameters[at.attribute] = fresh
        for parameters in cuts.values():
            parameters.update({name: fresh for name, p in parameters.items() if p is old})
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[name] = torch.empty_like(buffer, device="cpu")


def _initialize(
    name: str,
    module: nn.Module,
    drawn: dict[nn.Parameter, torch.Size],
    initialize: Initialize | None,
    rank: int,
) -> None:
    """Give them values. Those that another module has initialized, and this one shares, stay.

    drawn   initialized parameters, and their shapes: they may have been cut since
    """
    reset = getattr(module, "reset_parameters", None)
    if initialize is None and not callable(reset):
        refuse(
            "FSDP",
            rank,
            f"{name or 'the model'} ({type(module).__name__}) has parameters or buffers of its own "
            "on the meta device, and no reset_parameters() to give them values: write one, or pass "
            "initialize=, a function of a module",
        )
    own = module._parameters
    shared = {attribute: p for attribute, p in own.items() if p is not None and p in drawn}
    for attribute, parameter in shared.items():  # the numbers are drawn all the same
        own[attribute] = nn.Parameter(torch.empty(drawn[parameter], dtype=parameter.dtype))
    if initialize is not None:
        initialize(module)
    elif callable(reset):
        reset()
    own.update(shared)
    drawn.update((p, p.shape) for p in own.values() if p is not None and p not in drawn)
