"""Unsharded parameters: the tensors that modules compute with, and their states.

A parameter group is in one of four states. Forward and backward passes go around the first three:

               unshard                wait
      SHARDED ---------> UNSHARDING --------> UNSHARDED
       | ^ ^                 |                    |
       | | +---- reshard ----+------ reshard -----+
       | |
       | +------ restore ----+
       |                     |        inside summon_full_params(): modules see copies,
       +--- summon ----> SUMMONED     which are there whatever passes do

    state        unshard      wait        reshard   summon     restore   use
    SHARDED      UNSHARDING   .           .         SUMMONED   .         MisuseError
    UNSHARDING   .            UNSHARDED   SHARDED   .          .         MisuseError
    UNSHARDED    .            .           SHARDED   .          .         allowed
    SUMMONED     .            .           .         .          SHARDED   allowed

`unshard` only begins, so that it can be done ahead of use. `use` is any torch function that reads
or writes the values of a parameter of the group. A dot: the event changes nothing. (The names of
SHARDED and UNSHARDED are those of torch's FSDP2.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from phalanx.errors import MisuseError
from phalanx.parallel.guards import refuse
from phalanx.torch_internals import as_plain_tensors, register_flat_weights

if TYPE_CHECKING:
    from typing_extensions import Self


TRANSITIONS: Final[Mapping[tuple[str, str], str]] = {
    ("SHARDED", "unshard"): "UNSHARDING",
    ("UNSHARDING", "wait"): "UNSHARDED",
    ("UNSHARDING", "reshard"): "SHARDED",
    ("UNSHARDED", "reshard"): "SHARDED",
    ("SHARDED", "summon"): "SUMMONED",
    ("SUMMONED", "restore"): "SHARDED",
}
"""The arrows of the picture above: a state and an event, and the state after it."""

USABLE: Final = frozenset({"UNSHARDED", "SUMMONED"})


class UnshardState:
    """The state of one parameter group, shared by its unsharded parameters.

    group         its name, for messages
    now           one of the four states
    on_backward   called when a backward pass comes to a tensor that the forward pass under way has
                  computed from the group's parameters
    """

    __slots__ = ("group", "now", "on_backward")

    def __init__(self, group: str) -> None:
        self.group = group
        self.now = "SHARDED"
        self.on_backward: Callable[[], None] | None = None

    def after(self, event: str) -> None:
        """Go along the arrow of this event, if there is one."""
        self.now = TRANSITIONS.get((self.now, event), self.now)


class UnshardedParameter(nn.Parameter):
    """A parameter in the shape that its module expects, with memory while its group is unsharded.

    Modules see it in the place of the shard while they compute. It is the same object for the whole
    run, so what autograd has saved of it is valid again when the group is unsharded for backward.
    To use it in another state is a `MisuseError`, whether its memory is gone or, being shared with
    other ranks, still there.
    """

    state: UnshardState
    name_in_model: str
    shard: nn.Parameter

    def __new__(
        cls, data: Tensor, state: UnshardState, name_in_model: str, shard: nn.Parameter
    ) -> Self:
        """`data` is a view of the group's memory."""
        unsharded = super().__new__(cls, data, requires_grad=False)
        unsharded.state = state
        unsharded.name_in_model = name_in_model
        unsharded.shard = shard
        return unsharded

    def __init__(self, *_: object) -> None:
        pass  # __new__ has done all: nn.Parameter has no __init__ that takes its arguments

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run `func`, if the state allows it, and notice the backward pass through its results."""
        if _only_inspects(func):
            with as_plain_tensors():
                return func(*args, **(kwargs or {}))
        used: set[UnshardState] = set()
        for value in (*args, *kwargs.values()) if kwargs else args:
            for unsharded in value if isinstance(value, (list, tuple)) else (value,):
                if not isinstance(unsharded, UnshardedParameter):
                    continue
                used.add(unsharded.state)
                if unsharded.state.now not in USABLE:
                    raise MisuseError(
                        f"FSDP: {unsharded.name_in_model} was used while its parameter group "
                        f"({unsharded.state.group}) was sharded. A group's full parameters are "
                        "there during its own forward and backward pass only: pass a unit= that "
                        "holds the parameter and every module that uses it, read values with "
                        "summon_full_params(), and clone what is to be kept"
                    )
        with as_plain_tensors():
            result = func(*args, **(kwargs or {}))
            if torch.compiler.is_compiling():  # whose graph has no nodes yet
                return result
            results = result if isinstance(result, (tuple, list)) else (result,)
            for on_backward in [s.on_backward for s in used if s.on_backward is not None]:
                for value in results:
                    if not isinstance(value, Tensor) or value.grad_fn is None:
                        continue
                    value.grad_fn.register_prehook(lambda _, run=on_backward: run())
                    # A view that is written in place later gets another node, and the base keeps
                    # its own: as of nn.Linear with more than two dimensions.
                    if value._base is not None and value._base.grad_fn is not None:
                        value._base.grad_fn.register_prehook(lambda _, run=on_backward: run())
        return result

    def __repr__(self) -> str:  # type: ignore[override]
        values: object = f"{list(self.shape)}, sharded"
        if self.state.now in USABLE:
            with as_plain_tensors():
                values = repr(self.detach())
        return f"UnshardedParameter({self.name_in_model}: {values})"


_VIEWS = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
_INSPECT = frozenset(
    {
        *("size", "dim", "numel", "nelement", "stride", "element_size", "is_contiguous", "__len__"),
        *("is_floating_point", "is_complex", "get_device", "type", "requires_grad_"),
        *("register_hook", "register_post_accumulate_grad_hook", "retain_grad", "ndimension"),
    }
)


def _only_inspects(func: Any) -> bool:
    """Return whether a torch function asks about a tensor, and not for its values."""
    name = getattr(func, "__name__", "")
    if name in ("__set__", "__delete__"):
        return True
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", "") not in _VIEWS
    return name in _INSPECT


# The parameter swap -----------------------------------------------------------------------------


class Registration(NamedTuple):
    """A parameter in a module's `_parameters`, and its name in the model."""

    name: str
    module: nn.Module
    attribute: str
    parameter: nn.Parameter


def registrations(model: nn.Module) -> list[Registration]:
    """Return all registrations of a model. A parameter that modules share has several."""
    return [
        Registration(f"{prefix}.{attribute}".lstrip("."), module, attribute, parameter)
        for prefix, module in model.named_modules(remove_duplicate=False)
        for attribute, parameter in module._parameters.items()
        if parameter is not None
    ]


class ParameterSwap:
    """Lets the modules of one model see unsharded parameters, or shards again.

    While anybody holds it swapped in (a forward pass, a backward pass, summon_full_params()), the
    unsharded parameters are registered in the place of the shards, as `functional_call`,
    `parametrize` and modules that iterate over their own parameters expect.
    """

    def __init__(
        self,
        model: nn.Module,
        unsharded: Mapping[nn.Parameter, UnshardedParameter],
        rank: int,
    ) -> None:
        self._rank = rank
        self._holders: set[str] = set()
        self._swaps = [
            (at, unsharded[at.parameter], at.parameter.data_ptr()) for at in registrations(model)
        ]
        # They keep a list of their parameters besides.
        self._recurrent = [m for m in model.modules() if isinstance(m, nn.RNNBase)]

    def swap_in(self, holder: str) -> None:
        """Let modules see unsharded parameters. `MisuseError` if a shard was replaced.

        An unsharded parameter requires gradients if its shard does now.
        """
        if not self._holders:
            with as_plain_tensors():
                for at, unsharded, address in self._swaps:
                    registered = at.module._parameters.get(at.attribute)
                    if registered is not at.parameter or registered.data_ptr() != address:
                        self._refuse_replaced(at.name)
                    if registered.requires_grad is not unsharded.requires_grad:
                        unsharded.requires_grad_(registered.requires_grad)
            self._register(unsharded=True)
        self._holders.add(holder)

    def swap_out(self, holder: str) -> None:
        """Let modules see shards, if nobody else holds it."""
        if holder in self._holders:
            self._holders.remove(holder)
            if not self._holders:
                self._register(unsharded=False)

    @contextmanager
    def shards(self) -> Iterator[None]:
        """Give modules shards in here, also in a pass, or after one that an error has cut short."""
        self._register(unsharded=False)
        try:
            yield
        finally:
            self._register(unsharded=bool(self._holders))

    def _register(self, *, unsharded: bool) -> None:
        for at, view, _ in self._swaps:
            at.module._parameters[at.attribute] = view if unsharded else at.parameter
        for module in self._recurrent:
            register_flat_weights(module)

    def check_complete(self, model: nn.Module) -> None:
        """Raise `MisuseError` for parameters that came after the model was cut."""
        known = {at.parameter for at, _, _ in self._swaps}
        late = [name for name, p in model.named_parameters() if p not in known]
        for at, _, _ in self._swaps:
            if at.name in late:
                self._refuse_replaced(at.name)
        if late:
            refuse(
                "FSDP",
                self._rank,
                f"{', '.join(late)} came to the module after FSDP was built, and would be on each "
                "rank by itself: build it when the module is complete",
            )

    def _refuse_replaced(self, name: str) -> NoReturn:
        refuse(
            "FSDP",
            self._rank,
            f"the parameter {name} was replaced after FSDP was built, or its .data was (as by "
            ".half() or .double()), so it is no shard any more: change values with "
            "load_state_dict or summon_full_params, or build FSDP after the change. "
            "functional_call() and parametrize belong inside the model that FSDP wraps",
        )
