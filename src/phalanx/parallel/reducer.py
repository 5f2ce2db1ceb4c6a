"""The reducer: averages gradients while a backward pass still runs.

    hook on a parameter     its gradient is complete on this rank     -> into its bucket
    bucket full             and all before it started                 -> start to average it
    end of the pass         nothing more will come                    -> wait for all buckets
    all averaged            unused, not finite, drifted apart?        -> agree with the other ranks

The first pass fills buckets in reverse order of the parameters; then they are built anew in the
order in which gradients arrived on rank 0.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from phalanx.collectives import ReduceOp, all_reduce_, broadcast
from phalanx.core.backend import Backend
from phalanx.errors import DistributedError, MisuseError, UnsupportedOperationError
from phalanx.parallel.averaging import Averaging
from phalanx.parallel.buckets import Buckets
from phalanx.parallel.guards import AVERAGING, UNANSWERED, DriftCheck, FiniteCheck, hint
from phalanx.parallel.uneven import Join, Turn

NAMES_SHOWN = 10


class Reducer:
    """Averages the gradients of parameters, given by name, over the ranks of a backend.

    synchronize    whether backward passes average; if not, they accumulate on this rank
    join           what is known of ranks that have no batch left, while there may be some
    weightless     whether the backward pass that runs is of a loss that counts for nothing
    unanswered     how many forward passes there were since an averaging pass last began
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        backend: Backend,
        *,
        bucket_size: int,
        find_unused_parameters: bool,
        averaging: Averaging,
        finite: FiniteCheck | None,
        drift: DriftCheck | None,
    ) -> None:
        self.synchronize = True
        self.join: Join | None = None
        self.weightless = False
        self.unanswered = 0
        self._backend = backend
        self._bucket_size = bucket_size
        self._find_unused = find_unused_parameters
        self._averaging = averaging
        self._finite = finite
        self._drift = drift
        self._names = {p: name for name, p in parameters.items()}
        self._trained = [p for p in self._names if p.requires_grad]
        self._frozen = [p for p in self._names if not p.requires_grad]
        self._unsynchronized = False  # some gradients were accumulated and not averaged
        self._callback_queued = False
        self._open = False  # a pass that averages is under way
        self._left_out = False  # before it there was a forward pass without one
        self._arrivals: dict[nn.Parameter, None] | None = {}  # in the first pass, in order
        check_alone(self._names, backend.rank)
        self._buckets = self._new_buckets(list(reversed(self._trained)))
        watch_gradients(self, self._trained)

    def begin_forward(self) -> None:
        """Begin anew: a backward pass that an error cut short is forgotten."""
        if inside_backward():
            return  # which recomputes a checkpoint: the pass is still under way
        self._callback_queued = self._open = self.weightless = False
        if self._buckets.busy:
            if self._arrivals is not None:
                self._arrivals.clear()
            if self._finite is not None:
                self._finite.forget()
            with hint(AVERAGING):
                self._buckets.finish()
            self._averaging.settle(self._buckets.all, skipped=True)

    def watch(self, outputs: Any) -> None:
        """See to it that the backward pass from these outputs ends with averaged gradients.

        Queued from here, the callback belongs to the outermost backward pass, also when activation
        checkpointing runs others inside it.
        """
        leaves = pytree.tree_leaves(outputs)
        attached = [x for x in leaves if isinstance(x, Tensor) and x.grad_fn is not None]
        for leaf in attached:
            leaf.register_hook(self._output_gradient_came)  # type: ignore[no-untyped-call]
        if attached and self.synchronize and not inside_backward():
            self.unanswered += 1

    def check_complete(self, parameters: dict[str, nn.Parameter]) -> None:
        """Refuse to train parameters that came after DDP was built."""
        late = [n for n, p in parameters.items() if p.requires_grad and p not in self._names]
        if late:
            self._refuse(
                f"{self._listed(late)} came to the module after DDP was built, and would be "
                "trained on each rank alone: build DDP when the module is complete"
            )

    def catch_up(self) -> None:
        """Average what was accumulated and not averaged since, if anything."""
        if self._unsynchronized:
            self._begin_pass(Turn.CATCHING_UP)
            self._finish_pass()

    def answer(self, turn: Turn) -> None:
        """Average with the ranks that have a batch, without one; the result is here, too."""
        self._buckets.put_nothing()
        self._settle(set(self._trained))
        if turn is Turn.BACKWARD:
            self._first_pass_is_over()

    # During a backward pass -----------------------------------------------------------------

    def gradient_came(self, parameter: nn.Parameter) -> None:
        """A gradient is complete on this rank."""
        if not self.synchronize:
            self._unsynchronized = True
            return
        self._queue_callback()
        if not self._buckets.awaits(parameter):
            self._refuse(
                f"the gradient of {self._names[parameter]} came twice in one backward pass: it is "
                "used in more than one reentrant checkpoint; pass use_reentrant=False to them"
            )
        if self._arrivals is not None:
            self._arrivals[parameter] = None
        self._put(parameter)

    def _put(self, parameter: nn.Parameter) -> None:
        grad = parameter.grad
        if grad is not None and grad.layout is not torch.strided:
            self._refuse(
                f"the gradient of {self._names[parameter]} is {grad.layout}; only dense gradients "
                "are averaged (pass sparse=False)",
                UnsupportedOperationError,
            )
        self._buckets.put(parameter)

    def _output_gradient_came(self, grad: Tensor) -> Tensor | None:
        self._queue_callback()
        # The loss of no samples may have made NaN of the zeros that came into it.
        return torch.where(grad.isfinite(), grad, 0) if self.weightless else None

    def _queue_callback(self) -> None:
        if self.synchronize and not self._callback_queued:
            self._callback_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._on_backward_end)
            self._begin_pass(Turn.BACKWARD)

    def _begin_pass(self, turn: Turn) -> None:
        if self._open:
            return
        self._open = True
        self._left_out = self.unanswered > 1
        self.unanswered = 0
        if self.join is not None:
            self.join.call(turn)

    def _on_backward_end(self) -> None:
        self._callback_queued = self.weightless = False
        self._finish_pass()
        self._first_pass_is_over()

    @torch.no_grad()
    def _finish_pass(self) -> None:
        missing = self._buckets.missing()
        without = [p for p in missing if p.grad is None]
        if without and not self._find_unused:
            self._refuse(
                f"no gradient came for {self._list(without)}: on this rank the loss does not "
                f"depend on {'them' if len(without) > 1 else 'it'}, or {_THEY_WERE_FROZEN}. Freeze "
                "parameters before DDP is built, or pass find_unused_parameters=True"
            )
        thawed = [p for p in self._frozen if p.requires_grad]
        if thawed:
            self._refuse(
                f"{self._list(thawed)} did not require gradients when DDP was built, and now does: "
                "build DDP after freezing and unfreezing"
            )
        for parameter in missing:
            self._put(parameter)
        self._settle(set(without))

    @torch.no_grad()
    def _settle(self, without: set[nn.Parameter]) -> None:
        """All gradients are in: what is to be done together with the other ranks, in order."""
        world = self._backend.world_size
        with hint(UNANSWERED if self._left_out else AVERAGING):
            self._buckets.finish(world / self.join.divisor if self.join is not None else 1)
            self._open = self._unsynchronized = False
            if self._find_unused:
                self._forget_unused(without)
            skipped = self._finite is not None and self._finite.agree(self._buckets.all)
            self._averaging.settle(self._buckets.all, skipped=skipped)
            if skipped:
                for parameter in self._trained:
                    parameter.grad = None
        if self._drift is not None:
            self._drift.pass_is_over(self.join.active if self.join else list(range(world)))

    def _forget_unused(self, without: set[nn.Parameter]) -> None:
        """Gradients of parameters that no rank has used stay None, as in one process; unless some
        of an earlier one comes only now (see compression).
        """
        used = torch.tensor([p not in without for p in self._trained], dtype=torch.int32)
        all_reduce_(used, self._backend, ReduceOp.MAX)
        for parameter, anywhere in zip(self._trained, used.tolist(), strict=True):
            if not anywhere and parameter.grad is not None and not parameter.grad.any():
                parameter.grad = None

    def _first_pass_is_over(self) -> None:
        """From now on use the order in which gradients arrived on rank 0; the others come last.

        Every rank takes part, whatever arrived there. Where rank 0 had no batch, it is the order of
        the first rank that had one.
        """
        if self._arrivals is None:
            return
        root = self.join.leader if self.join is not None else 0
        place = {p: i for i, p in enumerate(self._trained)}
        before = [place[p] for p in self._buckets.order]
        mine = list(dict.fromkeys([*(place[p] for p in self._arrivals), *before]))
        self._arrivals = None
        order = broadcast(torch.tensor(mine, dtype=torch.int64), self._backend, root).tolist()
        if order != before:
            # Gradients stay in the old memory, as long as they live; the next pass moves them.
            self._buckets = self._new_buckets([self._trained[i] for i in order])

    def _new_buckets(self, parameters: list[nn.Parameter]) -> Buckets:
        look = self._finite.look if self._finite is not None else None
        return Buckets(parameters, self._backend, self._bucket_size, self._averaging, look)

    # Refusals -------------------------------------------------------------------------------

    def _refuse(self, problem: str, kind: type[DistributedError] = MisuseError) -> NoReturn:
        rank = self._backend.rank
        error = kind(f"rank {rank}: DDP: {problem}", rank=rank, op="DDP")
        self._backend.fail(error)  # the others wait for our gradients
        raise error

    def _list(self, parameters: list[nn.Parameter]) -> str:
        return self._listed([self._names[p] for p in parameters])

    @staticmethod
    def _listed(names: list[str]) -> str:
        more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
        return ", ".join(names[:NAMES_SHOWN]) + more


_THEY_WERE_FROZEN = "requires_grad was switched off after DDP was built"


# ------------------------------------------------------------------------------
# Hooks on parameters: they tell a reducer that a gradient has come, and do not keep it alive.


class Watcher(Protocol):
    """Who is told."""

    def gradient_came(self, parameter: nn.Parameter) -> None:
        """A parameter's gradient has been accumulated; called inside the backward pass."""


def watch_gradients(watcher: Watcher, parameters: Iterable[nn.Parameter]) -> None:
    """Tell the watcher of every gradient, as long as it lives."""
    hook = _GradHook(watcher)
    handles = [
        p.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        for p in parameters
    ]
    weakref.finalize(watcher, _remove, handles)  # so that the module may be wrapped again


def check_alone(names: Mapping[nn.Parameter, str], rank: int) -> None:
    """Raise `MisuseError` if somebody watches one of these parameters already."""
    for parameter, name in names.items():
        for hook in (parameter._post_accumulate_grad_hooks or {}).values():
            if isinstance(hook, _GradHook) and hook.alive:
                raise MisuseError(
                    f"rank {rank}: DDP: another DDP averages the gradients of {name} already; "
                    "delete that one first",
                    rank=rank,
                    op="DDP",
                )


class _GradHook:
    def __init__(self, watcher: Watcher) -> None:
        self._watcher = weakref.ref(watcher)

    @property
    def alive(self) -> bool:
        return self._watcher() is not None

    @torch.no_grad()
    def __call__(self, parameter: nn.Parameter) -> None:
        watcher = self._watcher()
        if watcher is not None:
            watcher.gradient_came(parameter)


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


# ------------------------------------------------------------------------------
# What torch says about the backward pass that runs.


def inside_backward() -> bool:
    """Whether this thread runs a backward pass, which runs checkpointed forward passes again."""
    return torch._C._current_graph_task_id() >= 0


def keeps_graph() -> bool:
    """Whether it was asked to keep the graph, so that another one may follow. If unknown: yes."""
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return bool(ask()) if ask is not None else True
