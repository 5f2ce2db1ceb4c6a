"""Where ranks cannot share memory all of them say who, and why; or they do without, and say so."""

from __future__ import annotations

import errno
import logging
import os
import threading
from functools import partial
from typing import Any

import pytest
import torch
from clusters import SharedMemory

import phalanx
from phalanx import Backend, BackendUnavailableError, HybridBackend, SharedMemoryBackend
from phalanx.transport.tcp.transport import TcpTransport

SIZE = 3
plain_open = os.open


class OnHosts(SharedMemory):
    """Ranks 0 and 2 on one host, rank 1 on another."""

    def host(self, rank: int) -> str:
        return "a" if rank == 1 else "b"


def is_odd() -> bool:
    return threading.current_thread().name == "rank 1"


def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1's system has no memfd."""
    plain = os.memfd_create

    def memfd_create(*args: Any) -> int:
        if is_odd():
            raise OSError(errno.ENOSYS, "Function not implemented")
        return plain(*args)

    monkeypatch.setattr(os, "memfd_create", memfd_create)


def no_memory_of_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """This is not Linux."""
    monkeypatch.delattr(os, "memfd_create")


def other_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 may not look at other ranks' processes."""

    def open_(path: Any, *args: Any, **options: Any) -> int:
        if is_odd() and str(path).startswith("/proc/") and "/fd/" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return plain_open(path, *args, **options)

    monkeypatch.setattr(os, "open", open_)


TROUBLES = {
    "one has no memfd": (no_memory, "Function not implemented"),
    "none has": (no_memory_of_any, "memfd"),
    "another user's": (other_users, "Permission denied"),
}


def errors_of(cluster: SharedMemory) -> list[BackendUnavailableError]:
    """What each rank raises when it makes its backend."""
    errors: dict[int, BackendUnavailableError] = {}

    def attempt(rank: int, make: Any) -> None:
        try:
            make().close()
        except BackendUnavailableError as error:
            errors[rank] = error

    threads = [
        threading.Thread(target=attempt, args=(rank, make), name=f"rank {rank}")
        for rank, make in enumerate(cluster.makers(SIZE, 8.0))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [errors[rank] for rank in range(SIZE)]


@pytest.mark.parametrize("trouble", TROUBLES.values(), ids=TROUBLES.keys())
def test_every_rank_says_who_cannot_and_why(
    trouble: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bring_about, why = trouble
    bring_about(monkeypatch)
    everyone = bring_about is no_memory_of_any
    for rank, error in enumerate(errors_of(SharedMemory())):
        assert f"rank {rank}: the ranks do not share memory: " in str(error)
        assert ("rank 0 says" if everyone else "rank 1 says") in str(error)
        assert why in str(error)
        assert "'tcp'" in str(error)
        culprit = 0 if everyone else 1
        assert (error.rank, error.peer) == (rank, None if rank == culprit else culprit)


def test_ranks_of_other_hosts_are_told_to_use_another_backend() -> None:
    for rank, error in enumerate(errors_of(OnHosts())):
        assert error.rank == rank
        assert "is on another host" in str(error)
        assert "'hybrid'" in str(error)


@pytest.mark.parametrize("kind", [SharedMemoryBackend, HybridBackend])
@pytest.mark.parametrize("trouble", TROUBLES.values(), ids=TROUBLES.keys())
def test_who_may_fall_back_does_all_over_tcp_and_logs_one_line(
    trouble: tuple[Any, str],
    kind: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    bring_about, why = trouble
    bring_about(monkeypatch)
    cluster = SharedMemory()
    cluster.kind = partial(kind, fall_back=True)  # type: ignore[assignment]

    def run(backend: Backend) -> list[float]:
        transport = backend.engine.transport
        assert isinstance(transport, TcpTransport)
        assert transport.domain is None
        assert backend.group.shared is None
        inside = backend.subgroup([0, 2]) if backend.rank != 1 else None
        assert inside is None or phalanx.all_reduce(backend.empty(3).fill_(1), inside).sum() == 6
        return phalanx.all_reduce(torch.ones(100_000), backend)[-2:].tolist()

    with caplog.at_level(logging.WARNING, "phalanx"):
        assert cluster.run(run, SIZE) == [[SIZE, SIZE]] * SIZE
    (line,) = [record.getMessage() for record in caplog.records]
    assert "do not share memory" in line
    assert "all goes over TCP" in line
    assert why in line


def test_hosts_of_one_rank_and_of_several_may_fall_back_to_sharing_what_they_can() -> None:
    cluster = OnHosts()
    cluster.kind = partial(SharedMemoryBackend, fall_back=True)  # type: ignore[assignment]

    def run(backend: Backend) -> int:
        assert phalanx.all_reduce(torch.ones(100_000), backend).sum() == 300_000
        control = backend.group.shared
        return control.size if control is not None else 1

    assert cluster.run(run, SIZE) == [2, 1, 2]
