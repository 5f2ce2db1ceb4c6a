"""Ways to run DDP in a test, and the plain runs that it is compared with."""

from __future__ import annotations

import inspect
import socket
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from phalanx import Backend, SimulatedBackend, TcpBackend
from phalanx.parallel.naive_ddp import NaiveDDP

HANGS_AFTER = 60.0  # seconds
Gradients = dict[str, "Tensor | None"]


def rows_of(batch: Tensor, backend: Backend) -> Tensor:
    """This rank's share of a batch."""
    share = len(batch) // backend.world_size
    return batch[backend.rank * share : (backend.rank + 1) * share]


def gradients(module: nn.Module) -> Gradients:
    """A copy of all gradients, by name."""
    return {
        name: None if p.grad is None else p.grad.detach().clone()
        for name, p in module.named_parameters()
    }


def values(module: nn.Module) -> dict[str, Tensor]:
    """A copy of all parameters and buffers, by name."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def mean_of(per_rank: list[Gradients]) -> Gradients:
    """The mean over ranks; None counts as zeros, unless it is None everywhere."""
    mean: Gradients = {}
    for name in per_rank[0]:
        known = [grads[name] for grads in per_rank if grads[name] is not None]
        mean[name] = torch.stack(known).sum(0) / len(per_rank) if known else None
    return mean


def naive_gradients(
    build: Callable[[], nn.Module], world_size: int, step: Callable[[nn.Module, int], object]
) -> Gradients:
    """The oracle: the gradients of a naive DDP, after `step(model, rank)` on every rank.

    None where no rank has had one. A naive DDP leaves the ranks alone until it averages, so here
    they take their steps one after the other; `test_naive_ddp` is about those that average.
    """
    (backend,) = SimulatedBackend.create_group(1)
    per_rank = []
    for rank in range(world_size):
        naive = NaiveDDP(build(), backend)
        step(naive, rank)
        per_rank.append(gradients(naive.module))
    return mean_of(per_rank)


def assert_close(found: Gradients, expected: Gradients, **tolerance: float) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        if value is None:
            assert found[name] is None, f"{name} has a gradient"
        else:
            assert found[name] is not None, f"{name} has no gradient"
            torch.testing.assert_close(
                found[name], value, msg=lambda text, name=name: f"{name}: {text}", **tolerance
            )


def assert_same_bits(per_rank: list[Any]) -> None:
    """Dictionaries of tensors, one of each rank, are equal to the last bit."""
    for other in per_rank[1:]:
        assert list(other) == list(per_rank[0])
        for name, value in per_rank[0].items():
            assert value is other[name] is None or torch.equal(value, other[name]), name


def outcome_of(fn: Callable[[], Any]) -> BaseException | None:
    """The error that a call raises, for tests that look at those of all ranks."""
    try:
        fn()
    except Exception as error:
        return error
    return None


class Watched:
    """Writes down which collectives a backend starts, what it sends, and what a test notes."""

    def __init__(self, backend: Backend) -> None:
        self.events: list[str] = []
        self.bytes_sent = 0
        transport = backend.engine.transport
        send_one = transport.send

        def watched(start: Any) -> Any:
            arguments = inspect.signature(start)

            def watched_start(name: str, *args: Any, **options: Any) -> Any:
                given = arguments.bind(name, *args, **options).arguments
                self.events.append(f"{name} {given.get('signature', '')}")
                return start(name, *args, **options)

            return watched_start

        def watched_send(send: Any) -> None:
            self.bytes_sent += len(send.view)
            send_one(send)

        backend.issue = watched(backend.issue)  # type: ignore[method-assign]
        backend.run = watched(backend.run)  # type: ignore[method-assign]
        transport.send = watched_send  # type: ignore[method-assign]

    def clear(self) -> None:
        self.events.clear()
        self.bytes_sent = 0

    def sizes(self) -> list[str]:
        """The shapes of the gradients' all-reduces, in the order in which they were started."""
        return [
            event[event.index("[") : event.index("]") + 1]
            for event in self.events
            if event.startswith("all_reduce") and ", mean" in event
        ]


def over_tcp(fn: Callable[[Backend], Any], world_size: int, *, timeout: float = 30.0) -> list[Any]:
    """Run `fn(backend)` on ranks that are threads of this process and talk over TCP."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    results: dict[int, Any] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            own = listener if rank == 0 else None
            with TcpBackend(rank, world_size, address, timeout=timeout, listener=own) as backend:
                try:
                    results[rank] = fn(backend)
                except BaseException:
                    backend.abort()
                    raise
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANGS_AFTER)
        assert not thread.is_alive(), f"{thread.name} hangs"
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(world_size)]
