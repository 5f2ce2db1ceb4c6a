"""Collectives of another library as steps, beside a mesh: with a library in memory."""

from __future__ import annotations

import threading

import pytest
import torch
from loop_library import Looped

import phalanx
from phalanx import (
    Backend,
    CollectiveTimeoutError,
    DesyncError,
    PeerLostError,
    UnsupportedOperationError,
)
from phalanx.native.base import TELL_EVERY

LARGE = bytes(range(256)) * (3 << 12)  # 3 MiB


def test_the_librarys_collectives_and_messages_go_on_side_by_side() -> None:
    def run(backend: Backend) -> None:
        rank, right, left = backend.rank, (backend.rank + 1) % 3, (backend.rank - 1) % 3
        receive = phalanx.irecv(into := bytearray(len(LARGE)), backend, left)
        pending = [phalanx.async_all_reduce(torch.full((3,), float(n)), backend) for n in range(20)]
        backend.send(LARGE, right)
        assert receive.wait() == left
        assert into == LARGE
        mean = phalanx.all_reduce(torch.full((5000,), float(rank)), backend, phalanx.ReduceOp.MEAN)
        assert mean.unique().tolist() == [1.0]
        for n, each in enumerate(pending):
            assert each.wait().tolist() == [3.0 * n] * 3
        pair = backend.subgroup({0, 1}) if rank != 2 else None
        if pair is not None:
            assert phalanx.all_reduce(torch.ones(1), pair).item() == 2
        backend.barrier()

    Looped().run(run, 3)


def test_a_member_that_does_not_come_to_form_a_group_is_named() -> None:
    cluster, gave_up = Looped(), threading.Event()

    def run(backend: Backend) -> None:
        group = backend.subgroup([0, 1])
        if backend.rank == 0:
            with pytest.raises(CollectiveTimeoutError, match=r"rank 1.* has made no") as info:
                phalanx.all_reduce(torch.ones(1), group, timeout=0.3)
            assert info.value.peer == 1
            gave_up.set()
        assert gave_up.wait(20)
        assert phalanx.all_reduce(torch.ones(1), backend).item() == 2

    cluster.run(run, 2)
    assert not cluster.libraries[0].loop.groups, "nobody waits in the library"


def test_an_asynchronous_collective_ends_while_nobody_waits_for_it() -> None:
    def run(backend: Backend) -> None:
        over = threading.Event()
        pending = phalanx.async_all_reduce(torch.ones(2), backend)
        pending.on_done(lambda _: over.set())
        assert over.wait(20)
        assert pending.wait().tolist() == [2.0, 2.0]

    Looped().run(run, 2)


def test_an_error_of_the_librarys_breaks_the_group_in_its_words() -> None:
    cluster = Looped()

    def run(backend: Backend) -> None:
        phalanx.all_reduce(torch.ones(1), backend)
        backend.barrier()
        cluster.libraries[0].loop.broken = "the cable was pulled.\nand more"
        with pytest.raises(
            PeerLostError, match=r"rank \d: all_reduce #2 \(.*Loop says: the cable was pulled"
        ) as info:
            phalanx.all_reduce(torch.ones(1), backend)
        assert info.value.peer is None, "nobody knows who"
        with pytest.raises(PeerLostError, match="the group is broken"):
            backend.barrier()

    cluster.run(run, 2)


def test_the_one_that_left_is_named_rather_than_what_the_library_says() -> None:
    def run(backend: Backend) -> None:
        if backend.rank == 1:
            backend.recv(bytearray(1), 0)
            backend.close()
            return
        pending = phalanx.async_all_reduce(torch.ones(1), backend)
        backend.send(b"!", 1)
        with pytest.raises(PeerLostError, match="rank 1 left") as info:
            pending.wait()
        assert info.value.peer == 1

    Looped().run(run, 2)


@pytest.mark.parametrize("waits_before", [0, 1])
def test_an_interrupt_while_the_library_is_waited_for_breaks_the_group(
    waits_before: int,
) -> None:
    """In the call itself, or (1) in the work that goes on with what is not over soon."""
    waits = iter(range(waits_before))

    def interrupted() -> bool:
        if next(waits, None) is None:
            raise KeyboardInterrupt
        return False

    cluster = Looped()

    def run(backend: Backend) -> None:
        if backend.rank == 1:
            with pytest.raises(phalanx.PeerLostError, match="interrupted by KeyboardInterrupt"):
                backend.recv(bytearray(1), 0)
            return
        cluster.libraries[0].loop.at_wait = interrupted
        with pytest.raises(KeyboardInterrupt):
            phalanx.all_reduce(torch.ones(1), backend)
        assert cluster.libraries[0].loop.broken, "the library leaves the tensor alone"
        with pytest.raises(phalanx.PeerLostError, match=r"the group is broken: .*was given up"):
            backend.barrier()

    cluster.run(run, 2)


def test_a_collective_whose_group_breaks_in_its_first_moment_is_taken_from_the_library() -> None:
    cluster = Looped()

    def run(backend: Backend) -> None:
        if backend.rank == 1:
            with pytest.raises(PeerLostError, match="the disk is full"):
                backend.recv(bytearray(1), 0)
            return

        def breaks() -> bool:
            backend.fail(PeerLostError("the disk is full", rank=0))
            return False

        cluster.libraries[0].loop.at_wait = breaks
        with pytest.raises(PeerLostError, match=r"all_reduce #0 \(.*: the disk is full") as info:
            phalanx.all_reduce(torch.ones(1), backend)
        assert "the group is broken" not in str(info.value), "it was not, when this one began"
        assert cluster.libraries[0].loop.broken, "the library leaves the tensor alone"
        with pytest.raises(PeerLostError, match="the group is broken: the disk is full"):
            backend.barrier()

    cluster.run(run, 2)


def test_a_library_whose_ranks_cannot_join_says_why() -> None:
    cluster = Looped()
    cluster.join_fails = "no such device"
    with pytest.raises(OSError, match="no such device"):
        cluster.run(lambda backend: None, 2)


def test_closing_ends_the_librarys_groups() -> None:
    cluster = Looped()

    def run(backend: Backend) -> None:
        phalanx.all_reduce(torch.ones(1), backend)
        backend.close()
        backend.close()

    cluster.run(run, 2)
    assert all(library.closed for library in cluster.libraries)


def test_ranks_that_diverged_in_the_librarys_collectives_are_told_ten_collectives_later() -> None:
    """The library compares nothing: it sums the wrong tensors, and nobody waits for anybody."""

    def run(backend: Backend) -> None:
        def diverge() -> None:
            for number in range(2 * TELL_EVERY):
                label = f"rank {backend.rank}" if number == 1 else ""
                phalanx.all_reduce(torch.ones(1), backend, label=label)
                backend.sendrecv(b"", 1 - backend.rank, bytearray(), 1 - backend.rank)

        with pytest.raises(DesyncError, match=r"all_reduce #1 .*rank [01]") as info:
            diverge()
        assert info.value.peer == 1 - backend.rank

    Looped().run(run, 2)


# ------------------------------------------------------------------------------ streams of a device


def on_device(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, device="meta")


def test_tensors_of_the_librarys_device_go_to_it_as_they_are() -> None:
    cluster = Looped("meta", on_stream=True)

    def run(backend: Backend) -> None:
        assert backend.devices == {"cpu", "meta"}
        assert backend.subgroup([backend.rank]).devices == {"cpu", "meta"}
        inner = backend.subgroup(range(2))
        assert phalanx.all_reduce(on_device(3), inner).shape == (3,)
        assert phalanx.all_reduce(on_device(3), inner).shape == (3,)
        result = phalanx.all_reduce(on_device(3), backend)
        assert (result.device.type, result.shape) == ("meta", (3,))
        assert phalanx.all_reduce_(values := on_device(2, 3), backend) is values
        assert phalanx.all_reduce(torch.ones(2), backend, algorithm="ring").tolist() == [2.0, 2.0]

    cluster.run(run, 2)


def test_a_collective_on_a_stream_is_done_when_it_is_ordered_behind_it() -> None:
    """So it is the caller's thread that waits, since that is whose stream waits."""
    cluster = Looped("meta", on_stream=True)

    def run(backend: Backend) -> None:
        pending = [phalanx.async_all_reduce(on_device(3), backend) for _ in range(4)]
        started = cluster.libraries[backend.rank].started
        assert len(started) == 4
        assert all(each.done() for each in pending)
        here = threading.current_thread().name
        assert [part.waited_by for part in started] == [[here]] * 4
        backend.barrier()

    cluster.run(run, 2)


def test_what_the_library_cannot_do_on_its_device_is_refused_before_it_begins() -> None:
    def run(backend: Backend) -> None:
        for call in (
            lambda: phalanx.all_reduce(on_device(3), backend, phalanx.ReduceOp.MAX),
            lambda: phalanx.all_reduce(on_device(3), backend, algorithm="ring"),
            lambda: phalanx.broadcast(on_device(3), backend),
        ):
            with pytest.raises(UnsupportedOperationError, match=r"on meta: .*\.cpu\(\)"):
                call()
        with pytest.raises(UnsupportedOperationError, match="CPU"):
            backend.send(on_device(3), 1 - backend.rank)
        assert phalanx.all_reduce(torch.ones(1), backend).item() == 2

    Looped("meta", on_stream=True).run(run, 2)
