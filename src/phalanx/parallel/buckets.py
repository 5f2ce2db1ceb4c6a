"""Buckets: gradients that are averaged together, as one message.

    bucket 0                     bucket 1
    [ head.bias | head.weight ]  [ body.bias | body.weight ]   flat memory, one dtype each

Each gradient is a view into its bucket, so that it is averaged where it lies. Buckets are started
in their order, the same on every rank, whatever the order in which gradients come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor, nn

from phalanx.backends.base import Backend
from phalanx.collectives import PendingCollective, ReduceOp
from phalanx.collectives.run import start
from phalanx.collectives.task import in_place, memory_for
from phalanx.parallel.tensors import batches


class Bucket:
    """Flat memory for the gradients of some parameters of one dtype."""

    def __init__(self, parameters: list[nn.Parameter], backend: Backend) -> None:
        self.parameters = parameters
        count, first = sum(p.numel() for p in parameters), parameters[0]
        self.flat = memory_for(backend, (count,), first.dtype, first.device)
        self.pending: PendingCollective[Tensor] | None = None
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

    def start(self, backend: Backend, label: str) -> None:
        """Begin to average with the buckets of that label on the other ranks."""
        self.pending = start(
            in_place("all_reduce", self.flat, op=ReduceOp.MEAN),
            backend,
            background=backend.spares_a_processor,
            label=label,
        )

    def finish(self, scale: float) -> None:
        """Wait for the average, scale it, and be ready for the next gradients."""
        pending, self.pending = self.pending, None
        self._missing = set(self.parameters)
        if pending is not None:
            pending.wait()
            if scale != 1:
                self.flat.mul_(scale)


class Buckets:
    """All gradients of a model, in buckets of about `size` bytes.

    look   is shown each bucket when it is full, before it is averaged
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        backend: Backend,
        size: int,
        look: Callable[[Bucket], None] | None = None,
    ) -> None:
        self._backend = backend
        self._look = look
        self._all = [
            Bucket([p for p in batch if isinstance(p, nn.Parameter)], backend)
            for batch in batches(parameters, size)
        ]
        self._of = {p: bucket for bucket in self._all for p in bucket.parameters}
        self._started = 0
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
        return self._started > 0 or any(
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
        while self._started < len(self._all) and self._all[self._started].full:
            bucket = self._all[self._started]
            if self._look is not None:
                self._look(bucket)
            bucket.start(self._backend, f"DDP's pass {self._pass}, bucket {self._started}")
            self._started += 1

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
        self._started = 0
        self._pass += 1
        problem: BaseException | None = None
        for bucket in self._all:
            try:
                bucket.finish(scale)
            except Exception as error:
                problem = problem or error
        if problem is not None:
            raise problem
