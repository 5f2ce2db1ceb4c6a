"""How long memory in common lives: as long as a tensor in it, on any rank, and no longer."""

from __future__ import annotations

import pytest
import torch
from clusters import Cluster, SharedMemory, Simulated
from common_memory import common, files, having_memory, mappings

from phalanx import Backend, BackendUnavailableError, DesyncError, MisuseError, SimulatedBackend
from phalanx.transport.shm.segments import PAGE


@having_memory
def test_it_outlives_the_backends(cluster: Cluster) -> None:
    first, second = cluster.run(lambda backend: common(backend, 1000), 2)
    first.fill_(1)
    second[:500] += 1
    assert first.sum() == second.sum() == 1500


@having_memory
def test_a_closed_backend_gives_no_more(cluster: Cluster) -> None:
    def close(backend: Backend) -> None:
        memory = common(backend, 10)
        memory[5 * backend.rank :][:5] = 1
        backend.barrier()
        backend.close()
        with pytest.raises(MisuseError):
            backend.common(10)
        assert memory.sum() == 10

    cluster.run(close, 2)


def test_each_ranks_mapping_goes_with_its_last_view() -> None:
    size = 1002 * PAGE

    def share(backend: Backend) -> None:
        memory = common(backend, size, torch.uint8)
        view = memory[1000:2000].view(10, 100).t()
        del memory
        backend.barrier()
        assert (mappings(size), files(size)) == (2, 0)
        backend.barrier()
        if backend.rank == 0:
            del view
        backend.barrier()
        assert mappings(size) == 1
        backend.barrier()
        if backend.rank == 1:
            del view
        backend.barrier()
        assert mappings(size) == 0

    SharedMemory().run(share, 2)


def test_nothing_is_left_of_a_hundred_of_them() -> None:
    size = 1003 * PAGE

    def share(backend: Backend) -> None:
        for number in range(100):
            memory = common(backend, size, torch.uint8)
            memory[backend.rank] = number
        del memory
        backend.barrier()
        assert (mappings(size), files(size)) == (0, 0)

    SharedMemory().run(share, 2)


def test_nothing_is_left_of_those_that_came_to_nothing() -> None:
    size = 1004 * PAGE

    def disagree(backend: Backend) -> None:
        for odd in range(3):
            group = backend.subgroup(range(3))
            with pytest.raises(DesyncError):
                group.common(size + (group.rank == odd), torch.uint8)
            backend.barrier()
        assert (mappings(size), files(size)) == (0, 0)

    SharedMemory().run(disagree, 3)


def test_what_threads_have_in_common_is_not_kept_either() -> None:
    def share(backend: Backend) -> int:
        storage = common(backend, 10).untyped_storage()
        backend.barrier()
        with pytest.raises(BackendUnavailableError):
            backend.common(1 << 48)
        backend.barrier()
        assert isinstance(backend, SimulatedBackend)
        assert not backend.switch.stored
        return storage.data_ptr()

    assert len(set(Simulated().run(share, 3))) == 1
