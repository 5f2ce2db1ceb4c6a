"""A rank that sleeps is woken by what comes in memory, whatever else it waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from time import monotonic, sleep

import pytest
import torch
from clusters import SharedMemory
from waiting import wait_until

import phalanx
from phalanx import Backend
from phalanx.core import backend as backend_module
from phalanx.core.shared_group import SharedGroup
from phalanx.core.steps import Step
from phalanx.transport.tcp.transport import TcpTransport

SELDOM = 6.0  # seconds between looks that are not asked for
ROUNDS = 3


@pytest.fixture(autouse=True)
def who_sleeps_is_not_woken_by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_HEARTBEAT", "60")


def receive_in_a_thread(backend: Backend, into: torch.Tensor) -> Callable[[], None]:
    thread = threading.Thread(target=lambda: backend.recv(into, 1, tag=3))
    thread.start()
    return thread.join


def receive_in_the_background(backend: Backend, into: torch.Tensor) -> Callable[[], None]:
    pending = phalanx.irecv(into, backend, 1, tag=3)
    return lambda: pending.wait() and None


def sum_(backend: Backend) -> None:
    assert phalanx.all_reduce(torch.ones(2), backend).tolist() == [2, 2]


def sum_later(backend: Backend) -> None:
    assert phalanx.async_all_reduce(torch.ones(2), backend).wait().tolist() == [2, 2]


def large_message(backend: Backend) -> None:
    """More than a ring buffer holds: who sends has to be woken when there is room."""
    if backend.rank == 0:
        backend.send(torch.ones(8 << 20), 1)
    else:
        into = torch.zeros(8 << 20)
        backend.recv(into, 0)
        assert bool((into == 1).all())


@pytest.mark.checkered
@pytest.mark.parametrize("call", [sum_, sum_later, large_message])
@pytest.mark.parametrize("receive", [receive_in_a_thread, receive_in_the_background])
def test_a_thread_that_sleeps_for_a_message_is_woken_for_epochs_too(
    receive: Callable[[Backend, torch.Tensor], Callable[[], None]],
    call: Callable[[Backend], None],
) -> None:
    """Rank 0's reactor waits for a message when a thread of it comes to an epoch."""

    def run(backend: Backend) -> float:
        transport = backend.engine.transport
        assert isinstance(transport, TcpTransport)
        transport.first_look = transport.expiry_check = backend.engine.ask_every = SELDOM
        into = torch.zeros(1)
        end = receive(backend, into) if backend.rank == 0 else lambda: None
        if backend.rank == 0:
            wait_until(lambda: transport._driver is not None)
        slowest = 0.0
        for _ in range(ROUNDS):
            if backend.rank == 1:
                sleep(0.02)  # the other comes first
            began = monotonic()
            call(backend)
            slowest = max(slowest, monotonic() - began)
        if backend.rank == 1:
            backend.send(torch.ones(1), 0, tag=3)
        end()
        return slowest

    assert max(SharedMemory().run(run, 2)) < SELDOM / 2


def test_a_young_work_is_moved_by_who_waits_for_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The background thread is woken when it is issued, and looks at nobody's steps."""
    monkeypatch.setattr(backend_module, "PATIENCE", 1e6)
    movers: set[str] = set()

    def epochs(shared: SharedGroup) -> Iterator[Step]:
        for number in range(4):
            movers.add(threading.current_thread().name)
            yield shared.epoch(first=number == 0)

    def run(backend: Backend) -> str:
        backend.links = backend.links._replace(processors=1)  # so ranks have none to spare
        assert backend.shared is not None
        for _ in range(200):
            backend.issue("epochs", epochs(backend.shared), background=True).wait()
        return threading.current_thread().name

    assert movers == set(SharedMemory().run(run, 2))
