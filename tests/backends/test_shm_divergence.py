"""Ranks that have diverged do not meet, though a flag in memory comes before messages that say so.

Who only sends has done its part when the socket has the message. So ranks of which each takes
itself for the root may all have gone on, and come to the same barrier, before anyone has read a
word of another one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from clusters import SharedMemory

import phalanx
from phalanx import Backend, DesyncError, PendingCollective

PROMPT = 20.0  # seconds after which a rank that was not told gives up, with an error that shows it
SHM = SharedMemory()


class Turns:
    """What ranks do one after the other, though each is a thread of its own."""

    def __init__(self, size: int, count: int) -> None:
        # Or a rank that still meets the others would read what one of them sends.
        self.all_are_here = threading.Barrier(size, timeout=PROMPT)
        self._over = [threading.Event() for _ in range(count)]

    def take(
        self, number: int, part: Callable[[], PendingCollective[None] | None]
    ) -> PendingCollective[None] | None:
        """Do this when all turns before it are over."""
        assert number == 0 or self._over[number - 1].wait(PROMPT)
        try:
            return part()
        finally:
            self._over[number].set()

    def wait(self) -> None:
        """Until all are over: who waits in a call reads what comes, and answers."""
        assert self._over[-1].wait(PROMPT)


def send_as_root(backend: Backend) -> None:
    """A broadcast in which the root has done its part when it has sent."""
    pending = phalanx.async_broadcast(torch.ones(4), backend, backend.rank, algorithm="star")
    assert pending.done()


def error_of(backend: Backend, barrier: PendingCollective[None] | None) -> DesyncError:
    assert barrier is not None
    with pytest.raises(DesyncError) as info:
        barrier.wait()
    return info.value


@pytest.mark.parametrize("broadcasts", [1, 3, 100])
@pytest.mark.parametrize("before", [0, 2])
def test_nobody_passes_a_barrier_with_a_rank_that_was_another_root(
    before: int, broadcasts: int
) -> None:
    """Neither has waited for anything: only the barrier can tell them."""
    turns = Turns(2, 2)

    def part_and_meet(backend: Backend) -> DesyncError:
        for _ in range(before):
            backend.barrier()
        turns.all_are_here.wait()

        def part() -> PendingCollective[None]:
            for _ in range(broadcasts):
                send_as_root(backend)
            return backend.ibarrier(background=False)

        barrier = turns.take(backend.rank, part)
        turns.wait()
        return error_of(backend, barrier)

    for rank, error in enumerate(SHM.run(part_and_meet, 2, timeout=PROMPT)):
        assert error.peer == 1 - rank
        if broadcasts < 64:  # or it is forgotten where they have diverged
            mine, theirs = (
                f"broadcast #{before} (float32 [4], root {r}," for r in (rank, 1 - rank)
            )
            assert mine in str(error)
            assert f"called {theirs}" in str(error)


def test_a_root_that_came_to_the_barrier_last_learns_that_another_rank_was_root_too() -> None:
    """Everybody's flag is up before it looks, and it has not read what rank 1 has sent."""
    turns = Turns(3, 4)

    def part_and_meet(backend: Backend) -> DesyncError:
        def be_root() -> PendingCollective[None]:
            send_as_root(backend)
            return backend.ibarrier(background=False)

        def receive() -> PendingCollective[None]:
            phalanx.broadcast(torch.zeros(4), backend, 0, algorithm="star")
            return backend.ibarrier(background=False)

        turns.all_are_here.wait()
        if backend.rank == 0:
            turns.take(0, lambda: send_as_root(backend))
            barrier = turns.take(3, lambda: backend.ibarrier(background=False))
        elif backend.rank == 2:
            barrier = turns.take(1, receive)
        else:
            barrier = turns.take(2, be_root)
        turns.wait()
        return error_of(backend, barrier)

    errors = SHM.run(part_and_meet, 3, timeout=PROMPT)
    assert errors[0].peer == 1
    assert errors[1].peer in (0, 2)
    assert errors[2].peer == 1 or "rank 1 called" in str(errors[2])
    # Rank 0 finds out itself, or rank 1 was sooner and has told it.
    assert "broadcast #0 (float32 [4], root 1," in str(errors[0])
