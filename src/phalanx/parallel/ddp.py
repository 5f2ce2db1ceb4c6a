"""DDP: every rank has the whole model and a part of each batch; gradients are averaged.

    rank 0   forward | backward  g3   g2   g1 |  step
                                  \\    \\    \\
    network                     [g3] [g2  g1]         averaged while backward still runs
                                  /    /    /
    rank 1   forward | backward  g3   g2   g1 |  step

(Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training".)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from phalanx.backends.base import Backend
from phalanx.collectives import ReduceOp, all_reduce_, broadcast
from phalanx.errors import MisuseError, UnsupportedOperationError
from phalanx.parallel.buckets import Buckets
from phalanx.parallel.replicas import check_same_model
from phalanx.parallel.tensors import broadcast_all_

BUCKET_SIZE = 25 << 20
NAMES_SHOWN = 10


class DDP(nn.Module):
    """A module whose gradients are averaged over the ranks of `backend`, during backward.

    module         the model; the same on every rank, in structure. Its parameters and buffers are
                   overwritten with rank 0's here, in place, so an optimizer may exist already
    backend        the ranks that train together
    bucket_size    bytes of gradients that are sent as one message. The first backward pass fills
                   buckets in reverse order of the parameters; later ones in the order in which
                   gradients arrived on rank 0 then
    broadcast_buffers       in training, buffers are rank 0's at the start of each forward pass
    find_unused_parameters  a parameter that a rank's backward pass does not reach counts as zeros
                   there; its gradient stays None if no rank's pass reached it. Costs one small
                   message. Without it, such a parameter is an error that names it

    When `loss.backward()` returns, every `.grad` is the mean over the ranks: with equal batch sizes
    and a loss that is a mean, the gradient of the joined batch. Gradients live in the buckets'
    memory, which the next backward pass writes again: clone what is to be kept. A step sends
    2(p-1)/p of the gradients' bytes from each of p ranks.

    `state_dict` and the names of parameters are those of the plain module, which is `.module`.

    Raises `DesyncError`, on every rank, if the ranks' models differ, naming the first parameter.
    """

    def __init__(
        self,
        module: nn.Module,
        backend: Backend,
        *,
        bucket_size: int = BUCKET_SIZE,
        broadcast_buffers: bool = True,
        find_unused_parameters: bool = False,
    ) -> None:
        super().__init__()
        if bucket_size < 1:
            raise ValueError(f"bucket_size must be at least 1 byte, not {bucket_size}")
        self.module = module
        self.backend = backend
        self.broadcast_buffers = broadcast_buffers
        self.find_unused_parameters = find_unused_parameters
        self._bucket_size = bucket_size
        self._names = {p: name for name, p in module.named_parameters()}
        self._trained = [p for p in self._names if p.requires_grad]
        self._frozen = [p for p in self._names if not p.requires_grad]
        self._synchronize = True
        self._unsynchronized = False  # some gradients were accumulated under no_sync()
        self._callback_queued = False
        self._arrivals: list[nn.Parameter] | None = []  # of the first backward pass
        check_same_model(module, backend)
        self.broadcast_parameters()
        self._buckets = Buckets(reversed(self._trained), backend, bucket_size)
        for parameter in self._trained:
            parameter.register_post_accumulate_grad_hook(self._on_grad)  # type: ignore[no-untyped-call]

    # As a module ----------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward."""
        if self._buckets.busy:
            self._abandon()
        if self.training and self.broadcast_buffers and self._synchronize:
            broadcast_all_(list(self.module.buffers()), self.backend, 0)
        outputs = self.module(*args, **kwargs)
        if torch.is_grad_enabled():
            # Queued from here, the callback belongs to the outermost backward pass, also when
            # activation checkpointing runs others inside it.
            for leaf in pytree.tree_leaves(outputs):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(self._on_output_grad)  # type: ignore[no-untyped-call]
        return outputs

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The plain module's."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Into the plain module; every rank has to load the same."""
        return self.module.load_state_dict(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The plain module's, under their own names."""
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """The plain module's, under their own names."""
        return self.module.named_buffers(*args, **kwargs)

    # For the user ---------------------------------------------------------------------------

    def broadcast_parameters(self, root: int = 0) -> None:
        """Overwrite parameters and buffers with those of rank `root`, in place."""
        broadcast_all_([*self._names, *self.module.buffers()], self.backend, root)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in here only accumulate; the next one outside averages the sum."""
        before, self._synchronize = self._synchronize, False
        try:
            yield
        finally:
            self._synchronize = before

    def sync_gradients(self) -> None:
        """Average gradients that were accumulated under `no_sync` and not averaged since.

        Blocks until they are; every rank has to call it. Does nothing where there are none: after
        an ordinary `backward()` all gradients are final.
        """
        if self._unsynchronized:
            self._finish_backward(missing_is_error=False)

    # During backward ------------------------------------------------------------------------

    def _on_output_grad(self, grad: Tensor) -> None:
        self._queue_callback()

    def _on_grad(self, parameter: nn.Parameter) -> None:
        if not self._synchronize:
            self._unsynchronized = True
            return
        grad = parameter.grad
        if grad is not None and grad.layout is not torch.strided:
            raise UnsupportedOperationError(
                f"rank {self.backend.rank}: DDP: the gradient of {self._names[parameter]} is "
                f"{grad.layout}; DDP averages dense gradients only (pass sparse=False)",
                rank=self.backend.rank,
                op="DDP",
            )
        self._queue_callback()
        if self._arrivals is not None:
            self._arrivals.append(parameter)
        self._buckets.put(parameter)

    def _queue_callback(self) -> None:
        if self._synchronize and not self._callback_queued:
            self._callback_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._on_backward_end)

    def _on_backward_end(self) -> None:
        self._callback_queued = False
        self._finish_backward(missing_is_error=not self.find_unused_parameters)

    def _finish_backward(self, *, missing_is_error: bool) -> None:
        """All gradients of this rank are here: see that all are averaged."""
        missing = self._buckets.missing()
        without = [p for p in missing if p.grad is None]
        if without and missing_is_error:
            self._refuse(
                f"no gradient came for {self._list(without)}: the loss does not depend on "
                f"{'them' if len(without) > 1 else 'it'} on this rank. Freeze such parameters "
                "before DDP is built, or pass find_unused_parameters=True"
            )
        thawed = [p for p in self._frozen if p.requires_grad]
        if thawed:
            self._refuse(
                f"{self._list(thawed)} did not require gradients when DDP was built and does now: "
                "build DDP after freezing and unfreezing"
            )
        for parameter in missing:
            self._buckets.put(parameter)
        self._buckets.finish()
        self._unsynchronized = False
        if self.find_unused_parameters:
            self._forget_unused(set(without))
        if self._arrivals is not None and not missing:
            self._rebuild_buckets(self._arrivals)
            self._arrivals = None

    def _forget_unused(self, without: set[nn.Parameter]) -> None:
        """Gradients of parameters that no rank has used stay None, as in one process."""
        used = torch.tensor([p not in without for p in self._trained], dtype=torch.int32)
        all_reduce_(used, self.backend, ReduceOp.MAX)
        for parameter, anywhere in zip(self._trained, used.tolist(), strict=True):
            if not anywhere:
                parameter.grad = None

    def _rebuild_buckets(self, arrivals: list[nn.Parameter]) -> None:
        """From now on use the order in which gradients arrived on rank 0."""
        place = {p: i for i, p in enumerate(self._trained)}
        order = torch.tensor([place[p] for p in arrivals], dtype=torch.int64)
        order = broadcast(order, self.backend, 0)
        parameters = [self._trained[i] for i in order.tolist()]
        if parameters == self._buckets.order:
            return
        grads = {p: p.grad for p in parameters}
        self._buckets = Buckets(parameters, self.backend, self._bucket_size)
        for parameter, grad in grads.items():
            parameter.grad = grad  # still in the old memory; the next pass moves it

    def _abandon(self) -> None:
        """A backward pass was cut short by an error: what it has started is not wanted."""
        self._callback_queued = False
        self._buckets.finish()

    def _refuse(self, problem: str) -> None:
        error = MisuseError(
            f"rank {self.backend.rank}: DDP: {problem}", rank=self.backend.rank, op="DDP"
        )
        self.backend.fail(error)  # the others wait for our gradients
        raise error

    def _list(self, parameters: list[nn.Parameter]) -> str:
        names = [self._names[p] for p in parameters]
        more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
        return ", ".join(names[:NAMES_SHOWN]) + more
