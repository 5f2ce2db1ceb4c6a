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

from phalanx.backends.base import Backend
from phalanx.parallel.reducer import Reducer
from phalanx.parallel.replicas import check_same_model
from phalanx.parallel.tensors import broadcast_all_

BUCKET_SIZE = 25 << 20


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
        check_same_model(module, backend)
        self.broadcast_parameters()
        self._reducer = Reducer(
            dict(module.named_parameters()),
            backend,
            bucket_size=bucket_size,
            find_unused_parameters=find_unused_parameters,
        )
        self.register_load_state_dict_pre_hook(_add_prefix)  # type: ignore[no-untyped-call]

    # As a module ----------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward."""
        self._reducer.begin_forward()
        if self.training and self.broadcast_buffers and self._reducer.synchronize:
            # As .data: a buffer of batch norm that an earlier forward pass has saved for its
            # backward is not used there, and need not count as changed.
            buffers = [buffer.data for buffer in self.module.buffers()]
            broadcast_all_(buffers, self.backend, 0)
        outputs = self.module(*args, **kwargs)
        if torch.is_grad_enabled():
            self._reducer.watch(outputs)
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
        self.backend.check_rank(root, "root")
        tensors = [*self.module.parameters(), *self.module.buffers()]
        broadcast_all_(tensors, self.backend, root)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in here only accumulate; the next one outside averages the sum."""
        before, self._reducer.synchronize = self._reducer.synchronize, False
        try:
            yield
        finally:
            self._reducer.synchronize = before

    def sync_gradients(self) -> None:
        """Average gradients that were accumulated under `no_sync` and not averaged since.

        Blocks until they are; every rank has to call it. Does nothing where there are none: after
        an ordinary `backward()` all gradients are final.
        """
        self._reducer.catch_up()


def _add_prefix(ddp: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Let a module that holds a DDP load the plain names that it saved."""
    for key in [key for key in state if key.startswith(prefix)]:
        state[f"{prefix}module.{key[len(prefix) :]}"] = state.pop(key)
