"""Scalars: a training's logged numbers, as means over the ranks, written by rank 0 in threads.

With every=3, the calls of every rank, and their effects:

    log(0)  log(1)  log(2)        log(3)        log(4)                 ...
    |---- a window -----| close    begin         read: a record of step 2
                        |          async_all_reduce_ of the window's sums and counts
                        numbers on a device start on their way to the host

No rank waits for an exchange that began a whole step ago, nor for a device to finish the step that
is under way. A thread of rank 0 for each target writes.
"""

from __future__ import annotations

import logging
import operator
import os
import queue
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, SupportsFloat

import torch
from torch import Tensor

from phalanx.collectives import PendingCollective, async_all_reduce_
from phalanx.collectives.check_same import difference
from phalanx.core.backend import Backend
from phalanx.errors import DesyncError, MisuseError
from phalanx.hooks import LOGGERS, load
from phalanx.parallel.guards import check_ranks_stay

if TYPE_CHECKING:
    from typing_extensions import Self

log = logging.getLogger("phalanx")

RESERVED = ("step", "time")  # keys of a record besides its scalars
PATIENCE = 120.0
"""Seconds that `close` waits for a target: MLflow may need 30 for a new database."""


class Writer(Protocol):
    """Writes records, in the order of their steps. Raises the errors of the file or logger."""

    def write(self, step: int, means: Mapping[str, float]) -> None:
        """Write the record of a step."""

    def close(self) -> None:
        """Write the rest, and close the target."""


WriterFactory = Callable[[str, int], Writer]
"""Makes a writer of the name of the run, and of the first step that this process logs."""


class Scalars:
    """Means of numbers over ranks and steps, in files and loggers.

        with phalanx.Scalars(backend, to=["jsonl:runs/a.jsonl"]) as scalars:     # on every rank
            for step in range(first, steps):
                scalars.log(step, loss=train(step), lr=rate)

    A record is the mean of all values logged under a name since the last record, on all ranks; it
    belongs to the last of their steps. Means are added up in float64. NaN is written as NaN.

    backend  the ranks that log together; every one of them makes a Scalars, which makes a group
    to       targets of rank 0: "jsonl:FILE", "tensorboard:FOLDER", "mlflow:TRACKING_URI",
             "wandb:offline" or "wandb:online", "trackio". More than one, or none
    every    number of calls of `log` in a record
    name     of the run, for loggers that have runs; by default the program's

    # Notes
    At the first logged step, earlier records of that step and of later ones are dropped, so that no
    step is there twice (see `ops/loggers.py`; to wandb, a run that resumes is another run). So a
    window that a checkpoint cuts is lost in part: save after multiples of `every` steps.

    A failure to write (a full disk, no server) is a warning in the log, once for each target;
    training goes on, and so does the next record.

    Raises, before anything is sent, ValueError for an unknown target, or the same one twice, and
    for an `every` below 1; TypeError for a `to` that is no list; ModuleNotFoundError for a logger's
    package that is missing; and on all ranks `DesyncError` for ranks that differ in these.
    """

    def __init__(
        self,
        backend: Backend,
        to: Sequence[str] = (),
        *,
        every: int = 10,
        name: str | None = None,
    ) -> None:
        if not isinstance(backend, Backend):
            raise TypeError(f"Scalars takes a backend, such as phalanx.init(), not {backend!r}")
        instead = (
            "the ranks that log together come and go. Let one write, behind the block: "
            "if step.done and job.backend.rank == 0"
        )
        check_ranks_stay("Scalars", backend, instead)
        if isinstance(to, str):
            raise TypeError(f"to={to!r}: it takes a list, such as [{to!r}]")
        loggers: Any = load(LOGGERS, f"Scalars(to={list(to)!r})") if to else None
        targets: dict[str, WriterFactory] = {each: loggers.parse(each) for each in to}
        if len(targets) < len(to):
            raise ValueError(f"to={list(to)!r} has a target twice")
        self._every = operator.index(every)
        if self._every < 1:
            raise ValueError(f"every={every!r}: it is the calls of log that are one record, from 1")
        differ = difference([f"to={list(to)}", f"every={every}"], backend, end="nothing")
        if differ is not None:
            raise DesyncError(
                f"rank {backend.rank}: the ranks make different Scalars: {differ.text}",
                rank=backend.rank,
                peer=differ.odd[0],
                op="Scalars",
            )
        self._backend = backend
        self._group = backend.subgroup(range(backend.world_size))
        self._last: int | None = None  # the step that was logged last
        self._window = _Window()
        self._closed: _Window | None = None  # that waits for its exchange
        self._exchanged: tuple[_Window, PendingCollective[Tensor]] | None = None
        self._is_open = True
        name = name or os.path.splitext(os.path.basename(sys.argv[0]))[0] or "run"
        self._targets: list[_Target] = []
        if backend.rank == 0:
            self._targets = [_Target(each, targets[each], name) for each in to]

    def log(self, step: int, **values: SupportsFloat) -> None:
        """Note numbers of a step that has ended. Every rank calls it, with the same names.

        step     its number, larger than the one before; with the same steps on every rank
        values   numbers, and tensors of one element, which may be changed afterwards

        Also calls `backend.progress.log`, with the values on the host.

        Blocks only while other ranks are a whole step behind. TypeError for a value that is no
        number, ValueError for a tensor of several, or a step that does not grow. In a later call,
        and on every rank, `DesyncError` for ranks that log other names or steps, with both; and as
        `all_reduce` does.
        """
        if not self._is_open:
            raise MisuseError(f"rank {self._backend.rank}: log() of a Scalars that is closed")
        step = operator.index(step)
        if self._last is not None and step <= self._last:
            raise ValueError(
                f"rank {self._backend.rank}: log({step}) after log({self._last}): steps grow. Give "
                "all that belongs to a step in one call"
            )
        at_hand = self._window.add(step, values, self._backend.rank)
        self._last = step
        self._backend.progress.log(step, **at_hand)
        self._advance()
        if self._window.calls == self._every:
            self._close_window()

    def _advance(self) -> None:
        """Read a finished exchange, and begin the next."""
        if self._exchanged is not None:
            window, exchange = self._exchanged
            self._exchanged = None
            means = window.means(exchange.wait())
            for target in self._targets:
                target.records.put((window.first, window.step, means))
            on_device = {name: means[name] for name in window.devices}
            if on_device and self._last is not None:
                self._backend.progress.log(self._last, **on_device)
        if self._closed is not None:
            window, self._closed = self._closed, None
            label = f"Scalars.log({window.step}) of {', '.join(window.names) or 'nothing'}"
            exchange = async_all_reduce_(window.sums(), self._group, label=label)
            self._exchanged = window, exchange

    def _close_window(self) -> None:
        self._window.close()
        self._closed, self._window = self._window, _Window()

    def close(self) -> None:
        """Write the values logged since the last record, too. Every rank calls it; blocks until
        rank 0 has written, but for 120 s at most. A second call does nothing.
        """
        if not self._is_open or self._backend.forked:
            return
        self._is_open = False
        try:
            self._advance()
            if self._window.calls:
                self._close_window()
            self._advance()
            self._advance()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        self._is_open = False
        self._group.close()
        for target in self._targets:
            target.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if kind is None:
            self.close()
        elif self._is_open:  # other ranks may be anywhere: only exchanged values are written
            self._let_go()


class _Window:
    """This rank's values for one record."""

    def __init__(self) -> None:
        self.first = self.step = self.calls = 0
        self.names: list[str] = []
        self.devices: dict[str, list[Tensor]] = {}  # numbers on devices, by name
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._on_the_way: list[tuple[str, Tensor, Any]] = []

    def add(self, step: int, values: dict[str, SupportsFloat], rank: int) -> dict[str, float]:
        """Add the numbers of a call; return those that are on the host. All or none."""
        host: dict[str, float] = {}
        devices: dict[str, Tensor] = {}
        for name, value in values.items():
            if name in RESERVED:
                raise ValueError(f"rank {rank}: log({step}) cannot take the name {name!r}")
            if isinstance(value, Tensor) and value.numel() != 1:
                raise ValueError(
                    f"rank {rank}: log({step}) takes tensors of one element, and {name} has shape "
                    f"{list(value.shape)}"
                )
            if isinstance(value, Tensor) and value.device.type != "cpu":
                devices[name] = value.detach().reshape(()).to(torch.float64, copy=True)
                continue
            try:
                host[name] = _number(value)
            except (TypeError, ValueError, RuntimeError, OverflowError) as error:
                raise TypeError(
                    f"rank {rank}: log({step}) takes numbers and tensors of one element, and "
                    f"{name} is {value!r}"
                ) from error
        for name, number in host.items():
            self._sums[name] = self._sums.get(name, 0.0) + number
        for name, tensor in devices.items():
            self.devices.setdefault(name, []).append(tensor)
        for name in values:
            self._counts[name] = self._counts.get(name, 0) + 1
        self.first = self.first if self.calls else step
        self.step = step
        self.calls += 1
        return host

    def close(self) -> None:
        """Let the numbers on devices start on their way to the host."""
        self.names = sorted(self._counts)
        for name, tensors in self.devices.items():
            total = torch.stack([tensor.to(tensors[0].device) for tensor in tensors]).sum()
            copied = total.to("cpu", non_blocking=True)  # into page-locked memory
            event = None
            if total.device.type == "cuda":
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(torch.cuda.current_stream(total.device))
            self._on_the_way.append((name, copied, event))

    def sums(self) -> Tensor:
        """Return the number of calls; then sum and count under each name, in their order.

        So a rank without names sends something, too, which others can compare.
        """
        for name, copied, event in self._on_the_way:
            if event is not None:
                event.synchronize()
            self._sums[name] = self._sums.get(name, 0.0) + copied.item()
        self._on_the_way.clear()
        pairs = [(self._sums[name], self._counts[name]) for name in self.names]
        return torch.tensor([(self.calls, 0), *pairs], dtype=torch.float64)

    def means(self, sums: Tensor) -> dict[str, float]:
        """Return the means, from the sums and counts of all ranks.

        To 15 digits, so that the mean of equal values, such as a learning rate, is that value.
        """
        return {
            name: float(f"{total / count:.15g}")
            for name, (total, count) in zip(self.names, sums.tolist()[1:], strict=True)
        }


def _number(value: object) -> float:
    if isinstance(value, (str, bytes)):  # which float() would read
        raise TypeError("text is no number")
    return float(value.detach() if isinstance(value, Tensor) else value)  # type: ignore[arg-type]


_Record = tuple[int, int, dict[str, float]]
"""The first and the last step that it is of, and the means."""


class _Target:
    """A target of rank 0, written in a thread of its own, since writing may take long."""

    def __init__(self, to: str, make: WriterFactory, name: str) -> None:
        self.records: queue.SimpleQueue[_Record | None] = queue.SimpleQueue()
        self._to, self._make, self._name = to, make, name
        self._warned = False
        self._thread = threading.Thread(target=self._run, name=f"scalars to {to}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        writer: Writer | None = None
        begun: int | None = None
        while (record := self.records.get()) is not None:
            first, step, means = record
            begun = first if begun is None else begun
            try:
                if writer is None:
                    writer = self._make(self._name, begun)
                writer.write(step, means)
            except Exception as error:
                self._warn(f"the record of step {step}", error)
        if writer is not None:
            try:
                writer.close()
            except Exception as error:
                self._warn("its end", error)

    def _warn(self, what: str, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "Scalars cannot write %s to %s: %s. Training goes on; this is said once",
                what,
                self._to,
                f"{type(error).__name__}: {error}",
            )

    def finish(self) -> None:
        """Let the thread write its records, and end."""
        self.records.put(None)
        self._thread.join(PATIENCE)
        if self._thread.is_alive():
            log.warning("Scalars: %s takes more than %g s: it is left", self._to, PATIENCE)
