"""`Wrapper`: a module around another one, with that one's names and state dict.

Checkpoints and norms ask it for a rank's part of each parameter (`Slice`); optimizers tell it when
they write the parameters that it has claimed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from functools import cached_property, partial
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from phalanx.compression import Compressor
from phalanx.compression.compressor import check_compressor, check_floating
from phalanx.core.backend import Backend, SubBackend
from phalanx.errors import DistributedError, MisuseError, UnsupportedOperationError
from phalanx.parallel.compressor_state import (
    UNSHARDED,
    is_own_key,
    load_own,
    needed,
    own_state,
    without_own,
)
from phalanx.parallel.gradient_parts import GradientPart
from phalanx.parallel.guards import refuse
from phalanx.torch_internals import backward_number, post_accumulate_hooks

if TYPE_CHECKING:
    from typing_extensions import Self


class Wrapper(nn.Module):
    """Holds `module`; names of parameters and buffers, and the state, are the plain module's.

    backend    the ranks that have the model together
    compression   the compressor by which gradients are averaged, if there is one
    averages   whether it averages gradients. Raises `MisuseError` if a wrapper of another kind
               inside it does, too, or if one inside spreads
    spreads    whether each rank of `backend` has other modules of the model (as a pipeline's stages
               are), which may themselves be wrapped
    optimizers_apart   whether each rank's optimizer has another state for the same parameters
    shards_optimizers   whether it may have a `ShardedOptimizer`
    owners     the rank and the `owner_key` of optimizers that step on a parameter, if it has one
    made_anew   attributes that belong to this wrapper's parameters, and that `attach` makes

    `copy.deepcopy` makes a wrapper of a copy of the module, on the same backend, with the same
    options; nothing is sent.
    """

    averages: ClassVar[bool] = False
    spreads: ClassVar[bool] = False
    optimizers_apart: ClassVar[bool] = False
    shards_optimizers: ClassVar[bool] = False
    owners: Mapping[nn.Parameter, tuple[int, object]] = MappingProxyType({})
    made_anew: ClassVar[frozenset[str]] = frozenset()
    compression: Compressor | None = None
    _sharding = UNSHARDED  # of the gradients that the compressor averages

    def __init__(self, module: nn.Module, backend: Backend) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"{type(self).__name__} takes a module, then a backend, not "
                f"{type(module).__name__} and {type(backend).__name__}"
            )
        if self.averages:
            _check_only_one(module, type(self), backend.rank)
        self.module = module
        self.backend = backend
        self._to_load: dict[str, Any] = {}
        self.register_load_state_dict_pre_hook(_add_prefix)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_load_own)  # type: ignore[no-untyped-call]

    @cached_property
    def communicating(self) -> list[nn.Module]:
        """The modules in it, this one first, that have a backend. Looked up once: each step needs
        them, and by then the model is complete.
        """
        return [m for m in self.modules() if isinstance(getattr(m, "backend", None), Backend)]

    def attach(self) -> None:
        """Register this wrapper's hooks and claims with the parameters; it is new, or a copy.

        Nothing is sent: perhaps only this rank makes a copy.
        """

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copy = memo[id(self)] = type(self).__new__(type(self))
        state = self.__getstate__()  # type: ignore[no-untyped-call]
        kept = {k: value for k, value in state.items() if k not in self.made_anew}
        try:
            copy.__dict__.update(deepcopy(kept, memo))
        except TypeError as error:
            self._refuse(f"it cannot be copied: {error}", UnsupportedOperationError)
        copy.attach()
        return copy

    def regrouped(self) -> None:
        """Make anew, in place, what depends on ranks: `backend` is the same object, of another
        group now. Every rank of that calls it, when no pass runs; the last one may have failed.

        Then it is as a new wrapper of the same modules and `Parameter`s, whose passes and counters
        begin anew, without gradients, and without state of compressors. It compares nothing, for
        all ranks have the same model. Parameters, buffers and an outer optimizer keep their values;
        `own_state` is to be loaded, and a `ShardedOptimizer` is `regrouped` next. Nothing is sent,
        and nobody waits, least of all for the old group. A backward pass through outputs of DDP and
        FSDP from before is a `MisuseError`.

        Raises `UnsupportedOperationError`, with nothing changed, for `Pipeline`, parallel layers,
        another wrapper inside, layers or a wrapper on some of a backend's ranks, as on a mesh, and
        the meta device; `MisuseError` in a context of this wrapper, such as `no_sync`.
        """
        self.check_regroupable()
        self.owners = type(self).owners
        if self.compression is not None:
            self.compression.load_state_dict({})
        for parameter in self.parameters():
            parameter.grad = None

    def check_regroupable(self) -> None:
        """Raise unless `regrouped` can be right for this wrapper, as it is now."""
        layers: list[Any] = self.communicating[1:]
        cut = [each for each in layers if isinstance(each, Wrapper) or hasattr(each, "other_parts")]
        cut += [each for each in layers if each.backend is not self.backend]
        problem = ""
        if not self.averages:
            problem = "each of its ranks has other layers"
        elif isinstance(self.backend, SubBackend):
            problem = (
                "its backend is some ranks of another one, as on a mesh, and stays what it was"
            )
        elif any(tensor.is_meta for tensor in (*self.parameters(), *self.buffers())):
            problem = "it has tensors on the meta device"
        elif cut:
            problem = f"it has a {type(cut[0]).__name__}, whose ranks are not to change"
        if problem:
            text = f"regrouped(): {problem}: start all ranks again, and load a checkpoint"
            self._refuse(text, UnsupportedOperationError)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the plain module's, and `own_state`, if there is any."""
        return self._with_own(self.module.state_dict(*args, **kwargs), args, kwargs)

    def _with_own(self, state: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        state.update({prefix + key: value for key, value in self.own_state().items()})
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load into the plain module, the same on every rank. `own_state` goes to its rank."""
        plain, own = without_own(state_dict)
        result = self.module.load_state_dict(plain, *args, **kwargs)
        self.load_own_state(own)
        return result

    def own_state(self) -> dict[str, Tensor]:
        """Return this rank's state besides parameters, by keys that name the rank, so that the
        states of all ranks can be joined. Here the compressor's state:
        `compression@<rank>/<ranks>.<key>`; of `<replicas>x<shards>` ranks with FSDP's `hybrid`.
        """
        compression = self.compression
        if compression is None:
            return {}
        if compression.waits_for_step:  # in a copy the passes count: a step may yet be skipped
            compression = deepcopy(compression)
            compression.commit()
        return own_state(compression, self.backend, self._sharding)

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Go on from the joined `own_state` of all ranks that there were, of any number, and of any
        wrapper that averages; parameters are loaded already. Nothing is sent.

        For as many ranks as before, with gradients sharded alike, each needs its own only; else all
        are needed, and the sum of residuals stays the same, to a rounding. A warning in the log
        names missing ones. `SizeMismatchError` if it is of another model's parameters, ValueError
        if it is damaged; the state stays as it was then.
        """
        if self.averages:
            sizes = {name: prod(part.shape) for name, part in self.slices().items()}
            backend, sharding = self.backend, self._sharding
            load_own(self.compression, state, backend, sizes_of=sizes, sharding=sharding)

    def needs(self, keys: Iterable[str]) -> list[str]:
        """Return the keys of all ranks' joined `own_state` that `load_own_state` uses."""
        return needed(keys, self.backend, self._sharding)

    def means(self, *, timeout: float | None = None) -> Mapping[Tensor, Tensor]:
        """Return a checkpoint's values of parameters and buffers that differ by rank, by tensor.
        Every rank calls it; it waits `timeout` seconds for the others. Here there are none.
        """
        return {}

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The plain module's, under their own names."""
        return named_plainly(self.module, "_parameters", *args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """The plain module's, under their own names."""
        return named_plainly(self.module, "_buffers", *args, **kwargs)

    def slices(self) -> dict[str, Slice]:
        """Return each parameter's part in this rank's one, by its name in the plain module.

        Here all of it, in its own shape. A wrapper that splits parameters gives the elements of
        this rank's `Parameter` of that name, which is then of one dimension, and may be empty.
        """
        return {name: Slice.whole(tuple(p.shape)) for name, p in self.named_parameters()}

    def other_parts(self) -> tuple[Backend | None, Iterable[nn.Parameter]]:
        """Return the ranks, if any, with other parts of these parameters, or others instead."""
        return (self.backend if self.spreads else None), self.parameters()

    def all_slices(self) -> tuple[Backend, Mapping[nn.Parameter, Sequence[Slice]] | None]:
        """Return the ranks that have the parameters together, and of each parameter every rank's
        part; None if all have the whole.
        """
        return self.backend, None

    def deal(self, ranks: Mapping[nn.Parameter, int], key: object) -> None:
        """Let these ranks own parameters, and optimizers of this key step on them, from now on.
        Between passes; every rank calls it.
        """
        self.owners = {**self.owners, **{p: (rank, key) for p, rank in ranks.items()}}
        for parameter in ranks:
            if owner_of(parameter) is None:
                claim(parameter, self)

    def writing(self) -> AbstractContextManager[None]:
        """Write parameters in place in here, on all ranks. The context waits for their readers
        first, and shows the others the new values at its end. Here nothing has to be done.
        """
        return nullcontext()

    def before_step(self, optimizer: Optimizer) -> None:
        """Take an optimizer's step as about to write parameters that this wrapper has claimed."""
        key = getattr(optimizer, "owner_key", None)
        groups = optimizer.param_groups if self.owners else ()
        stepped = {p for group in groups for p in group["params"]} & self.owners.keys()
        for name, parameter in self.named_parameters() if stepped else ():
            if parameter in stepped and self.owners[parameter][1] is not key:
                problem = f"{type(optimizer).__name__} steps on {name}, which belongs to another "
                self._refuse(problem + "optimizer, a ShardedOptimizer: each parameter has one")
        if self.compression is not None and self.compression.waits_for_step:
            self.compression.commit()

    def after_step(self, optimizer: Optimizer) -> None:
        """Take the optimizer's step as done."""

    def after_skip(self, optimizer: Optimizer) -> None:
        """Take the optimizer's step as skipped by `GradScaler`, on all ranks."""
        if self.compression is not None:
            self.compression.rollback()

    def _check_compression(self, compression: Compressor | None) -> None:
        """Raise unless this can compress the gradients of all parameters that are trained."""
        if compression is None:
            return
        who = type(self).__name__
        check_compressor(compression, f"{who}(compression=)")
        for name, parameter in self.named_parameters():
            if parameter.requires_grad:
                check_floating(parameter, f"rank {self.backend.rank}: {who}: {name}: {compression}")

    def _refuse(self, problem: str, kind: type[DistributedError] = MisuseError) -> NoReturn:
        refuse(type(self).__name__, self.backend.rank, problem, kind)


def walk(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield a module and all in it, each with the prefix of its names in the plain model.

    A wrapper comes before the module that it holds, under the same prefix. A module that has two
    names comes twice.
    """
    yield prefix, module
    if isinstance(module, Wrapper):
        yield from walk(module.module, prefix)
        return
    for name, child in module._modules.items():
        if child is not None:
            yield from walk(child, f"{prefix}{name}.")


def named_plainly(
    root: nn.Module, of: str, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
) -> Iterator[tuple[str, Any]]:
    """Yield its "_parameters" or "_buffers" (of=...), by their names in the plain model."""
    seen: set[Tensor] = set()
    at = f"{prefix}." if prefix else ""
    for start, part in walk(root, at) if recurse else ((at, root),):
        for name, tensor in getattr(part, of).items():
            if tensor is not None and not (remove_duplicate and tensor in seen):
                seen.add(tensor)
                yield start + name, getattr(tensor, "shard", tensor)  # in a pass of FSDP, too


def _check_only_one(module: nn.Module, kind: type[Wrapper], rank: int) -> None:
    who = kind.__name__
    for name, inner in module.named_modules():
        found, problem = f"{name or 'the module'} is a {type(inner).__name__}", None
        if isinstance(inner, Wrapper) and inner.spreads:
            problem = (
                f"{found}, which is not called as a module is: put {who} around its layers, "
                "before they are given to it, or average the gradients after each step: "
                "all_reduce_coalesced_([p.grad for p in pipeline.parameters()], "
                'mesh["data"], ReduceOp.MEAN)'
            )
        elif isinstance(inner, Wrapper) and inner.averages and type(inner) is not kind:
            problem = (
                f"{found} already: use only one of them. FSDP averages between shards and replicas "
                "by itself, see ShardingStrategy.hybrid and NO_SHARD"
            )
        if problem is not None:
            refuse(who, rank, problem)


def _add_prefix(wrapper: Wrapper, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Let a module that holds a wrapper load its saved state: plain names, and `own_state`."""
    own = {}
    for key in [key for key in state if key.startswith(prefix)]:
        name = key[len(prefix) :]
        if is_own_key(name):
            own[name] = state.pop(key)
        else:
            state[f"{prefix}module.{name}"] = state.pop(key)
    wrapper._to_load = own


def _load_own(wrapper: Wrapper, _: object) -> None:
    """Load `own_state` after all parameters."""
    own, wrapper._to_load = wrapper._to_load, {}
    wrapper.load_own_state(own)


# ------------------------------------------------------------------------------
# Optimizers write parameters: the owner of a parameter is told before and after each step. torch
# calls global hooks of all optimizers. Those here keep no state: a parameter names its owner.

_ATTRIBUTE = "_phalanx_owner"


class _Claim:
    """Names a parameter's owner; a copy of the parameter, or one loaded from a file, has none."""

    def __init__(self, owner: Wrapper | None = None) -> None:
        self.owner = weakref.ref(owner) if owner is not None else lambda: None

    def __reduce__(self) -> Any:
        return (_Claim, ())


def claim(parameter: nn.Parameter, owner: Wrapper) -> None:
    """Tell this owner of steps that write the parameter, from now on."""
    setattr(parameter, _ATTRIBUTE, _Claim(owner))


def release(parameter: nn.Parameter) -> None:
    """Tell no owner from now on."""
    if hasattr(parameter, _ATTRIBUTE):
        delattr(parameter, _ATTRIBUTE)


def owner_of(parameter: nn.Parameter) -> Wrapper | None:
    """Return the owner that is told now, if there is one."""
    found = getattr(parameter, _ATTRIBUTE, None)
    return found.owner() if isinstance(found, _Claim) else None


def tell(step: Callable[[Wrapper, Optimizer], None], optimizer: Optimizer, *_: object) -> None:
    """Call it with each owner of the optimizer's parameters."""
    owners: dict[int, Wrapper] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            # Most parameters carry no claim: this runs at each step of every optimizer.
            if hasattr(parameter, _ATTRIBUTE) and (owner := owner_of(parameter)) is not None:
                owners[id(owner)] = owner
    for owner in owners.values():
        step(owner, optimizer)


def _before_step(optimizer: Optimizer, *_: object) -> None:
    """Refuse a step inside a pass that averages; let the optimizer compute with plain tensors."""
    in_backward = backward_number() >= 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for hook in post_accumulate_hooks(parameter) if in_backward else ():
                if isinstance(hook, WrapperHook) and (reducer := hook.args[0]()) is not None:
                    reducer.check_step(parameter)
            if type(parameter.grad) is GradientPart:  # for which torch would call Python code
                parameter.grad.__class__ = Tensor  # type: ignore[assignment]
    tell(lambda owner, opt: owner.before_step(opt), optimizer)


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(partial(tell, lambda owner, opt: owner.after_step(opt)))


class WrapperHook(partial[None]):
    """A hook that a wrapper has put on a parameter, and that other parameters do not take over.

    Its first argument is a weak reference to the parameter's reducer.
    """


def is_wrapped(parameter: nn.Parameter) -> bool:
    """Return whether a wrapper averages its gradients, or is told of steps that write it."""
    hooks = post_accumulate_hooks(parameter)
    averaged = any(isinstance(hook, WrapperHook) and hook.args[0]() for hook in hooks)
    return averaged or owner_of(parameter) is not None


def remove_hooks(handles: list[Any]) -> None:
    """Remove the hooks of these handles, and the handles from the list."""
    while handles:
        handles.pop().remove()


# ------------------------------------------------------------------------------
# `Slice`: which part of a tensor a rank holds. Checkpoints know no more of how a model is split.
#
#     tensor of shape (3, 4)      read row by row: 0 1 2 3 | 4 5 6 7 | 8 9 10 11
#     Slice((3, 4), 3, 6)                                3 | 4 5


class Slice(NamedTuple):
    """The part of a tensor that this rank holds: elements start:stop of it, read row by row.

    shape   of the whole tensor
    """

    shape: tuple[int, ...]
    start: int
    stop: int

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Slice:
        """Return all of a tensor of this shape."""
        return cls(tuple(shape), 0, prod(shape))

    @property
    def is_whole(self) -> bool:
        """True if this is the whole tensor."""
        return self.start == 0 and self.stop == prod(self.shape)

    @property
    def numel(self) -> int:
        """Number of elements that this rank holds."""
        return self.stop - self.start


def slices_in(module: nn.Module) -> dict[Tensor, Slice]:
    """Return this rank's part of each parameter that is in a wrapper, by the parameter."""
    found: dict[Tensor, Slice] = {}
    for _, wrapper in walk(module):
        if isinstance(wrapper, Wrapper) and not wrapper.spreads:
            pieces = wrapper.slices()
            found.update((p, pieces[name]) for name, p in wrapper.named_parameters())
    return found
