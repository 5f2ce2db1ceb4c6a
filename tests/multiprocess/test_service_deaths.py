"""A parameter server whose workers are processes, one of which is killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from ranks import KINDS, Job, run_ranks
from torch import Tensor

from phalanx import Backend, ParameterServer, PeerLostError
from phalanx.aggregation import ServerMode

COUNT = 4 << 20  # elements: more bytes than a connection holds that has not carried as many yet


class Descent:
    """By hand: with an optimizer of torch's the server would import its compiler."""

    def __init__(self, params: list[Tensor]) -> None:
        self._params = params

    @torch.no_grad()
    def step(self) -> None:
        for param in self._params:
            assert param.grad is not None
            param.sub_(param.grad)


def filled(value: float) -> list[Tensor]:
    return [torch.full((COUNT,), float(value)), torch.full((3,), float(value))]


def serve_until_it_is_dead(backend: Backend, mode: ServerMode, life: Connection) -> Any:
    def wait_for_its_death(record: Any) -> None:
        if record.steps == 1:  # the victim's push comes while nobody looks
            backend.send(b"", 2)
            assert life.poll(20)

    params = filled(0)
    found = ParameterServer.serve(
        params, backend, Descent, mode=mode, quorum=2, on_step=wait_for_its_death
    )
    values = {value for param in params for value in param.unique().tolist()}
    return found.steps, found.pushes, list(found.dropped), values


def work_on(backend: Backend, steps: int) -> Any:
    params = filled(0)
    with ParameterServer.connect(params, backend) as client:
        for _ in range(steps):
            client.step(filled(-1))
        client.pull_()
    return [param[0].item() for param in params]


def die_in_the_middle_of_a_push(backend: Backend, alive: Connection) -> None:
    client = ParameterServer.connect(filled(0), backend)
    client.skip()
    backend.recv(bytearray(), 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    client.push(filled(-100))


@pytest.mark.parametrize("kind", ["tcp", "shm"])
def test_half_a_push_of_a_worker_that_was_killed_is_not_applied_and_the_rest_go_on(
    kind: str,
) -> None:
    life, alive = multiprocessing.Pipe(duplex=False)
    with Job(3, timeout=50.0, kind=KINDS[kind]) as job:
        mode = ServerMode.staleness(1)
        server = job.start(0, serve_until_it_is_dead, mode, life)
        worker = job.start(1, work_on, 4)
        victim = job.start(2, die_in_the_middle_of_a_push, alive)
        alive.close()
        assert victim() == ("died", -signal.SIGALRM)
        assert server() == ("returned", (4, {1: 4, 2: 1}, [2], {4.0}))
        assert worker() == ("returned", [4.0, 4.0])
    life.close()


def take_part_until_one_is_killed(backend: Backend, victim: int) -> Any:
    params = [torch.zeros(1000)]
    try:
        if backend.rank < 2:
            ParameterServer.serve(params, backend, Descent, servers=(0, 1))
            return "served"
        client = ParameterServer.connect(params, backend, servers=(0, 1))
        for step in range(5):
            if step == 3 and backend.rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            client.step([torch.ones(1000)])
    except PeerLostError as error:
        return error.peer, "in step 4" in str(error)


@pytest.mark.parametrize("kind", ["tcp", "shm"])
def test_in_synchronous_mode_all_processes_are_told_which_one_was_killed_and_when(
    kind: str,
) -> None:
    outcomes = run_ranks(take_part_until_one_is_killed, 4, 2, kind=KINDS[kind])
    assert outcomes.pop(2) == ("died", -signal.SIGKILL)
    assert outcomes == [("returned", (2, True))] * 3
