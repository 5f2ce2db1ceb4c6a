"""Processes that share memory: whatever becomes of them, nothing is left, no number is wrong."""

from __future__ import annotations

import os
import signal
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
from ranks import Job, run_ranks
from waiting import wait_until

import phalanx
from phalanx import Backend, PeerLostError, SharedMemoryBackend

KIND = SharedMemoryBackend


def with_names() -> list[str]:
    """Shared memory of this process that has a name, and would outlive it."""
    mapped = Path("/proc/self/maps").read_text().splitlines()
    opened = [os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    return [line for line in [*mapped, *opened] if "/dev/shm" in line]


def until_killed(backend: Backend, wire: Connection) -> tuple[str, int | None]:
    """Collectives of every kind of memory, until somebody dies."""
    tensors = [torch.ones(2), torch.ones(1 << 18), backend.empty(1 << 18).fill_(1)]
    groups = [backend, backend.subgroup(range(backend.world_size))]
    together = backend.common(backend.world_size << 18)
    assert together is not None
    together[backend.rank << 18 : (backend.rank + 1) << 18] = backend.rank
    backend.barrier()
    ranks = torch.arange(float(backend.world_size)).repeat_interleave(1 << 18)
    assert torch.equal(together, ranks)
    for group in groups:
        for tensor in tensors:
            phalanx.all_reduce(tensor, group)
    wire.send(with_names())
    try:
        while True:
            for group in groups:
                for tensor in tensors:
                    total = phalanx.all_reduce(tensor, group)
                    assert bool((total == backend.world_size).all())
    except PeerLostError as error:
        assert torch.equal(together, ranks)
        return str(error), error.peer


@pytest.mark.parametrize("victims", [[1], [0, 1, 2]], ids=["one", "all"])
def test_nothing_is_left_of_ranks_that_are_killed_and_the_others_name_them(
    victims: list[int],
) -> None:
    with Job(3, kind=KIND) as job:
        outcomes, wires = [], []
        for rank in range(3):
            ours, theirs = Pipe()
            outcomes.append(job.start(rank, until_killed, theirs))
            theirs.close()
            wires.append(ours)
        for wire in wires:
            assert wire.poll(60)
            assert wire.recv() == [], "memory that has a name"
        for victim in victims:
            os.kill(job.processes[victim], signal.SIGKILL)
        for rank, outcome in enumerate(outcomes):
            how, what = outcome()
            if rank in victims:
                assert (how, what) == ("died", -signal.SIGKILL)
            else:
                assert how == "returned", what
                assert what[1] == 1
                assert "rank 1 was lost" in what[0]
        for process in job.processes.values():
            wait_for_the_end_of(process)
        for wire in wires:
            wire.close()


def wait_for_the_end_of(process: int) -> None:
    """Or fail."""
    ended = lambda: not Path(f"/proc/{process}/fd").exists() or is_zombie(process)  # noqa: E731
    wait_until(ended, f"process {process} has ended")


def is_zombie(process: int) -> bool:
    """Whether it has ended, and only waits to be asked how."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def one_collective(backend: Backend, name: str, elements: int, registered: bool, how: str) -> Any:
    """One rank ends in that way as soon as it has its result; the others have a look at theirs."""
    mine = backend.empty(elements) if registered else torch.empty(elements)
    mine.fill_(backend.rank + 1)
    if name == "all_reduce":
        result = phalanx.all_reduce(mine, backend)
    else:
        result = phalanx.broadcast(mine, backend, 0)
    if backend.rank == 0 and how == "is gone at once":
        os._exit(0)
    if backend.rank != 0:
        sleep(0.01)
    return bool((result == (6 if name == "all_reduce" else 1)).all())


@pytest.mark.parametrize(
    ("name", "elements", "registered", "how"),
    [
        ("broadcast", 1 << 18, False, "closes"),
        ("all_reduce", 2, False, "closes"),
        ("all_reduce", 2, False, "is gone at once"),
        ("all_reduce", 1 << 18, True, "is gone at once"),
        ("all_reduce", 1 << 19, False, "is gone at once"),
    ],
)
def test_a_rank_that_ends_right_after_its_only_collective_leaves_the_others_what_is_right(
    name: str, elements: int, registered: bool, how: str
) -> None:
    """A root that runs ahead, and is killed, may be lost before the others have begun."""
    outcomes = run_ranks(one_collective, 3, name, elements, registered, how, kind=KIND)
    assert outcomes[1:] == [("returned", True)] * 2
    assert outcomes[0] == (("returned", True) if how == "closes" else ("died", 0))


def many_ranks(backend: Backend) -> bool:
    p, rank = backend.world_size, backend.rank
    right = True
    for number in range(30):
        total = phalanx.all_reduce(torch.full((3,), float(rank + number)), backend)
        right &= total.tolist() == [p * number + p * (p - 1) / 2] * 3
    for elements in (1 << 16, 1 << 18):
        total = phalanx.all_reduce(torch.full((elements,), float(rank)), backend)
        right &= bool((total == p * (p - 1) / 2).all())
        joined = phalanx.all_gather(torch.full((elements // p,), float(rank)), backend)
        right &= torch.equal(joined, torch.arange(p).repeat_interleave(elements // p).float())
    backend.barrier()
    return right


def test_more_ranks_than_processors_work() -> None:
    assert run_ranks(many_ranks, 8, kind=KIND) == [("returned", True)] * 8


def memory_shown(backend: Backend) -> tuple[bool, int]:
    """A large sum in place; whether it is right, and the bytes of this rank's segments."""
    tensor = torch.full((16 << 20,), float(backend.rank))
    phalanx.all_reduce_(tensor, backend)
    links = {
        file: os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()
    }
    segments = [file for file, link in links.items() if "memfd:phalanx" in link]
    assert segments
    taken = sum(segment.stat().st_blocks * 512 for segment in segments)
    return bool((tensor == 1).all()), taken


def test_a_large_ordinary_tensor_needs_no_more_shared_memory_than_a_small_one() -> None:
    """Of 64 MiB; what is staged at a time is bounded."""
    for how, (right, taken) in run_ranks(memory_shown, 2, kind=KIND):
        assert how == "returned"
        assert right
        assert taken <= 16 << 20
