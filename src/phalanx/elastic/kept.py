"""What an elastic job keeps: models, optimizers, and other objects with a state.

In the block of step N a rank comes to a version of the state, or is between two:

    version N       no optimizer has stepped. What else has changed can be put back: of that a copy
                    was made at the block's start
    None            an optimizer has stepped, and the block is not over
    version N + 1   the block is over; the vote says whether the step counts
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, NoReturn, Protocol, runtime_checkable

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from xxhash import xxh3_64_intdigest

from phalanx.checkpoint.manifest import Json, first_difference, to_json
from phalanx.checkpoint.save_plan import RankDescription, installed_version
from phalanx.checkpoint.state import model_state, wrappers_of
from phalanx.collectives import all_gather_object
from phalanx.core.backend import Backend
from phalanx.core.replaceable import ReplaceableBackend
from phalanx.elastic.batches import Batches
from phalanx.elastic.moves import Holding, holding
from phalanx.elastic.undo import Buffer, ExtraState, Parameters
from phalanx.elastic.versions import KeptPart, part_of
from phalanx.errors import DesyncError, MisuseError, UnsupportedOperationError
from phalanx.fsdp import FSDP
from phalanx.optim.sharded import ShardedOptimizer, options_of
from phalanx.parallel.local_sgd.periodic import PeriodicSync
from phalanx.parallel.wrapper import Wrapper, is_wrapped
from phalanx.torch_internals import forget_unscaled

_FIXED = Tensor, int, float, str  # what is the same object has the same value, or is a tensor


@runtime_checkable
class Stateful(Protocol):
    """An object whose state is kept: a learning rate schedule, a gradient scaler."""

    def state_dict(self) -> Any:
        """Return the state, of the kinds that a checkpoint's `extra` takes."""

    def load_state_dict(self, state: Any) -> object:
        """Go on from a state."""


class _Values(NamedTuple):
    """What is kept and is no tensor. `others` and `trained` are the `extra` of a description.

    others    the states of objects that are neither modules nor optimizers
    options   of each group of each optimizer
    trained   `requires_grad` of each parameter
    """

    others: Json
    options: dict[str, Json]
    trained: list[bool]


class Kept:
    """The kept objects of one rank.

    version      of the state as it is now; None in the middle of a step, and while it is taken
    uncuttable   what an optimizer keeps for the shard that it was made for, in words; or ""
    """

    def __init__(self, backend: ReplaceableBackend) -> None:
        self.version: int | None = 0
        self.uncuttable = ""
        self._backend = backend
        self._modules: dict[str, nn.Module] = {}
        self._optimizers: dict[str, Optimizer] = {}
        self._others: dict[str, Stateful] = {}
        self._buffers: list[Buffer | ExtraState] = []
        self._absent: list[tuple[dict[str, Tensor | None], str]] = []  # buffers that are None
        self._modes: list[tuple[nn.Module, bool]] = []  # `training` of modules at the block's start
        self._varies = False  # wrappers or modules have a state of new tensors and values each time
        self._is_spread = False  # no rank has all, whatever buffers do
        self._noted: _Values | None = None
        self._sizes: list[list[int]] = []  # of the optimizers' groups
        self._begun_at: int | None = None  # the version of the block's start
        self._stepped_at = -1  # collectives that were over then; -1: no optimizer has stepped
        self._part: tuple[list[object], KeptPart] | None = None

    # What is kept -----------------------------------------------------------------------------

    def add(self, objects: Mapping[str, object]) -> None:
        """Keep these, too, by names that are the same on every rank; see `Elastic.keep`."""
        for name, each in objects.items():
            if name in {**self._modules, **self._optimizers, **self._others}:
                self._refuse(f"something is kept as {name!r} already")
            if isinstance(each, nn.Module):
                self._check_module(name, each)
                self._modules[name] = each
            elif isinstance(each, Optimizer):
                self._optimizers[name] = each
            elif isinstance(each, Stateful):
                self._others[name] = each
            else:
                raise TypeError(
                    f"keep({name}=...) takes modules, optimizers, and objects with state_dict and "
                    f"load_state_dict; {type(each).__name__} has none"
                )

    @cached_property
    def model(self) -> nn.Module:
        """All kept modules as one, when all are kept."""
        if len(self._modules) == 1:
            return next(iter(self._modules.values()))
        return nn.ModuleDict(self._modules)

    @cached_property
    def parameters(self) -> Parameters:
        """The parameters of all modules."""
        return Parameters([*self.model.parameters()])

    @cached_property
    def wrappers(self) -> list[Wrapper]:
        """The wrappers of the modules."""
        return list(wrappers_of(self.model).values())

    @property
    def optimizers(self) -> list[Optimizer]:
        """The kept optimizers, in the order in which they came."""
        return list(self._optimizers.values())

    @property
    def has_modules(self) -> bool:
        """True if a module is kept."""
        return bool(self._modules)

    @property
    def multiple(self) -> int:
        """The number of ranks is to be a multiple of this: of `hybrid`'s shard groups."""
        sizes = [
            wrapper.strategy.group_size or 1
            for wrapper in self.wrappers
            if isinstance(wrapper, FSDP)
        ]
        return max(sizes, default=1)

    def check_wrapped(self) -> None:
        """Raise `MisuseError` if the wrapper of a kept parameter is not kept."""
        inside = {id(each) for wrapper in self.wrappers for each in wrapper.parameters()}
        for name, parameter in self.model.named_parameters():
            if id(parameter) not in inside and is_wrapped(parameter):
                self._refuse(
                    f"{name} belongs to a wrapper, such as DDP, which is not kept: keep that, and "
                    "not the module in it"
                )

    def lines(self) -> list[str]:
        """Return what has to be the same on all ranks, before the first generation."""
        model, lines = self.model, [f"phalanx {installed_version()}"]
        lines.append(f"{len([*model.modules()])} modules")
        for name, wrapper in wrappers_of(model).items():
            strategy = getattr(wrapper, "strategy", "")
            lines.append(f"wrapper {name}: {type(wrapper).__name__} {strategy}".rstrip())
        held = model_state(model)
        for name, shard in (*held.parameters.items(), *held.buffers.items()):
            dtype = str(shard.tensor.dtype).removeprefix("torch.")
            lines.append(f"{name}: {dtype} {list(shard.slice.shape)}")
        for name, optimizer in self._optimizers.items():
            sizes = _sizes_of_groups(optimizer)
            kind = optimizer.inner if isinstance(optimizer, ShardedOptimizer) else optimizer
            lines.append(f"optimizer {name}: {type(kind).__name__}, groups of {sizes} parameters")
        for name, each in self._others.items():
            identity = each.identity() if isinstance(each, Batches) else ""
            lines.append(f"{name}: {type(each).__name__} {identity}".rstrip())
        return lines

    # A step's block ---------------------------------------------------------------------------

    def begin_generation(self, version: int) -> None:
        """Note the state that a generation begins with, to see later what has changed."""
        model, self.version, self._begun_at = self.model, version, None
        self._sizes = [*map(_sizes_of_groups, self.optimizers)]
        self.parameters.note()
        self._buffers, self._absent = [], []
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    self._buffers.append(Buffer(module, name))
                elif name not in module._non_persistent_buffers_set:
                    self._absent.append((module._buffers, name))
        extra = [ExtraState(module) for module in model_state(model).stateful.values()]
        self._buffers += extra
        self._modes = [(each, each.training) for each in model.modules()]
        self._part, self._noted = None, self._values()
        own = any(each.compression or each.optimizers_apart for each in self.wrappers)
        self._varies = own or bool(extra)
        cut = any(each.all_slices()[1] is not None for each in self.wrappers)
        sharded = any(isinstance(each, ShardedOptimizer) for each in self.optimizers)
        self._is_spread = own or cut or sharded

    def begin_block(self) -> None:
        """Note the state before a step. `MisuseError` if it changed since the last one's end."""
        changed = self.parameters.have_changed()
        if changed or self._noted != self._values():
            what = "an optimizer's options, a kept state or requires_grad have"
            self._refuse(
                f"{'a parameter has' if changed else what} changed before the block of step "
                f"{self.version}. What is changed between two blocks is part of no step, and lost "
                "when ranks go back to one: change it inside of `with step:`"
            )
        self._modes = [(each, each.training) for each, _ in self._modes]
        for buffer in self._buffers:
            buffer.note()
        self.parameters.begin_block()
        self._begun_at, self._stepped_at = self.version, -1

    def end_block(self) -> bool:
        """Take the step as taken. Return whether a collective has followed an optimizer's step: a
        rank may then be lost while all others are between two versions.
        """
        for wrapper in self.wrappers:
            if isinstance(wrapper, PeriodicSync) and wrapper.between_syncs:
                self._refuse(
                    f"the block of step {self._begun_at} ended between two syncs of "
                    f"{type(wrapper).__name__}, with other parameters on each rank: let it have a "
                    "whole number of periods, or, with compression= always, call sync() at its end"
                )
        self._check_forms()
        assert self._begun_at is not None
        self.version = self._begun_at + 1
        self.parameters.end_block()
        for buffer in self._buffers:
            buffer.end_block()
        self._noted = self._values()
        return 0 <= self._stepped_at < self._backend.finished

    def _check_forms(self) -> None:
        """Raise `MisuseError` if the state has a form by now that a newcomer's has not."""
        if [*map(_sizes_of_groups, self.optimizers)] != self._sizes:
            self._refuse(
                f"an optimizer's groups of parameters changed in the block of step "
                f"{self._begun_at}: those of a newcomer would be the ones from before. Give it all "
                "parameters before steps(), and freeze some until they are to be trained "
                "(requires_grad=False)"
            )
        come = (name for of, name in self._absent if of[name] is not None)
        changed = (each.changed_shape() for each in self._buffers)
        if found := next(filter(None, (*come, *changed)), ""):
            self._refuse(
                f"the buffer {found} came, or got another shape, in the block of step "
                f"{self._begun_at}: a newcomer's is as the module makes it. Register it in its "
                "final shape, or, if it need not be saved, with persistent=False"
            )

    def undo_block(self) -> None:
        """Go back to the block's start if no optimizer has stepped; else the version is None."""
        if self._begun_at is not None and self.version != self._begun_at + 1:
            for module, training in self._modes:
                module.training = training
        if self.version != self._begun_at or self.version is None:
            return
        compressed = any(each.compression for each in self.wrappers)
        if compressed or not self.parameters.put_back():
            self.version = None
            return
        for buffer in self._buffers:
            buffer.put_back()

    def before_step(self, optimizer: Optimizer) -> None:
        """Note that an optimizer steps; `MisuseError` if it is not kept, and trains what is."""
        if optimizer in self.optimizers:
            if self._stepped_at < 0:
                self._stepped_at = self._backend.finished
                self.parameters.before_step()
            if self.version == self._begun_at:
                self.version = None
            return
        inner = [each.inner for each in self.optimizers if isinstance(each, ShardedOptimizer)]
        given = {id(each) for group in optimizer.param_groups for each in group["params"]}
        if optimizer not in inner and any(id(each) in given for each in self.parameters.all):
            self._refuse(
                f"an optimizer ({type(optimizer).__name__}) that is not kept trains a kept module: "
                "its state would be lost with a rank, and differ on a newcomer. Keep it, too: "
                "job.keep(..., optimizer=optimizer)"
            )

    # The state --------------------------------------------------------------------------------

    def holding(self) -> Holding:
        """Return the state as it is after the last step, or, if clean, before this one."""
        found = holding(self._backend.rank, self.model, self.optimizers)
        self._put_noted(found.parts)
        return found

    def is_whole(self, rank: int | None = None) -> bool:
        """Return whether this rank could write the whole checkpoint; without `rank`, each could."""
        moved = rank != 0 and any(each.counts and each.has_moved() for each in self._buffers)
        return not (self._is_spread or moved)

    def part(self) -> KeptPart:
        """Return what this rank writes of the state into a version."""
        values: list[object] = [*self.model.buffers()]
        for optimizer in self.optimizers:
            for of in optimizer.state.values():
                values += of.values() if isinstance(of, dict) else [of]
        known = self._part
        same = known is not None and len(known[0]) == len(values) and not self._varies
        if known is None or not same or any(a is not b for a, b in zip(known[0], values)):  # noqa: B905
            made, cut = self.holding(), self._cut()
            self.uncuttable = self._find_uncuttable(made, cut)
            if not all(isinstance(each, _FIXED) for each in values):
                values = []  # such as a list, which may be the same one and have changed
            known = values, part_of(made, self._backend.world_size, self._replicated(made, cut))
            self._part = known
        self._put_noted(known[1].parts)
        return known[1]

    def _put_noted(self, parts: Sequence[RankDescription]) -> None:
        """Put into descriptions the values and options of the version: they may have changed."""
        if self._noted is None:
            return
        parts[0].extra = [self._noted.others, self._noted.trained]
        for part, groups in zip(parts, self._noted.options.values(), strict=False):
            if part.optimizer is not None:
                described = zip(part.optimizer.groups, groups, strict=True)
                new = [replace(group, options=given) for group, given in described]
                part.optimizer = replace(part.optimizer, groups=new)

    def load_values(self, values: Any) -> None:
        """Give the other objects the state that `move` has brought, or a checkpoint."""
        for name, state in (values or {}).items():
            each = self._others[name]
            each.load_state_dict(state)
            if isinstance(each, torch.amp.GradScaler):  # the step may have ended before its update
                forget_unscaled(each)

    def values(self) -> dict[str, Any]:
        """Return the state of the other objects."""
        return {name: each.state_dict() for name, each in self._others.items()}

    def regrouped(self, given: Sequence[Holding]) -> None:
        """Make anew what depends on ranks; gradients do not outlive a generation.

        given   what this rank gives of the version to come

        Every rank calls it. A step may have frozen layers before a newcomer came: which parameters
        are trained is as in that version, and `training` as on a rank that gives it.
        """
        extra: Any = given[0].parts[0].extra if given else None
        modules = [*self.model.modules()]
        trained = extra[1] if extra else self._trained()
        mine = extra is not None, trained, [each.training for each in modules]
        told: list[Any] = all_gather_object(mine, self._backend)
        _, trained, training = next((each for each in told if each[0]), told[0])
        for module, mode in zip(modules, training, strict=True):
            module.training = mode
        for parameter, requires_grad in zip(self.parameters.all, trained, strict=True):
            parameter.requires_grad = requires_grad
            parameter.grad = None
        for wrapper in self.wrappers:
            wrapper.regrouped()
        for optimizer in self.optimizers:
            if isinstance(optimizer, ShardedOptimizer):
                optimizer.regrouped()

    def _trained(self) -> list[bool]:
        return [each.requires_grad for each in self.parameters.all]

    def _values(self) -> _Values:
        """Return the values as they are now."""

        def keep(tensor: Tensor, path: str) -> str:
            self._refuse(
                f"{path} is a tensor. A kept object's state, but for modules and optimizers, is "
                "numbers and text, and so are an optimizer's options: keep it in a module's buffer"
            )

        options = {
            name: [to_json(options_of(group), name, keep) for group in optimizer.param_groups]
            for name, optimizer in self._optimizers.items()
        }
        return _Values(to_json(self.values(), "keep", keep), options, self._trained())

    def digest(self) -> int:
        """Return a hash of the values, which all ranks have alike at a block's end."""
        return xxh3_64_intdigest(msgspec.json.encode(self._noted, order="deterministic")) >> 1

    def check_alike(self) -> None:
        """Raise `DesyncError` on all ranks if what they keep differs, and not only in the last
        digits; every rank calls it.
        """
        assert self._noted is not None
        others, options, trained = self._noted
        names = [name for name, _ in self.model.named_parameters()]
        mine = {**others, **options, "requires_grad": dict(zip(names, trained, strict=True))}
        told = all_gather_object(mine, self._backend, label="what differs between ranks")
        for rank, theirs in enumerate(told):
            if found := first_difference(told[0], theirs):
                here, there = found
                raise DesyncError(
                    f"rank {self._backend.rank}: what is kept differs between ranks after the "
                    f"block of step {self._begun_at}: rank 0 has {here}, and rank {rank} {there}. "
                    "On every rank optimizers have the same options, kept objects the same state, "
                    "and parameters the same requires_grad. Is a learning rate schedule not kept, "
                    "or are these computed from what one rank alone has?",
                    rank=self._backend.rank,
                    peer=rank,
                )

    def _replicated(self, made: Holding, cut: set[str]) -> set[str]:
        """Return the names of tensors that all ranks hold whole, with the same values."""
        names = model_state(self.model).parameters.keys() - cut
        apart = any(wrapper.optimizers_apart for wrapper in self.wrappers)
        for optimizer, part in zip(self.optimizers, made.parts, strict=False):
            if (
                part.optimizer is not None
                and not apart
                and not isinstance(optimizer, ShardedOptimizer)
            ):
                for name in names & part.optimizer.state.keys():
                    records = part.optimizer.state[name].values()
                    names = names | {record.tensor for record in records if record.tensor}
        return names

    def _find_uncuttable(self, made: Holding, cut: set[str]) -> str:
        """Return what belongs to a shard of another number of ranks as little as to a checkpoint's:
        such as the history of L-BFGS. A `ShardedOptimizer` has whole parameters.
        """
        for optimizer, part in zip(self.optimizers, made.parts, strict=False):
            if part.optimizer is None or isinstance(optimizer, ShardedOptimizer):
                continue
            for name, state in part.optimizer.state.items():
                own = [key for key, record in state.items() if record.own]
                if own and name in cut:
                    return f"{type(optimizer).__name__}'s {own[0]} of {name}"
        return ""

    def _cut(self) -> set[str]:
        """Return the names of parameters of which each rank has a shard."""
        cut = {
            id(parameter)
            for wrapper in self.wrappers
            if wrapper.all_slices()[1] is not None
            for parameter in wrapper.parameters()
        }
        parameters = model_state(self.model).parameters
        return {name for name, each in parameters.items() if id(each.tensor) in cut}

    def _check_module(self, name: str, module: nn.Module) -> None:
        for at, each in module.named_modules():
            where = f"{name}.{at}".rstrip(".")
            backend = getattr(each, "backend", None)
            if not isinstance(backend, Backend):
                continue
            if hasattr(each, "other_parts") and not hasattr(each, "regrouped"):
                raise UnsupportedOperationError(
                    f"{where} is a {type(each).__name__}, whose ranks are not to change"
                )
            if backend is not self._backend:
                self._refuse(f"{where} is on another backend: give it the job's, job.backend")
        for wrapper in wrappers_of(module).values():
            wrapper.check_regroupable()
        for at, tensor in (*module.named_parameters(), *module.named_buffers()):
            if tensor.is_meta or is_lazy(tensor):
                where = "on the meta device" if tensor.is_meta else "not initialized"
                raise UnsupportedOperationError(
                    f"{name}.{at} is {where}: make it real before it is kept"
                )

    def _refuse(self, problem: str) -> NoReturn:
        raise MisuseError(f"rank {self._backend.rank}: {problem}", rank=self._backend.rank)


def _sizes_of_groups(optimizer: Optimizer) -> list[int]:
    """Return how many parameters each of its groups has."""
    return [len(group["params"]) for group in optimizer.param_groups]


# torch calls global hooks at the steps of all optimizers. Jobs come and go while one is called, in
# which ranks may wait for each other, so there is one hook for all jobs, which stays.


def watch_optimizers(kept: Kept, *, wanted: bool) -> None:
    """Tell a rank's kept objects of each optimizer's step from now on, or no more."""
    (_WATCHING.add if wanted else _WATCHING.discard)(kept)


def _before_step(optimizer: Optimizer, *_: object) -> None:
    for kept in list(_WATCHING):
        kept.before_step(optimizer)


_WATCHING: weakref.WeakSet[Kept] = weakref.WeakSet()
register_optimizer_step_pre_hook(_before_step)
