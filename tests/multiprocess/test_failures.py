"""What the others see when a process of the job dies, or should not be in it."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from ranks import Job, run_ranks
from torch import nn

from phalanx import (
    DDP,
    Backend,
    CollectiveTimeoutError,
    DistributedError,
    PeerLostError,
    all_reduce,
)


def describe(error: DistributedError) -> tuple[str, int | None]:
    return type(error).__name__, error.peer


def die_before_an_all_reduce(backend: Backend, victim: int, algorithm: str) -> Any:
    """The victim leaves the barrier first: the others may still be in it, or in the all_reduce."""
    try:
        backend.barrier()
        if backend.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        all_reduce(torch.ones(1000), backend, algorithm=algorithm)
    except DistributedError as error:
        return describe(error)
    return "no error"


@pytest.mark.parametrize("algorithm", ["ring", "tree"])
def test_every_rank_that_waits_is_told_which_one_was_killed(algorithm: str) -> None:
    outcomes = run_ranks(die_before_an_all_reduce, 4, 2, algorithm)
    assert outcomes.pop(2) == ("died", -signal.SIGKILL)
    assert outcomes == [("returned", ("PeerLostError", 2))] * 3


def die_in_the_middle_of_a_message(backend: Backend, alive: Connection) -> None:
    backend.barrier()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    # More than any socket buffer holds, to a rank that takes nothing: it cannot be complete.
    backend.send(torch.ones(64 << 20), 0)


def receive_from_the_dead(backend: Backend, life: Connection) -> Any:
    backend.barrier()
    assert life.poll(20)  # its end is closed: the other rank is dead, half of its message is here
    errors = []
    for call in (lambda: backend.recv(torch.empty(64 << 20), 1), backend.barrier):
        with pytest.raises(PeerLostError) as raised:
            call()
        errors.append(describe(raised.value))
    return errors


def test_half_a_message_is_not_taken_for_a_whole_one_and_the_group_stays_broken() -> None:
    life, alive = multiprocessing.Pipe(duplex=False)
    with Job(2) as job:
        survivor = job.start(0, receive_from_the_dead, life)
        victim = job.start(1, die_in_the_middle_of_a_message, alive)
        alive.close()
        assert victim() == ("died", -signal.SIGALRM)
        assert survivor() == ("returned", [("PeerLostError", 1)] * 2)
    life.close()


def die_while_training(backend: Backend) -> Any:
    """SGD by hand: with an optimizer of torch's every rank imports its compiler."""
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1)), backend)
    try:
        for step in range(100):
            if (backend.rank, step) == (1, 5):
                os.kill(os.getpid(), signal.SIGKILL)
            model.zero_grad()
            model(torch.randn(8, 32)).square().mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(parameter.grad, alpha=0.1)
    except PeerLostError as error:
        return step in (4, 5), error.peer  # step 4 is over first on rank 1
    return "no error"


def test_training_ends_with_the_name_of_the_rank_that_was_killed() -> None:
    outcomes = run_ranks(die_while_training, 3)
    assert outcomes == [
        ("returned", (True, 1)),
        ("died", -signal.SIGKILL),
        ("returned", (True, 1)),
    ]


def say_hello(backend: Backend) -> list[float]:
    return all_reduce(torch.ones(2), backend).tolist()


def test_a_rank_with_the_wrong_token_is_turned_away_and_the_job_forms_without_it() -> None:
    with Job(2) as job:
        first = job.start(0, say_hello)
        intruder = job.start(1, say_hello, token="the wrong token of the job")
        how, error = intruder()
        assert how == "raised"
        assert error.startswith("AuthenticationError: rank 1: rendezvous at 127.0.0.1:")
        assert "do not hold the same token" in error
        second = job.start(1, say_hello)
        assert first() == second() == ("returned", [2.0, 2.0])


def leave_early(backend: Backend) -> Any:
    backend.barrier()
    if backend.rank == 1:
        return "left"
    try:
        backend.recv(bytearray(1), 1)
    except PeerLostError as error:
        return describe(error), "left" in str(error)
    return "no error"


def test_a_rank_that_leaves_in_good_order_is_said_to_have_left() -> None:
    assert run_ranks(leave_early, 2) == [
        ("returned", (("PeerLostError", 1), True)),
        ("returned", "left"),
    ]


def never_call(backend: Backend) -> Any:
    others = backend.subgroup([0, 1])
    if backend.rank == 1:
        others.recv(bytearray(1), 0)  # stays alive, and lets the others wait for it
        return "released"
    try:
        backend.barrier(timeout=0.5)
    except CollectiveTimeoutError as error:
        told = describe(error), error.op, error.sequence, error.seconds
    others.send(b"!", 1)
    return told


def test_a_rank_that_never_calls_is_named_by_those_who_waited_for_it() -> None:
    outcomes = run_ranks(never_call, 2)
    assert outcomes == [
        ("returned", (("CollectiveTimeoutError", 1), "barrier", 0, 0.5)),
        ("returned", "released"),
    ]
