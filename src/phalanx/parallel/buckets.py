"""Buckets: gradients that are averaged together, as one message.

    bucket 0                     bucket 1
    [ head.bias | head.weight ]  [ body.bias | body.weight ]   flat memory, one dtype each

Each gradient is a view into its bucket, so that it is averaged where it lies. Buckets are started
in their order, the same on every rank, whatever the order in which gradients come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.collectives.request import in_place, memory_for
from phalanx.collectives.resolve import start
from phalanx.core.backend import Backend
from phalanx.parallel.averaging import Averaging


class Bucket:
    """Flat memory for the gradients of some parameters of one dtype."""

    def __init__(self, parameters: list[nn.Parameter], backend: Backend) -> None:
        self.parameters = parameters
        count, first = sum(p.numel() for p in parameters), parameters[0]
        self.flat = memory_for(backend, (count,), first.dtype, first.device)
        self._views: dict[nn.Parameter, Tensor] = {}
        self._missing = set(parameters)
        start = 0
        for parameter in parameters:
            stop = start + parameter.numel()
            self._views[parameter] = self.flat[start:stop].view(parameter.shape)
            start = stop

    @property
    def views(self) -> Mapping[nn.Parameter, Tensor]:
        """Where each gradient lies in this."""
        return self._views

    @property
    def full(self) -> bool:
        """Whether all gradients are in."""
        return not self._missing

    @property
    def missing(self) -> list[nn.Parameter]:
        """The parameters whose gradients are not in."""
        return [p for p in self.parameters if p in self._missing]

    def put(self, parameter: nn.Parameter) -> None:
        """Take in a parameter's gradient (zeros if it has none), and make it a view of this."""
        view = self._views[parameter]
        grad = parameter.grad
        if grad is None:
            view.zero_()
        elif grad.data_ptr() != view.data_ptr() or grad.stride() != view.stride():
            view.copy_(grad)
        parameter.grad = view
        self._missing.discard(parameter)

    def put_nothing(self) -> None:
        """Take in zeros in the place of all gradients, whatever they were."""
        self.flat.zero_()
        for parameter, view in self._views.items():
            parameter.grad = view
        self._missing.clear()

    def awaits(self, parameter: nn.Parameter) -> bool:
        """Whether this parameter's gradient is not in."""
        return parameter in self._missing

    def open(self) -> None:
        """Be ready for the next gradients."""
        self._missing = set(self.parameters)


class Buckets:
    """All gradients of a model, in buckets of about `size` bytes.

    averaging   how they are averaged
    look        is shown each bucket when it is full, before it is averaged
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        backend: Backend,
        size: int,
        averaging: Averaging,
        look: Callable[[Bucket], None] | None = None,
    ) -> None:
        self._averaging = averaging
        self._look = look
        self._all = [
            Bucket([p for p in batch if isinstance(p, nn.Parameter)], backend)
            for batch in batches(parameters, size)
        ]
        self._of = {p: bucket for bucket in self._all for p in bucket.parameters}
        self._begun: list[Any] = []  # the averages of the first buckets
        self._pass = 0  # so that buckets of different passes are not taken for each other

    @property
    def order(self) -> list[nn.Parameter]:
        """The parameters in the order of their places."""
        return list(self._of)

    @property
    def all(self) -> list[Bucket]:
        """The buckets, in their order."""
        return self._all

    @property
    def busy(self) -> bool:
        """Whether some gradient is in that is not averaged yet."""
        return bool(self._begun) or any(
            len(bucket.missing) < len(bucket.parameters) for bucket in self._all
        )

    def put(self, parameter: nn.Parameter) -> None:
        """Take in a gradient; start the buckets that can be started."""
        self._of[parameter].put(parameter)
        self._start_full_ones()

    def put_nothing(self) -> None:
        """Take in zeros in the place of all gradients, and start all buckets."""
        for bucket in self._all:
            bucket.put_nothing()
        self._start_full_ones()

    def _start_full_ones(self) -> None:
        while len(self._begun) < len(self._all) and self._all[len(self._begun)].full:
            number = len(self._begun)
            bucket = self._all[number]
            if self._look is not None:
                self._look(bucket)
            label = f"DDP's pass {self._pass}, bucket {number}"
            self._begun.append(self._averaging.begin(bucket, label))

    def awaits(self, parameter: nn.Parameter) -> bool:
        """Whether this parameter's gradient has not come in this pass."""
        return self._of[parameter].awaits(parameter)

    def missing(self) -> list[nn.Parameter]:
        """The parameters whose gradients have not come."""
        return [p for bucket in self._all for p in bucket.missing]

    def finish(self, scale: float = 1) -> None:
        """Wait until all that was started is averaged; scale it. Raises the first error, after all
        ended.
        """
        begun, self._begun = self._begun, []
        self._pass += 1
        for bucket in self._all:
            bucket.open()
        self._averaging.finish(begun)
        if scale != 1:
            for bucket in self._all[: len(begun)]:
                bucket.flat.mul_(scale)


# ------------------------------------------------------------------------------
# Many tensors as few messages: flat copies of them, one dtype and bounded in size.

MESSAGE = 25 << 20  # bytes


def batches(tensors: Iterable[Tensor], size: int) -> Iterator[list[Tensor]]:
    """Cut a list of tensors into runs of one kind and at most `size` bytes (or one tensor)."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for same in by_kind.values():
        batch: list[Tensor] = []
        filled = 0
        for tensor in same:
            if batch and filled + tensor.nbytes > size:
                yield batch
                batch, filled = [], 0
            batch.append(tensor)
            filled += tensor.nbytes
        if batch:
            yield batch


def broadcast_all_(
    tensors: Sequence[Tensor], backend: Backend, root: int, *, label: str = ""
) -> None:
    """Overwrite tensors with those of rank `root`, in place: their storage stays the same.

    label   says in errors what this is; the same on every rank
    """
    if backend.world_size == 1:
        return
    with torch.no_grad():
        for batch in batches(tensors, MESSAGE):
            count = sum(t.numel() for t in batch)
            flat = memory_for(backend, (count,), batch[0].dtype, batch[0].device)
            torch.cat([t.detach().reshape(-1) for t in batch], out=flat)
            start(in_place("broadcast", flat, root=root), backend, label=label).wait()
            if backend.rank != root:
                place = 0
                for tensor in batch:
                    stop = place + tensor.numel()
                    tensor.copy_(flat[place:stop].view(tensor.shape))
                    place = stop
