"""The reducer: averages gradients while a backward pass still runs.

    hook on a parameter     its gradient is complete on this rank     -> into its bucket
    bucket full             and all before it started                 -> start to average it
    end of the pass         nothing more will come                    -> wait for all buckets

The first pass fills buckets in reverse order of the parameters; then they are built anew in the
order in which gradients arrived on rank 0.
"""

from __future__ import annotations

import weakref
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from phalanx.backends.base import Backend
from phalanx.collectives import ReduceOp, all_reduce_, broadcast
from phalanx.errors import DistributedError, MisuseError, UnsupportedOperationError
from phalanx.parallel.buckets import Buckets

NAMES_SHOWN = 10


class Reducer:
    """Averages the gradients of parameters, given by name, over the ranks of a backend.

    synchronize    whether backward passes average; if not, they accumulate on this rank
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        backend: Backend,
        *,
        bucket_size: int,
        find_unused_parameters: bool,
    ) -> None:
        self.synchronize = True
        self._backend = backend
        self._bucket_size = bucket_size
        self._find_unused = find_unused_parameters
        self._names = {p: name for name, p in parameters.items()}
        self._trained = [p for p in self._names if p.requires_grad]
        self._frozen = [p for p in self._names if not p.requires_grad]
        self._unsynchronized = False  # some gradients were accumulated and not averaged
        self._callback_queued = False
        self._arrivals: dict[nn.Parameter, None] | None = {}  # in the first pass, in order
        self._check_alone()
        self._buckets = Buckets(reversed(self._trained), backend, bucket_size)
        hook = _GradHook(self)
        handles = [
            p.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            for p in self._trained
        ]
        weakref.finalize(self, _remove, handles)  # so that the module may be wrapped again

    def begin_forward(self) -> None:
        """A forward pass begins: a backward pass that an error cut short is forgotten."""
        if torch._C._current_graph_task_id() >= 0:
            return  # inside a backward pass, which recomputes a checkpoint: it is still under way
        self._callback_queued = False
        if self._buckets.busy:
            if self._arrivals is not None:
                self._arrivals.clear()
            self._buckets.finish()

    def watch(self, outputs: Any) -> None:
        """See to it that the backward pass from these outputs ends with averaged gradients.

        Queued from here, the callback belongs to the outermost backward pass, also when activation
        checkpointing runs others inside it.
        """
        for leaf in pytree.tree_leaves(outputs):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(lambda _: self._queue_callback())  # type: ignore[no-untyped-call]

    def catch_up(self) -> None:
        """Average what was accumulated and not averaged since, if anything."""
        if self._unsynchronized:
            self._finish_pass()

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

    def _queue_callback(self) -> None:
        if self.synchronize and not self._callback_queued:
            self._callback_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._on_backward_end)

    def _on_backward_end(self) -> None:
        self._callback_queued = False
        self._finish_pass()
        if self._arrivals is not None:
            self._rebuild_buckets(self._arrivals)
            self._arrivals = None

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
        self._buckets.finish()
        self._unsynchronized = False
        if self._find_unused:
            self._forget_unused(set(without))

    def _forget_unused(self, without: set[nn.Parameter]) -> None:
        """Gradients of parameters that no rank has used stay None, as in one process."""
        used = torch.tensor([p not in without for p in self._trained], dtype=torch.int32)
        all_reduce_(used, self._backend, ReduceOp.MAX)
        for parameter, anywhere in zip(self._trained, used.tolist(), strict=True):
            if not anywhere:
                parameter.grad = None

    def _rebuild_buckets(self, arrivals: dict[nn.Parameter, None]) -> None:
        """From now on use the order in which gradients arrived on rank 0; the others come last.

        Every rank takes part, whatever arrived there.
        """
        place = {p: i for i, p in enumerate(self._trained)}
        before = [place[p] for p in self._buckets.order]
        mine = list(dict.fromkeys([*(place[p] for p in arrivals), *before]))
        order = broadcast(torch.tensor(mine, dtype=torch.int64), self._backend, 0).tolist()
        if order == before:
            return
        parameters = [self._trained[i] for i in order]
        # Gradients stay in the old memory, as long as they live; the next pass moves them.
        self._buckets = Buckets(parameters, self._backend, self._bucket_size)

    # Refusals -------------------------------------------------------------------------------

    def _check_alone(self) -> None:
        for parameter in self._trained:
            for hook in (parameter._post_accumulate_grad_hooks or {}).values():
                if isinstance(hook, _GradHook) and hook.alive:
                    raise MisuseError(
                        f"rank {self._backend.rank}: DDP: another DDP averages the gradients of "
                        f"{self._names[parameter]} already; delete that one first",
                        rank=self._backend.rank,
                        op="DDP",
                    )

    def _refuse(self, problem: str, kind: type[DistributedError] = MisuseError) -> NoReturn:
        rank = self._backend.rank
        error = kind(f"rank {rank}: DDP: {problem}", rank=rank, op="DDP")
        self._backend.fail(error)  # the others wait for our gradients
        raise error

    def _list(self, parameters: list[nn.Parameter]) -> str:
        names = [self._names[p] for p in parameters]
        more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
        return ", ".join(names[:NAMES_SHOWN]) + more


_THEY_WERE_FROZEN = "requires_grad was switched off after DDP was built"


class _GradHook:
    """Tells a reducer that a gradient has come, without keeping it alive."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = weakref.ref(reducer)

    @property
    def alive(self) -> bool:
        return self._reducer() is not None

    @torch.no_grad()
    def __call__(self, parameter: nn.Parameter) -> None:
        reducer = self._reducer()
        if reducer is not None:
            reducer.gradient_came(parameter)


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
