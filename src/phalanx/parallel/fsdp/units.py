"""Units: the parts of a model that are gathered, freed and reduced together.

Model                    unit ""        everything that is in no other unit
├── embed                unit embed
└── blocks (ModuleList)
    ├── 0                unit blocks.0
    └── 1                unit blocks.1
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from phalanx.errors import MisuseError

if TYPE_CHECKING:
    from typing import TypeAlias

    Kind: TypeAlias = type[nn.Module]
    UnitRule: TypeAlias = (
        Kind | tuple[Kind, ...] | set[Kind] | frozenset[Kind] | Callable[[nn.Module], bool]
    )


class Site(NamedTuple):
    """A place of the model in which a parameter is."""

    module: nn.Module
    attribute: str
    parameter: nn.Parameter


@dataclass
class Part:
    """The module of a unit, and its own parameters, by the names that they have in the model."""

    name: str
    module: nn.Module
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)


def sites_of(module: nn.Module) -> dict[str, Site]:
    """All places of parameters, those that share one included, by name."""
    return {
        f"{prefix}.{attribute}" if prefix else attribute: Site(owner, attribute, parameter)
        for prefix, owner in module.named_modules(remove_duplicate=False)
        for attribute, parameter in owner._parameters.items()
        if parameter is not None
    }


def cut(module: nn.Module, rule: UnitRule | None) -> list[Part]:
    """The units of a model, itself first; each parameter is in one.

    A parameter is in the innermost unit around it; one that several modules share, in the innermost
    unit around all of them. Raises `MisuseError` for a rule that fits no module, or one that is
    never called, such as an `nn.ModuleList`.
    """
    modules = dict(module.named_modules())
    chosen = _children(module) if rule is None else _fitting(modules, rule)
    parts = {name: Part(name, modules[name]) for name in ["", *chosen]}
    around: dict[nn.Parameter, list[list[nn.Module]]] = {}
    names: dict[nn.Parameter, str] = {}
    for name, site in sites_of(module).items():
        names.setdefault(site.parameter, name)
        around.setdefault(site.parameter, []).append(_on_the_way(module, name))
    units = {part.module: part for part in parts.values()}
    for parameter, ways in around.items():
        innermost = next(m for m in reversed(ways[0]) if m in units and all(m in w for w in ways))
        units[innermost].parameters[names[parameter]] = parameter
    return list(parts.values())


def _on_the_way(model: nn.Module, name: str) -> list[nn.Module]:
    """The modules around a place, from the model to the one that has it."""
    way = [model]
    for step in name.split(".")[:-1]:
        way.append(way[-1].get_submodule(step))
    return way


def _children(module: nn.Module, prefix: str = "") -> list[str]:
    """The direct children that have parameters; of one that is only a list, its members."""
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
    if isinstance(rule, type):
        return lambda module: isinstance(module, rule)
    if isinstance(rule, Iterable):
        kinds = tuple(rule)
        if kinds and all(isinstance(kind, type) for kind in kinds):
            return lambda module: isinstance(module, kinds)
    elif callable(rule):
        return rule
    raise TypeError(
        f"unit is a class of modules, several of them, or a function of a module, not {rule!r}"
    )


def _is_called(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward
