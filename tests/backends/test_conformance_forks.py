"""A child that a rank forks, on every kind of backend: what it may do with what the rank has made.

Nothing: every call raises at once, and closing does nothing, as in a data loader's worker that has
a copy of the backend. The rank goes on as if there were no child.
"""

from __future__ import annotations

import gc
import os
import threading
import weakref

import pytest
import torch
from children import said_by_child
from clusters import CLUSTERS, Cluster
from torch import nn

import phalanx
from phalanx import Backend, MisuseError, SimulatedBackend
from phalanx.core.engine import Engine, ForkedEngine, _engines_of_this_process

OF_PROCESSES = [each for each in CLUSTERS if each.name in ("tcp", "shm", "hybrid", "gloo")]
SHARED = [each for each in CLUSTERS if each.name == "shm"]
of_processes = pytest.mark.parametrize("ranks", OF_PROCESSES, ids=str)
shared = pytest.mark.parametrize("ranks", SHARED, ids=str)


def refused(backend: Backend, work: phalanx.PendingCollective[torch.Tensor]) -> str:
    """Whatever is called in a child says what the child is; "" if so, else what does not."""
    peer, rank = 1 - backend.rank, backend.ranks[backend.rank]
    calls = {
        "barrier": backend.barrier,
        "send": lambda: backend.send(b"x", peer),
        "isend": lambda: backend.isend(b"x", peer),
        "recv": lambda: backend.recv(bytearray(1), peer),
        "irecv": lambda: backend.irecv(bytearray(1), None),
        "sendrecv": lambda: backend.sendrecv(b"x", peer, bytearray(1), peer),
        "all_reduce": lambda: phalanx.all_reduce(torch.ones(2), backend),
        "all_reduce_": lambda: phalanx.all_reduce_(torch.ones(50_000), backend),
        "async_all_gather": lambda: phalanx.async_all_gather(torch.ones(2), backend),
        "all_gather_object": lambda: phalanx.all_gather_object("x", backend),
        "subgroup": lambda: backend.subgroup([0, 1]),
        "empty": lambda: backend.empty(3),
        "common": lambda: backend.common(3),
        "counters": backend.counters,
        "progress": lambda: backend.progress.log(1, loss=0.0),
        "DDP": lambda: phalanx.DDP(nn.Linear(2, 2), backend),
        "wait": work.wait,
        "wait(1)": lambda: work.wait(1.0),
        "done": work.done,
        "cancel": lambda: work.cancel("no"),
        "on_done": lambda: work.on_done(print),
        "wait_any": lambda: phalanx.wait_any([work]),
    }
    wrong = []
    for name, call in calls.items():
        try:
            call()
        except MisuseError as error:
            text = f"rank {rank}: this process ({os.getpid()}) was forked from rank "
            if not str(error).startswith(text) or f"(process {os.getppid()})" not in str(error):
                wrong.append(f"{name}: {error}")
            elif error.rank != rank or error.__context__ is not None:
                wrong.append(f"{name}: {error!r}, {error.__context__!r}")
        else:
            wrong.append(name)
    return "\n".join(wrong)


def test_every_call_in_a_child_is_misuse_and_the_rank_goes_on(cluster: Cluster) -> None:
    def fork(backend: Backend) -> str:
        begun = phalanx.async_all_reduce(torch.full((30_000,), 1.0), backend)
        said = said_by_child(lambda: refused(backend, begun))
        assert begun.wait()[-1] == 2.0
        said += said_by_child(lambda: refused(backend, begun))  # now that it is over
        assert phalanx.all_reduce(torch.ones(3), backend).tolist() == [2.0] * 3
        return said

    assert cluster.run(fork, 2) == ["", ""]


def test_the_end_of_a_backend_in_a_child_does_nothing_and_says_nothing(cluster: Cluster) -> None:
    def end(*backends: Backend) -> str:
        for backend in backends:
            with backend:
                pass
            backend.close()
            backend.abort()
            backend.fail(MisuseError("it is not for a child to break the group"))
        return ""

    def fork(backend: Backend) -> str:
        group = backend.subgroup([0, 1])
        said = said_by_child(lambda: end(group, backend))
        assert phalanx.all_reduce(torch.ones(3), backend).tolist() == [2.0] * 3
        assert phalanx.all_reduce(torch.ones(3), group).tolist() == [2.0] * 3
        return said

    assert cluster.run(fork, 2) == ["", ""]


def test_a_child_does_not_wait_for_a_lock_that_a_thread_of_its_parent_holds(
    cluster: Cluster,
) -> None:
    held, over = threading.Event(), threading.Event()

    def hold(lock: threading.RLock) -> None:
        with lock:
            held.set()
            over.wait()

    def fork(backend: Backend) -> str:
        if backend.rank:
            return ""
        begun = backend.irecv(bytearray(1), 1)
        locks = backend.engine.lock, backend.engine.finishing
        threads = [threading.Thread(target=hold, args=(lock,)) for lock in locks]
        for thread in threads:
            thread.start()
            held.wait()
            held.clear()
        said = said_by_child(lambda: refused(backend, begun))  # type: ignore[arg-type]
        said += said_by_child(backend.close)
        over.set()
        for thread in threads:
            thread.join()
        begun.cancel("this test is over")
        return said

    assert cluster.run(fork, 2)[0] == "None"


@pytest.mark.parametrize("ranks", [each for each in OF_PROCESSES if each.name != "gloo"], ids=str)
def test_what_a_child_makes_anew_works(ranks: Cluster) -> None:
    """But for Gloo: its own threads do not survive a fork."""

    def make(backend: Backend) -> None:
        got = ranks.run(lambda new: phalanx.all_reduce(torch.ones(3), new).tolist(), 2)
        assert got == [[2.0] * 3] * 2
        grandchild = said_by_child(lambda: ranks.run(lambda new: new.barrier(), 2))
        assert grandchild == "[None, None]"

    def fork(backend: Backend) -> str:
        said = said_by_child(lambda: make(backend)) if backend.rank == 0 else "None"
        assert phalanx.all_reduce(torch.ones(3), backend).tolist() == [2.0] * 3
        return said

    assert ranks.run(fork, 2) == ["None", "None"]


@shared
def test_a_child_reads_shared_memory_and_writes_in_its_own(ranks: Cluster) -> None:
    def fork(backend: Backend) -> str:
        shown = backend.empty(1000)
        shown.fill_(3.0)
        control = backend.engine.groups[0].shared.words  # type: ignore[union-attr]

        def write() -> bool:
            was_readable = bool((shown == 3.0).all())
            shown.fill_(4.0)
            control[:] = memoryview(bytearray(len(control) * 8)).cast("Q")
            return was_readable and bool((shown == 4.0).all())

        backend.barrier()
        before = bytes(control)
        said = said_by_child(write)
        assert bytes(control) == before
        assert phalanx.all_reduce(shown, backend).eq(6.0).all()
        return said

    assert ranks.run(fork, 2) == ["True", "True"]


def test_a_fork_is_told_of_living_backends_only_and_once() -> None:
    """Python keeps what it calls after a fork for ever: that must not be one for each backend."""
    gc.collect()
    SimulatedBackend.create_group(1)
    before = len(_engines_of_this_process())
    for _ in range(20):
        backends = SimulatedBackend.create_group(3)
        gone = weakref.ref(backends[0].engine)
        del backends
        gc.collect()
    assert gone() is None
    assert len(_engines_of_this_process()) <= before + 6


def test_whatever_is_asked_of_an_engine_in_a_child_raises() -> None:
    def ask() -> str:
        names = {name for name in [*vars(engine), *dir(Engine)] if not name.startswith("__")}
        answered = set()
        for name in names:
            try:
                getattr(engine, name)
            except MisuseError:
                continue
            answered.add(name)
        return f"{type(engine) is ForkedEngine} {answered}"

    engine = SimulatedBackend.create_group(1)[0].engine
    assert said_by_child(ask) == "True {'forked'}"
