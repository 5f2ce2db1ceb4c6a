"""Who may go on when: staleness, workers that come late, steps that are skipped, retries."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from clusters import CLUSTERS, PATIENCE, Cluster
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx import (
    Backend,
    CollectiveTimeoutError,
    InvalidRankError,
    InvalidWorldSizeError,
    MisuseError,
    ParameterServer,
    UnsupportedOperationError,
    isend,
    simulate,
)
from phalanx.aggregation import ServerMode, ServiceRecord

THREE_KINDS = [c for c in CLUSTERS if c.name in ("simulated", "tcp", "shm")]


def sgd(params: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1)


def idle(backend: Backend, draw: random.Random, most: int) -> None:
    """Let others go on for a while."""
    for _ in range(draw.randrange(most)):
        isend(b"", backend, backend.world_size - 1, tag=77).done()


@settings(max_examples=5)
@given(st.integers(0, 1000), st.integers(0, 3), st.integers(2, 4), st.integers(1, 2))
def test_staleness_is_never_exceeded(seed: int, bound: int, workers: int, servers: int) -> None:
    """Workers of any speed say what they are about to push: nobody has done more than that."""
    steps = 4
    begun = dict.fromkeys(range(servers, servers + workers), 0)
    clocks: list[dict[int, int]] = []

    def run(backend: Backend) -> None:
        draw = random.Random(seed * 10 + backend.rank)
        params = [torch.zeros(3), torch.zeros(2)]
        rank, places = backend.rank, range(servers)
        if rank in places:
            ParameterServer.serve(
                params,
                backend,
                sgd,
                servers=places,
                workers=list(begun),
                mode=ServerMode.staleness(bound),
                quorum=workers,
                on_step=lambda record: clocks.append(dict(record.clocks)),
            )
        elif rank in begun:
            pace = draw.choice([1, 2, 5])
            with ParameterServer.connect(params, backend, servers=places) as client:
                for step in range(steps):
                    if draw.random() < 0.5:
                        client.pull_()
                        assert step - min(begun.values()) <= bound
                    idle(backend, draw, pace)
                    begun[rank] = step + 1
                    client.push(params)
                    assert step - min(begun.values()) <= bound
                begun[rank] = 1000  # nobody waits for it

    simulate(run, servers + workers + 1, seed)
    for seen in clocks:
        assert max(seen.values()) - min(seen.values()) <= bound + 1
    assert any(seen for seen in clocks)


def test_a_worker_that_comes_late_begins_where_the_slowest_is_and_waits_for_nobody_before() -> None:
    seen: list[dict[int, int]] = []

    def run(backend: Backend) -> list[float]:
        params = [torch.zeros(2)]
        if backend.rank == 0:
            record = ParameterServer.serve(
                params,
                backend,
                sgd,
                mode=ServerMode.staleness(1),
                on_step=lambda record: seen.append(dict(record.clocks)),
            )
            assert record.pushes == {1: 8, 2: 4}
            return record.params[0].tolist()
        if backend.rank == 2:  # comes when the other has done five steps alone
            backend.recv(bytearray(), 1)
        with ParameterServer.connect(params, backend) as client:
            for step in range(8 if backend.rank == 1 else 4):
                client.step([-torch.ones(2)])
                if backend.rank == 1 and step == 4:
                    backend.send(b"", 2)
                    backend.recv(bytearray(), 2)
                elif backend.rank == 2 and step == 0:
                    assert params[0].tolist() == [6.0, 6.0]
                    backend.send(b"", 1)
        return []

    assert simulate(run, 3)[0] == [12.0, 12.0]
    assert seen[:6] == [{1: 1}, {1: 2}, {1: 3}, {1: 4}, {1: 5}, {1: 5, 2: 6}]


@pytest.mark.parametrize("servers", [1, 2])
def test_in_synchronous_mode_too_a_worker_may_come_late_if_the_quorum_is_smaller(
    servers: int,
) -> None:
    def run(backend: Backend) -> tuple[int, dict[int, int]] | list[float]:
        params = [torch.zeros(2), torch.zeros(2)]
        first, last = servers, servers + 1
        if backend.rank < servers:
            record = ParameterServer.serve(params, backend, sgd, servers=range(servers), quorum=1)
            return record.steps, record.pushes
        if backend.rank == last:
            backend.recv(bytearray(), first)
        with ParameterServer.connect(params, backend, servers=range(servers)) as client:
            for step in range(6):
                if backend.rank == first and step == 3:
                    backend.send(b"", last)
                client.step([torch.full((2,), float(backend.rank))] * 2)
        return params[0].tolist() + params[1].tolist()

    for seed in range(3):
        *records, one, other = simulate(run, servers + 2, seed)
        counts = {steps for steps, _ in records}
        assert len(counts) == 1, "a step is of the same workers on every server"
        assert 9 <= counts.pop() <= 12
        assert len({*map(float, other)}) == 1
        assert len({*map(float, one)}) == 1


def test_a_step_without_gradients_holds_nobody_back() -> None:
    def run(backend: Backend) -> list[float]:
        params = [torch.zeros(2)]
        if backend.rank == 0:
            record = ParameterServer.serve(params, backend, sgd)
            assert (record.steps, record.pushes) == (3, {1: 4, 2: 4})
            return []
        with ParameterServer.connect(params, backend) as client:
            for step in range(4):
                if step in (backend.rank, 3):
                    assert client.skip() == step + 1
                else:
                    client.push([torch.full((2,), -float(backend.rank))])
                client.pull_()
        return params[0].tolist()

    assert list(simulate(run, 3))[1:] == [[1.5 + 2 + 1] * 2] * 2


@pytest.mark.parametrize("ranks", THREE_KINDS, ids=lambda c: c.name)
def test_a_push_that_timed_out_may_be_repeated_and_is_applied_once(ranks: Cluster) -> None:
    """The server is busy with a step while the worker gives up, in a push and in a step."""
    busy, gave_up = threading.Event(), threading.Semaphore(0)

    def wait(record: ServiceRecord) -> None:
        if record.steps in (1, 2):
            busy.set()
            assert gave_up.acquire(timeout=PATIENCE)

    def run(backend: Backend) -> list[float]:
        params = [torch.zeros(100_000), torch.zeros(5)]
        if backend.rank == 0:
            record = ParameterServer.serve(
                params, backend, sgd, mode=ServerMode.ASYNCHRONOUS, on_step=wait
            )
            assert (record.steps, record.pushes) == (3, {1: 3})
            return record.params[1].tolist()
        ones = [-torch.ones_like(param) for param in params]
        with ParameterServer.connect(params, backend) as client:
            for call in (client.push, client.step):
                for _ in range(2):
                    with pytest.raises(CollectiveTimeoutError, match="ParameterClient") as info:
                        call(ones, timeout=0.15)
                    assert info.value.peer == 0
                gave_up.release()
                call(ones)
            assert [param[0].item() for param in params] == [2, 2]
            assert client.pushes == 2
            client.step(ones)
            assert [param[-1].item() for param in client.pull()] == [3, 3]
        return params[1].tolist()

    assert ranks.run(run, 2) == [[3.0] * 5] * 2


@pytest.mark.parametrize("ranks", THREE_KINDS, ids=lambda c: c.name)
def test_who_is_too_far_ahead_is_told_whom_it_waits_for(ranks: Cluster) -> None:
    go_on = threading.Event()

    def run(backend: Backend) -> None:
        params = [torch.zeros(3)]
        if backend.rank == 0:
            ParameterServer.serve(params, backend, sgd, mode=ServerMode.staleness(0), quorum=2)
            return
        with ParameterServer.connect(params, backend) as client:
            client.push(params)
            if backend.rank == 2:
                assert go_on.wait(PATIENCE)
                client.push(params)
                return
            client.push(params)
            for call in (client.pull, lambda timeout: client.push(params, timeout=timeout)):
                with pytest.raises(CollectiveTimeoutError, match="for rank 2") as info:
                    call(timeout=0.8)
                assert info.value.peer == 2
            go_on.set()
            client.pull()

    ranks.run(run, 3)


def test_what_does_not_fit_or_makes_no_sense_is_refused_before_anything_is_sent() -> None:
    def run(backend: Backend) -> None:
        params = [torch.zeros(3), torch.zeros(2, dtype=torch.float64)]
        if backend.rank == 0:
            record = ParameterServer.serve(params, backend, sgd)
            assert record.pushes == {1: 0}
            return
        client = ParameterServer.connect(params, backend)
        for call in (client.push, client.step):
            with pytest.raises(ValueError, match="1 gradients for 2 parameters"):
                call(params[:1])
            with pytest.raises(ValueError, match=r"gradient 1 \(float32 \[2\]\) does not fit"):
                call([torch.zeros(3), torch.zeros(2)])
            with pytest.raises(TypeError, match="gradient 0 is a NoneType"):
                call([None, params[1]])
            with pytest.raises(TypeError, match="not one tensor"):
                call(torch.zeros(2, 3))
        with pytest.raises(ValueError, match=r"tensor 0 \(float32 \[4\]\) does not fit"):
            client.pull_([torch.zeros(4), params[1]])
        with pytest.raises(ValueError, match="timeout"):
            client.pull(timeout=0)
        client.close()
        client.close()
        with pytest.raises(MisuseError, match="closed"):
            client.push(params)

    simulate(run, 2)


def test_wrong_arguments_are_found_by_the_call_itself() -> None:
    def run(backend: Backend) -> None:
        params = [torch.zeros(3)]
        serve, connect = ParameterServer.serve, ParameterServer.connect

        if backend.rank:
            with pytest.raises(MisuseError, match="workers call"):
                serve(params, backend, sgd)
            with pytest.raises(MisuseError, match="servers call"):
                connect(params, backend, servers=(0, 1))
            return
        for call in (
            lambda **k: serve(params, backend, sgd, **k),
            lambda **k: connect(params, backend, **k),
        ):
            with pytest.raises(InvalidWorldSizeError):
                call(servers=())
            with pytest.raises(InvalidRankError):
                call(servers=(0, 2))
            with pytest.raises(ValueError, match="twice"):
                call(servers=(0, 0))
            with pytest.raises(ValueError, match="timeout"):
                call(servers=(0,), timeout=-1)
        with pytest.raises(ValueError, match="a server and a worker"):
            serve(params, backend, sgd, workers=[0])
        with pytest.raises(ValueError, match="quorum"):
            serve(params, backend, sgd, quorum=0)
        with pytest.raises(TypeError, match="not one tensor"):
            serve(params[0], backend, sgd)
        with pytest.raises(UnsupportedOperationError, match=r"parameter 0 \(int64 \[1\]\)"):
            serve([torch.ones(1).long()], backend, sgd)
        with pytest.raises(ValueError, match="staleness"):
            ServerMode.staleness(-1)

    simulate(run, 2)
