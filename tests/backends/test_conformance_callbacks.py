"""What is told when something asynchronous is done."""

from __future__ import annotations

import logging
import threading

import pytest
import torch
from clusters import PATIENCE, Cluster, Cooperative, Simulated, Tcp

import phalanx
from phalanx import Backend, PeerLostError, SimulatedBackend


class Calls:
    """A callback that remembers with what it was called, and may be waited for."""

    def __init__(self) -> None:
        self.works: list[object] = []
        self._called = threading.Event()

    def __call__(self, work: object) -> None:
        self.works.append(work)
        self._called.set()

    def wait(self) -> list[object]:
        assert self._called.wait(PATIENCE), "it was not called"
        return self.works


def test_a_callback_is_called_once_with_the_work_when_that_is_done(cluster: Cluster) -> None:
    def run(backend: Backend) -> None:
        calls = Calls()
        pending = phalanx.async_all_reduce(torch.ones(3), backend)
        pending.on_done(calls)
        assert pending.wait().tolist() == [2.0] * 3
        assert calls.wait() == [pending]
        pending.wait()
        backend.barrier()
        assert calls.works == [pending], "a second time"

    cluster.run(run, 2)


def test_of_what_is_done_already_it_is_called_at_once(cluster: Cluster) -> None:
    def run(backend: Backend) -> None:
        pending = phalanx.async_all_reduce(torch.ones(3), backend)
        pending.wait()
        calls = Calls()
        pending.on_done(calls)
        assert calls.works == [pending]

    cluster.run(run, 2)


def test_it_is_called_of_what_fails_too_and_the_error_is_there(cluster: Cluster) -> None:
    def run(backend: Backend) -> None:
        if backend.rank == 1:
            backend.close()
            return
        calls = Calls()
        pending = phalanx.irecv(bytearray(1), backend, 1)
        pending.on_done(calls)
        with pytest.raises(PeerLostError):
            pending.wait()
        assert calls.wait() == [pending]
        assert pending.done()

    cluster.run(run, 2)


def test_whoever_waits_for_what_is_done_already_has_had_its_callbacks_called() -> None:
    """Ranks that are threads of one process move each other's works on, but call no callbacks."""
    first, second = SimulatedBackend.create_group(2)
    for look in (lambda pending: pending.wait(), lambda pending: pending.done()):
        calls = Calls()
        pending = phalanx.irecv(bytearray(1), first, 1)
        pending.on_done(calls)
        second.send(b"x", 0)
        look(pending)
        assert calls.works == [pending]
    first.close()
    second.close()


def test_a_callback_may_issue_works_and_wait_for_them(cluster: Cluster) -> None:
    def run(backend: Backend) -> None:
        other = 1 - backend.rank
        sums: list[list[float]] = []
        over = Calls()

        def go_on(work: object) -> None:
            into = bytearray(1)
            backend.sendrecv(bytes([backend.rank]), other, into, other)
            sums.append(phalanx.async_all_reduce(torch.ones(2), backend).wait().tolist())
            over(into[0])

        pending = phalanx.async_all_reduce(torch.ones(3), backend)
        pending.on_done(go_on)
        pending.wait()
        assert over.wait() == [other]
        assert sums == [[2.0, 2.0]]

    cluster.run(run, 2)


def test_what_a_callback_raises_is_logged_and_nobody_elses_business(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.ERROR, "phalanx")

    def run(backend: Backend) -> None:
        calls = Calls()

        def fail(work: object) -> None:
            raise ArithmeticError("a bad callback")

        pending = phalanx.async_all_reduce(torch.ones(3), backend)
        pending.on_done(fail)
        pending.on_done(calls)
        assert pending.wait().tolist() == [2.0] * 3
        assert calls.wait() == [pending]
        backend.barrier()

    for cluster in (Cooperative(), Simulated(), Tcp()):
        caplog.clear()
        cluster.run(run, 2)
        assert len(caplog.records) == 2
        for told in caplog.records:
            assert "a callback of all_reduce #0" in told.message
            assert told.exc_info is not None
            assert isinstance(told.exc_info[1], ArithmeticError)
