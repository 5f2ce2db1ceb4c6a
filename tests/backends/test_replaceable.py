"""A backend whose inside is replaced: ranks that are left go on in another group."""

from __future__ import annotations

import threading

import pytest
import torch
from clusters import PATIENCE, TIMEOUT, Hybrid, SharedMemory, Simulated, Tcp, Threads, Wide
from waiting import wait_until

import phalanx
from phalanx import Backend, MisuseError, PeerLostError
from phalanx.core.replaceable import ReplaceableBackend

WAYS = [Simulated(), Tcp(), SharedMemory(), Hybrid(), Wide()]
ways = pytest.mark.parametrize("ranks", WAYS, ids=str)
ONES = torch.ones(3)


# `lost`: which ranks are gone -----------------------------------------------------------------


@ways
def test_who_is_gone_is_told_without_waiting_and_with_the_reason(ranks: Threads) -> None:
    nobody_is_gone, told = threading.Barrier(4), threading.Event()

    def look(backend: Backend) -> dict[int, str]:
        backend.barrier()
        assert backend.lost() == {}
        nobody_is_gone.wait(PATIENCE)
        if backend.rank == 0:
            wait_until(lambda: len(backend.lost()) == 2)
            lost = backend.lost()
            told.set()
            return lost
        if backend.rank == 1:
            backend.abort()
        elif backend.rank == 2:
            backend.close()
        assert told.wait(PATIENCE)
        return {}

    lost = ranks.run(look, 4)[0]
    assert list(lost) == [1, 2]
    assert "lost" in lost[1] or "connection" in lost[1]
    assert lost[2] == "rank 2 left"


@ways
def test_a_broken_group_tells_of_the_next_rank_that_is_lost(ranks: Threads) -> None:
    all_have_met = threading.Barrier(3)
    broken, told = threading.Event(), threading.Event()

    def look(backend: Backend) -> list[int]:
        all_have_met.wait(PATIENCE)  # or rank 1 might lose rank 2 while it still connects
        if backend.rank == 2:
            backend.abort()
        else:
            with pytest.raises(PeerLostError):
                phalanx.all_reduce(ONES, backend)
            if backend.rank == 1:
                assert broken.wait(PATIENCE)
                backend.abort()
        if backend.rank == 0:
            wait_until(lambda: list(backend.lost()) == [2])
            broken.set()
            wait_until(lambda: len(backend.lost()) == 2)
            told.set()
        assert told.wait(PATIENCE)
        return list(backend.lost()) if backend.rank == 0 else []

    assert ranks.run(look, 3)[0] == [1, 2]


@ways
def test_a_group_tells_of_its_own_ranks_by_their_numbers_in_it(ranks: Threads) -> None:
    all_are_done, told = threading.Barrier(4), threading.Event()

    def look(backend: Backend) -> dict[str, list[int]]:
        groups = {"both": [1, 3], "without": [0, 1]}
        mine = {name: backend.subgroup(of) for name, of in groups.items() if backend.rank in of}
        backend.barrier()
        all_are_done.wait(PATIENCE)
        if backend.rank == 3:
            backend.abort()
        elif backend.rank == 1:
            wait_until(lambda: bool(backend.lost()))
            told.set()
        assert told.wait(PATIENCE)
        return {name: list(group.lost()) for name, group in mine.items() if backend.rank == 1}

    assert ranks.run(look, 4)[1] == {"both": [1], "without": []}


@ways
def test_who_has_left_a_group_alone_is_gone_from_that_alone(ranks: Threads) -> None:
    told = threading.Event()

    def look(backend: Backend) -> tuple[list[int], list[int]]:
        group = backend.subgroup([0, 1])
        group.barrier()
        if backend.rank == 1:
            group.close()
            assert told.wait(PATIENCE)
            return [], []
        wait_until(lambda: bool(group.lost()))
        told.set()
        return list(group.lost()), list(backend.lost())

    assert ranks.run(look, 2)[0] == ([1], [])


# `enter`: the next group -----------------------------------------------------------------------


@ways
def test_those_who_are_left_go_on_as_the_ranks_of_another_group(ranks: Threads) -> None:
    """Rank 1 of 3 is lost; the others change places."""
    makers, all_are_done = ranks.makers(2, TIMEOUT), threading.Barrier(3)

    def be_a_rank(inner: Backend) -> int:
        backend = ReplaceableBackend(inner)
        assert phalanx.all_reduce(ONES, backend).tolist() == [3] * 3
        all_are_done.wait(PATIENCE)
        if backend.rank == 1:
            backend.abort()
            return -1
        with pytest.raises(PeerLostError):
            phalanx.all_reduce(ONES, backend)
        backend.inner.abort()
        backend.enter(makers[0 if inner.rank == 2 else 1]())
        with backend:
            use(backend)
            return backend.rank

    def use(backend: Backend) -> None:
        rank, other = backend.rank, 1 - backend.rank
        mine, into = torch.full((3,), float(rank + 1)), torch.empty(3)
        in_memory = backend.empty(3).copy_(mine)
        for tensor in (mine, in_memory):
            assert phalanx.all_reduce(tensor, backend).tolist() == [3] * 3
        assert phalanx.all_gather(mine, backend).flatten().tolist() == [1] * 3 + [2] * 3
        backend.sendrecv(mine, other, into, other)
        assert into.tolist() == [other + 1] * 3
        alone = backend.subgroup([rank])
        assert phalanx.all_reduce(mine, alone).tolist() == mine.tolist()
        if (memory := backend.common(2)) is not None:
            memory[rank] = rank + 1
            backend.barrier()
            assert memory.tolist() == [1, 2]
        backend.barrier()

    assert ranks.run(be_a_rank, 3) == [1, -1, 0]


def test_a_replaceable_backend_has_all_that_a_backend_has() -> None:
    inner = phalanx.SimulatedBackend.create_group(1)[0]
    plain = Backend(inner.engine, inner.group)
    assert vars(ReplaceableBackend(inner)).keys() == {*vars(plain), "devices", "inner"}


@ways
def test_what_upper_layers_keep_begins_anew_and_progress_goes_on_as_the_new_rank(
    ranks: Threads,
) -> None:
    makers = ranks.makers(2, TIMEOUT)

    def be_a_rank(inner: Backend) -> None:
        backend = ReplaceableBackend(inner)
        backend.cache["old"] = backend.kept["old"] = True
        progress, rank = backend.progress, 1 - inner.rank
        progress.log(7, loss=1.0)
        inner.close()
        backend.enter(makers[rank]())
        assert "old" not in backend.cache
        assert not backend.kept
        assert backend.progress is progress is backend.inner.progress
        assert progress.latest.number == 7
        with pytest.raises(TypeError, match=f"^rank {rank}: progress"):
            progress.log(8, loss="much")  # type: ignore[arg-type]
        backend.close()

    ranks.run(be_a_rank, 2)


@ways
def test_a_call_of_the_group_before_ends_with_its_error(ranks: Threads) -> None:
    makers, both_have_called = ranks.makers(2, TIMEOUT), threading.Barrier(2)

    def be_a_rank(inner: Backend) -> None:
        backend = ReplaceableBackend(inner)
        pending = phalanx.irecv(bytearray(1), backend, 1 - backend.rank)
        old = backend.subgroup([0, 1])
        both_have_called.wait(PATIENCE)
        backend.inner.abort()
        backend.enter(makers[inner.rank]())
        with pytest.raises(phalanx.DistributedError, match=r"closed|lost"):
            pending.wait()
        with pytest.raises(MisuseError, match="closed"):
            old.barrier()
        backend.barrier()
        backend.close()

    ranks.run(be_a_rank, 2)


def test_it_enters_neither_itself_nor_what_is_closed() -> None:
    first, second = (phalanx.SimulatedBackend.create_group(1)[0] for _ in range(2))
    backend = ReplaceableBackend(first)
    with pytest.raises(MisuseError, match=r"^rank 0: a backend cannot enter itself"):
        backend.enter(backend)
    second.close()
    with pytest.raises(MisuseError, match=r"^rank 0: a backend cannot enter .* closed"):
        backend.enter(second)
    assert phalanx.all_reduce(ONES, backend).tolist() == [1] * 3
