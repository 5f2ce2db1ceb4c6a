"""A parameter group: the parameters that are unsharded, used, resharded and reduced together.

    model                    group ""        everything that is in no other group
    ├── embed                group embed
    └── blocks (ModuleList)
        ├── 0                group blocks.0
        └── 1                group blocks.1

What state its parameters are in is drawn in `unsharded.py`, what becomes of its gradients in
`gradients.py`. When all this happens is decided in `runtime.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias
from weakref import WeakSet

import torch
from torch import nn

from phalanx.errors import MisuseError
from phalanx.fsdp.flat_param import FlatParameter, ShardingPlan
from phalanx.fsdp.gradients import CompressedReduction, FlatGradient
from phalanx.fsdp.unsharded import UnshardState, registrations

Kind: TypeAlias = type[nn.Module]
UnitRule: TypeAlias = (
    Kind | tuple[Kind, ...] | set[Kind] | frozenset[Kind] | Callable[[nn.Module], bool]
)


@dataclass(eq=False)
class ForwardCall:
    """One forward pass of a group's module, for its backward pass.

    forward   the number of the model's forward pass, or of the last one
    epoch     the write epoch whose parameters it has read
    earlier   the groups that were called before it in its pass, the last one first
    outer     the call of a group around it, in which it was made
    entered   the numbers of outputs by which the backward pass under way has come to it
    spent     those by which one came that did not keep the graph
    kept      whether one came that did
    inputs    how many of its inputs a backward pass has still to reach; -1: nobody knows
    """

    group: ParameterGroup
    forward: int
    epoch: int
    earlier: Sequence[ParameterGroup]
    outer: ForwardCall | None
    entered: set[int] = field(default_factory=set)
    spent: set[int] = field(default_factory=set)
    kept: bool = False
    inputs: int = -1


class ParameterGroup:
    """One parameter group on this rank.

    name           of its module in the model; "" is the model itself
    title          the name, for messages
    flats          its flat parameters, one for each dtype, device and requires_grad
    gradients      the gradients of each of these
    state          sharded, unsharding, unsharded or summoned
    surrounds      whether there are other groups inside it
    waiting        calls that no backward pass has come to, as long as their graph is there
    open_calls     calls that the backward pass under way has come to, and whose inputs it has not
    in_backward    whether the backward pass under way has come to it
    reduced        whether its gradients are reduced in this pass, or being so
    finished       whether that pass is thought to have no more to do here
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        plan: ShardingPlan,
        compression: CompressedReduction | None,
    ) -> None:
        self.name = name
        self.title = name or "the model itself"
        self.module = module
        self.state = UnshardState(self.title)
        plans = plan, plan._replace(precision=None)
        norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        exact = {p for norm in norms for p in norm.parameters() if plan.precision is not None}
        alike: dict[tuple[torch.dtype, torch.device, bool, bool], dict[str, nn.Parameter]] = {}
        for of, p in parameters.items():
            alike.setdefault((p.dtype, p.device, p.requires_grad, p in exact), {})[of] = p
        self.flats = [
            FlatParameter(some, f"{self.title}, {number}", self.state, plans[of_norms])
            for number, ((*_, of_norms), some) in enumerate(alike.items())
        ]
        self.gradients = [FlatGradient(flat, compression) for flat in self.flats]
        self.surrounds = False
        self.waiting: WeakSet[ForwardCall] = WeakSet()
        self.open_calls: set[ForwardCall] = set()
        self.in_backward = self.reduced = self.finished = False
        self._trained = 0
        self._arrived: set[tuple[FlatGradient, int]] = set()

    def is_around(self, other: ParameterGroup) -> bool:
        """Whether the other one is inside this one."""
        return other is not self and (not self.name or other.name.startswith(f"{self.name}."))

    # Parameters -----------------------------------------------------------------------------

    def unshard(self) -> None:
        """Begin to unshard the parameters, if that has not begun."""
        if self.state.now != "UNSHARDED":  # summoned, too: autograd may have saved views of them
            self.state.after("unshard")
            for flat in self.flats:
                flat.unshard()

    def wait_for_unshard(self) -> None:
        """Wait until they are unsharded."""
        for flat in self.flats:
            flat.wait_for_unshard()
        self.state.after("wait")

    def reshard(self) -> None:
        """The unsharded parameters are not needed now."""
        if self.state.now != "SHARDED":
            self.state.after("reshard")
            for flat in self.flats:
                flat.reshard()

    # A backward pass ------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """A backward pass has come to this group."""
        if not self.in_backward:
            self.in_backward = True
            self._trained = sum(p.requires_grad for flat in self.flats for p in flat.parameters)
            self._arrived.clear()

    def count_gradient(self, gradient: FlatGradient, number: int) -> bool:
        """A parameter's gradient is complete on this rank; True if it is the last one.

        Reentrant checkpoints may bring some of them several times, and all of them once more.
        """
        self._arrived.add((gradient, number))
        if len(self._arrived) < self._trained:
            return False
        self._arrived.clear()
        return True

    @property
    def has_frozen(self) -> bool:
        """Whether some parameters get no gradients, so that gradients do not tell of the end."""
        return any(not p.requires_grad for flat in self.flats for p in flat.parameters)

    @property
    def owes(self) -> bool:
        """Whether the other ranks may wait for gradients of this one."""
        return (self.in_backward and not self.reduced) or any(g.owes for g in self.gradients)

    def end_backward(self) -> None:
        """The pass is over."""
        self.in_backward = self.reduced = self.finished = False
        self.open_calls.clear()


# How a model is cut into groups -----------------------------------------------------------------

Cuts = dict[str, dict[str, nn.Parameter]]
"""The names of the modules that are groups; of each its parameters, by their names in the model."""


def cut(model: nn.Module, rule: UnitRule | None) -> Cuts:
    """The groups of a model, that of the model itself first; each parameter is in one.

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
