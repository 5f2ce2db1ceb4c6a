"""Ranks as processes: who is killed is named, and processes end."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress

import jobs
import pytest
import torch
import torch.distributed as dist
import torch_blame
from torch.distributed import distributed_c10d as c10d

SOON = 20.0  # seconds, for a machine on which much else runs; `torch_blame.py` measures


@pytest.mark.parametrize("what", torch_blame.STEPS)
def test_a_killed_rank_is_named_in_the_step_and_in_the_one_after(what: str) -> None:
    verdict = torch_blame.once(what, "killed")
    assert verdict.wrong == ""
    assert verdict.seconds < SOON


def test_a_stopped_rank_is_named() -> None:
    assert torch_blame.once("ddp", "stopped", heartbeat="1").wrong == ""


# How a process may end -------------------------------------------------------------------------


def without_a_word(rank: int) -> None:
    dist.all_reduce(torch.ones(3))


def with_works_under_way(rank: int) -> None:
    if rank == 0:
        with suppress(RuntimeError):  # the other rank may have left already
            for _ in range(3):
                dist.all_reduce(torch.ones(3), async_op=True)
            dist.isend(torch.ones(3_000_000), 1)
            dist.irecv(torch.ones(3), 1)


def with_a_thread_in_a_collective(rank: int) -> None:
    if rank == 0:
        entered = threading.Event()

        def wait() -> None:
            entered.set()
            with pytest.raises(RuntimeError):
                dist.all_reduce(torch.ones(3))

        threading.Thread(target=wait, daemon=True).start()
        entered.wait()
    else:
        threading.Event().wait(0.5)


def with_a_callback_to_come(rank: int) -> None:
    if rank == 0:
        dist.all_reduce(torch.ones(3), async_op=True).get_future().then(lambda done: None)


ENDS = [
    without_a_word,
    with_works_under_way,
    with_a_thread_in_a_collective,
    with_a_callback_to_come,
]


@pytest.mark.parametrize("end", ENDS)
def test_a_process_ends_well_and_soon_without_destroying_its_groups(end) -> None:  # type: ignore[no-untyped-def]
    for outcome in jobs.run(end, 2).values():
        assert outcome.how == "returned", outcome
        assert outcome.seconds_to_end < SOON


def fork(rank: int) -> str:
    """A child that was forked may not call; the parent goes on."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            dist.all_reduce(torch.ones(2))
            os.write(theirs, b"it called")
        except RuntimeError as error:
            os.write(theirs, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    said = os.read(ours, 1000).decode()
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0, 2.0]
    return said


def test_a_child_that_was_forked_may_not_call() -> None:
    for outcome in jobs.run(fork, 2).values():
        assert outcome.how == "returned", outcome
        assert "cannot use what that has made: make a backend anew here" in outcome.value


def interrupted(rank: int) -> tuple[str, str]:
    """Ctrl-C while rank 0 waits for rank 1, which comes later."""
    store = c10d._get_default_store()
    if rank == 1:
        store.wait(["interrupted"])
        with pytest.raises(RuntimeError) as caught:
            dist.all_reduce(torch.ones(1))
        return "", str(caught.value)
    waits = dist.group.WORLD.backend.engine.watchdog.waits  # type: ignore[union-attr]
    over = threading.Event()

    def interrupt() -> None:
        while not waits and not over.wait(0.01):
            pass
        signal.raise_signal(signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    work = dist.all_reduce(torch.ones(1), async_op=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        work.wait()
    over.set()
    thread.join()
    with pytest.raises(RuntimeError) as again:
        work.wait()
    with pytest.raises(RuntimeError) as caught:
        dist.barrier()
    store.set("interrupted", "")
    return str(again.value), str(caught.value)


def test_an_interrupted_wait_is_an_error_on_all_ranks() -> None:
    outcomes = jobs.run(interrupted, 2)
    given_up = "was given up: interrupted by KeyboardInterrupt"
    for outcome in outcomes.values():
        assert outcome.how == "returned", outcome
        assert given_up in outcome.value[1]
    assert given_up in outcomes[0].value[0]
