"""What becomes of something asynchronous that is cancelled, on every kind of backend."""

from __future__ import annotations

import pytest
import torch
from clusters import Cluster

import phalanx
from phalanx import Backend, MisuseError


def test_a_message_whose_receive_is_cancelled_is_for_the_next_receive(cluster: Cluster) -> None:
    def run(backend: Backend) -> None:
        into, unused = bytearray(1), bytearray(1)
        if backend.rank == 1:
            backend.recv(bytearray(), 0, tag=1)
            backend.send(b"x", 0)
            return
        pending = phalanx.irecv(unused, backend, 1)
        pending.cancel("another message came first")
        backend.send(b"", 1, tag=1)
        with pytest.raises(
            MisuseError, match=r"recv #0 .*was given up: another message came first"
        ):
            pending.wait()
        assert backend.recv(into, 1) == 1
        assert (into, unused) == (b"x", b"\0")

    cluster.run(run, 2)


def test_a_collective_that_is_cancelled_breaks_its_group_and_everybody_is_told_why(
    cluster: Cluster,
) -> None:
    def run(backend: Backend) -> None:
        inner = backend.subgroup([0, 1])
        if backend.rank == 1:
            backend.recv(bytearray(), 0)  # or there is nothing to cancel any more
            with pytest.raises(
                MisuseError, match=r"rank 0( \(.*\))?: all_reduce #0 .* was given up: no more"
            ):
                phalanx.all_reduce(torch.ones(1), inner)
        else:
            pending = phalanx.async_all_reduce(torch.ones(1), inner)
            pending.cancel("no more")
            backend.send(b"", 1)
            with pytest.raises(MisuseError, match="was given up: no more"):
                pending.wait()
        with pytest.raises(MisuseError, match="the group is broken"):
            inner.barrier()
        backend.barrier()  # other groups are not

    cluster.run(run, 2)


def test_what_is_done_is_not_cancelled(cluster: Cluster) -> None:
    def run(backend: Backend) -> None:
        pending = phalanx.async_all_reduce(torch.ones(1), backend)
        pending.wait()
        pending.cancel("too late")
        assert pending.wait().tolist() == [2.0]
        backend.barrier()

    cluster.run(run, 2)
