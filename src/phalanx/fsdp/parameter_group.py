"""A unit: the parameters that are gathered, used, freed and reduced together.

      freed ----gather----> on its way ----wait----> present ----free----> freed

and in a backward pass its gradients:  put, put, ... all in: reduce -> means of this rank's shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakSet

from torch import nn

from phalanx.errors import MisuseError
from phalanx.fsdp.flat_param import Flat
from phalanx.fsdp.gradients import Gradients
from phalanx.fsdp.unsharded import Presence, Whole

if TYPE_CHECKING:
    from typing import TypeAlias


class Call:
    """One forward pass of a unit, for its backward pass.

    epoch    of the parameters that it has read
    earlier  the units that were called before it in its pass, the last one first
    outer    the call of a unit around it, in which it was made
    through  the numbers of outputs by which the backward pass under way has come in
    spent    those by which one came in that did not keep the graph
    inputs   how many of its inputs a backward pass has still to reach; -1: nobody knows
    """

    __slots__ = (
        *("__weakref__", "earlier", "epoch", "inputs", "outer", "spent", "through", "unit"),
    )

    def __init__(self, unit: Unit, epoch: int, earlier: Sequence[Unit], outer: Call | None) -> None:
        self.unit = unit
        self.epoch = epoch
        self.earlier = earlier
        self.outer = outer
        self.through: set[int] = set()
        self.spent: set[int] = set()
        self.inputs = -1


class Unit:
    """One unit on this rank.

    name       of its module in the model; "" is the model itself
    surrounds  whether there are other units inside it
    waiting    calls that no backward pass has come to, as long as their graph is there
    reached    calls that the backward pass under way has come to, and whose inputs it has not
    touched    whether the backward pass under way has come to it
    reduced    whether its gradients are, or are on their way
    finished   whether that pass is thought to have no more to do here
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        flats: list[Flat],
        gradients: list[Gradients],
        presence: Presence,
    ) -> None:
        self.name = name
        self.module = module
        self.flats = flats
        self.surrounds = False
        self.waiting: WeakSet[Call] = WeakSet()
        self.reached: set[Call] = set()
        self.touched = self.reduced = self.finished = False
        self._gradients = gradients
        self.presence = presence
        self._awaited = self._trained = 0

    def is_around(self, other: Unit) -> bool:
        """Whether the other one is inside this one."""
        return other is not self and (not self.name or other.name.startswith(f"{self.name}."))

    @property
    def title(self) -> str:
        """For messages."""
        return self.name or "the model itself"

    # Parameters -----------------------------------------------------------------------------

    def begin_gather(self) -> None:
        """Let the full parameters come, if they are not here."""
        for number, flat in enumerate(self.flats):
            flat.begin_gather(f"FSDP gathers {self.title}, {number}")

    def gather(self) -> None:
        """See to it that they are here."""
        self.begin_gather()
        for flat in self.flats:
            flat.finish_gather()
        self.presence.now = True

    def free(self) -> None:
        """They are not needed now."""
        self.presence.now = False
        for flat in self.flats:
            flat.free()

    # Gradients ------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """A backward pass has come to this unit."""
        if not self.touched:
            self.touched = True
            self._awaited = self._trained = sum(len(flat.trainable()) for flat in self.flats)

    @property
    def has_frozen(self) -> bool:
        """Whether some parameters need no gradients, so that gradients do not tell of the end."""
        return any(not p.requires_grad for flat in self.flats for p in flat.parameters)

    @property
    def owes(self) -> bool:
        """Whether the other ranks may wait for gradients of this one."""
        return (
            (self.touched and not self.reduced)
            or any(g.begun for g in self._gradients)
            or any(whole.grad is not None for flat in self.flats for whole in flat.wholes)
        )

    def drop_accumulated(self) -> None:
        """Gradients of full parameters are not wanted any more."""
        for flat in self.flats:
            for whole in flat.wholes:
                whole.grad = None

    def count(self) -> bool:
        """A parameter's gradient is complete on this rank; True if it is the last one."""
        self._awaited -= 1
        if self._awaited:
            return False
        self._awaited = self._trained  # a reentrant checkpoint may bring all of them once more
        return True

    def put(self, flat: int, number: int) -> None:
        """Take that gradient in."""
        self._gradients[flat].put(number)

    def reduce(self) -> None:
        """Begin to average with the other ranks what is in, and zeros for what is not."""
        self.reduced = True
        for number, (flat, gradients) in enumerate(zip(self.flats, self._gradients, strict=True)):
            gradients.put_rest()
            if flat.trainable():
                gradients.reduce(f"FSDP reduces {self.title}, {number}")

    def finish_scattering(self) -> None:
        """Wait until memory for full gradients is free again."""
        for number, gradients in enumerate(self._gradients):
            gradients.finish_scattering(f"FSDP averages {self.title}, {number}")

    def finish(self) -> None:
        """Wait until this rank has its means."""
        for number, gradients in enumerate(self._gradients):
            gradients.finish(f"FSDP averages {self.title}, {number}")

    def came(self) -> list[bool]:
        """For each parameter, whether it had a gradient on this rank, or has a mean now."""
        return [
            gradients.came(number)
            for flat, gradients in zip(self.flats, self._gradients, strict=True)
            for number in range(len(flat.parameters))
        ]

    @property
    def finite(self) -> bool:
        """Whether all means are."""
        return all(gradients.finite for gradients in self._gradients)

    @property
    def bytes_sent(self) -> int:
        """Of its gradients, by this rank so far, but for what was compressed."""
        return sum(gradients.bytes_sent for gradients in self._gradients)

    def give(self, used: list[bool]) -> None:
        """Means become the parameters' gradients."""
        start = 0
        for flat, gradients in zip(self.flats, self._gradients, strict=True):
            stop = start + len(flat.parameters)
            gradients.give({n for n, any_rank in enumerate(used[start:stop]) if any_rank})
            start = stop

    def end_backward(self) -> None:
        """The pass is over."""
        self.touched = self.reduced = self.finished = False
        self.reached.clear()

    def forget(self) -> None:
        """The pass has failed: drop what is there of it."""
        self.end_backward()
        for gradients in self._gradients:
            gradients.forget()


# ------------------------------------------------------------------------------
# Units: the parts of a model that are gathered, freed and reduced together.
#
# Model                    unit ""        everything that is in no other unit
# ├── embed                unit embed
# └── blocks (ModuleList)
#     ├── 0                unit blocks.0
#     └── 1                unit blocks.1

if TYPE_CHECKING:
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


# ------------------------------------------------------------------------------
# The places of a model where parameters are: the shards to look at, full ones to compute with.
#
# A module has its parameters in a dictionary that is asked only for what is not among its plain
# attributes. So a full parameter that is one stands in for the shard, which stays where it is:
# names, `parameters()` and the optimizer never see anything else.


class _Place(NamedTuple):
    name: str
    module: nn.Module
    attribute: str
    parameter: nn.Parameter
    whole: Whole
    address: int  # of the shard, which the parameter is a view of


class Sites:
    """All places of one model, on one rank."""

    def __init__(
        self, sites: Mapping[str, Site], wholes: Mapping[nn.Parameter, Whole], rank: int
    ) -> None:
        self._places = [
            _Place(
                *(name, site.module, site.attribute, site.parameter, wholes[site.parameter]),
                site.parameter.data_ptr(),
            )
            for name, site in sites.items()
        ]
        self._rank = rank
        # They hold a list of their parameters besides.
        self._recurrent = [m for m in {p.module for p in self._places} if isinstance(m, nn.RNNBase)]

    def show(self) -> None:
        """Let modules compute with full parameters. `MisuseError` if one was replaced.

        They need gradients if the shards do now.
        """
        for place in self._places:
            module, parameter = place.module, place.parameter
            if (
                module._parameters.get(place.attribute) is not parameter
                or parameter.data_ptr() != place.address
            ):
                self._refuse(place)
            if parameter.requires_grad is not place.whole.requires_grad:
                place.whole.requires_grad_(parameter.requires_grad)
            place.module.__dict__[place.attribute] = place.whole
        self._list_again()

    def hide(self) -> None:
        """Let everybody see shards."""
        for place in self._places:
            place.module.__dict__.pop(place.attribute, None)
        self._list_again()

    @contextmanager
    def shown(self, units: Sequence[Unit]) -> Iterator[None]:
        """Show full parameters of all units, which are there."""
        self.show()
        for unit in units:
            unit.presence.now = True
        try:
            yield
        finally:
            for unit in units:
                unit.presence.now = False
            self.hide()

    def check_complete(self, module: nn.Module) -> None:
        """Raise `MisuseError` for parameters that came after the model was cut."""
        known = {place.parameter for place in self._places}
        late = [name for name, p in module.named_parameters() if p not in known]
        for place in self._places:
            if place.name in late:
                self._refuse(place)
        if late:
            raise MisuseError(
                f"rank {self._rank}: FSDP: {', '.join(late)} came to the module after FSDP was "
                "built, and would be on each rank by itself: build it when the module is complete",
                rank=self._rank,
                op="FSDP",
            )

    def _list_again(self) -> None:
        for module in self._recurrent:
            names: Sequence[str] = module._flat_weights_names
            module._flat_weights = [getattr(module, name, None) for name in names]

    def _refuse(self, place: _Place) -> None:
        self.hide()
        raise MisuseError(
            f"rank {self._rank}: FSDP: the parameter {place.name} was replaced after FSDP was "
            "built, or its .data was (as by .half() or .double()), so it is no shard any more: "
            "change values with load_state_dict or summon_full_params, or build FSDP after the "
            "change",
            rank=self._rank,
            op="FSDP",
        )
