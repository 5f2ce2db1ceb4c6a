"""What an error of a backend is made of, on every kind of backend."""

from __future__ import annotations

import pickle

import pytest
from clusters import Cluster, whole

import phalanx
from phalanx import Backend, MisuseError, PeerLostError


def lost(backend: Backend) -> PeerLostError:
    """The error of a rank that waits for one that has died."""
    with pytest.raises(PeerLostError) as info:
        backend.barrier()
    return info.value


def test_errors_travel_to_other_processes_whole(cluster: Cluster) -> None:
    def fail(backend: Backend) -> PeerLostError | None:
        if backend.rank == 1:
            backend.recv(bytearray(1), 0)
            whole(backend).abort()
            return None
        backend.send(b"!", 1)
        return lost(backend)

    error = cluster.run(fail, 2)[0]
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy)) == (type(error), str(error))
    for attribute in ("rank", "peer", "op", "sequence", "seconds"):
        assert getattr(copy, attribute) == getattr(error, attribute)


def test_an_error_raised_twice_does_not_collect_tracebacks(cluster: Cluster) -> None:
    def fail(backend: Backend) -> None:
        if backend.rank == 1:
            backend.recv(bytearray(1), 0)
            whole(backend).abort()
            return
        pending = phalanx.async_barrier(backend)
        backend.send(b"!", 1)
        depths = []
        for _ in range(5):
            with pytest.raises(PeerLostError) as info:
                pending.wait()
            error = info.value
            depth, link = 0, error.__traceback__
            while link is not None:
                depth, link = depth + 1, link.tb_next
            depths.append(depth)
        assert len(set(depths[1:])) == 1

    cluster.run(fail, 2)


def test_a_reason_of_any_length_reaches_the_others(cluster: Cluster) -> None:
    def fail(backend: Backend) -> None:
        if backend.rank == 0:
            backend.fail(MisuseError("why " * 1_000_000, rank=0))
        with pytest.raises(MisuseError, match="why why"):
            backend.barrier()

    cluster.run(fail, 2)
