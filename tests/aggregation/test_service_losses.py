"""Workers and servers that are lost, lists that differ: who is told what."""

from __future__ import annotations

import contextlib
import logging

import pytest
import torch
from clusters import CLUSTERS, Cluster, whole
from service_runs import sgd

from phalanx import (
    Backend,
    CollectiveTimeoutError,
    DesyncError,
    ParameterServer,
    PeerLostError,
    SizeMismatchError,
    simulate,
)
from phalanx.aggregation import ServerMode, ServiceRecord
from phalanx.aggregation.parameter_server.wire import (
    HEADER_SIZE,
    HEADERS,
    LONGEST_TEXT,
    MessageHeader,
    MessageKind,
)

APART = [ServerMode.ASYNCHRONOUS, ServerMode.staleness(1)]
KINDS = [c for c in CLUSTERS if c.name in ("cooperative", "simulated", "tcp", "shm", "hybrid")]
kinds = pytest.mark.parametrize("ranks", KINDS, ids=lambda c: c.name)


def params() -> list[torch.Tensor]:
    return [torch.zeros(3), torch.zeros(2)]


def ones() -> list[torch.Tensor]:
    return [torch.ones_like(param) for param in params()]


@kinds
@pytest.mark.parametrize("mode", APART, ids=str)
def test_a_worker_that_dies_is_dropped_and_the_rest_go_on(
    ranks: Cluster, mode: ServerMode, caplog: pytest.LogCaptureFixture
) -> None:
    """It has pushed twice; rank 1 waits for it, in one of the modes, and goes on."""

    def run(backend: Backend) -> ServiceRecord | None:
        if backend.rank == 0:
            return ParameterServer.serve(params(), backend, sgd, mode=mode, quorum=2)
        client = ParameterServer.connect(params(), backend)
        if backend.rank == 2:
            client.push(ones())
            client.push(ones())
            whole(backend).abort()
            return None
        for _ in range(6):
            client.step(ones())
        client.close()
        return None

    with caplog.at_level(logging.WARNING, logger="phalanx"):
        record = ranks.run(run, 3)[0]
    assert record is not None
    assert (record.steps, record.pushes) == (8, {1: 6, 2: 2})
    assert list(record.dropped) == [2]
    (line,) = [r.getMessage() for r in caplog.records if "goes on without" in r.getMessage()]
    assert "without worker rank 2, of which 2 pushes were applied: rank 2" in line


@kinds
@pytest.mark.parametrize("servers", [1, 2])
def test_in_synchronous_mode_everyone_is_told_who_died_and_in_which_step(
    ranks: Cluster, servers: int
) -> None:
    places = range(servers)
    victim = servers

    def run(backend: Backend) -> tuple[int | None, str]:
        if backend.rank in places:
            with pytest.raises(PeerLostError) as info:
                ParameterServer.serve(params(), backend, sgd, servers=places)
            return info.value.peer, str(info.value)
        client = ParameterServer.connect(params(), backend, servers=places)
        if backend.rank == victim:
            for _ in range(2):
                client.step(ones())
            whole(backend).abort()
            return victim, "in step 3"

        def work() -> None:
            for _ in range(3):  # word of the loss may overtake what the second one waits for
                client.step(ones())

        with pytest.raises(PeerLostError) as info:
            work()
        for call in (client.pull, lambda: client.push(ones())):
            with pytest.raises(PeerLostError) as again:
                call()
            assert again.value.peer == info.value.peer
        client.close()
        return info.value.peer, str(info.value)

    for peer, text in ranks.run(run, servers + 3):
        assert peer == victim
        assert f"rank {victim}" in text or text == "in step 3"
        assert "in step 3" in text


@kinds
@pytest.mark.parametrize("mode", [ServerMode.SYNCHRONOUS, *APART], ids=str)
def test_when_a_server_dies_the_workers_and_other_servers_name_it(
    ranks: Cluster, mode: ServerMode
) -> None:
    def run(backend: Backend) -> tuple[int | None, str] | ServiceRecord:
        def die(record: ServiceRecord) -> None:
            if record.steps == 2:
                whole(backend).abort()
                raise KeyboardInterrupt

        if backend.rank == 0:
            with pytest.raises(KeyboardInterrupt):
                ParameterServer.serve(
                    params(), backend, sgd, servers=(0, 1), mode=mode, on_step=die
                )
            return 0, "rank 0 was lost"
        if backend.rank == 1 and not mode.together:
            return ParameterServer.serve(params(), backend, sgd, servers=(0, 1), mode=mode)

        def work() -> None:
            client = ParameterServer.connect(params(), backend, servers=(0, 1))
            while True:
                client.step(ones())

        def serve() -> None:
            ParameterServer.serve(params(), backend, sgd, servers=(0, 1), mode=mode)

        with pytest.raises(PeerLostError) as info:
            serve() if backend.rank == 1 else work()
        return info.value.peer, str(info.value)

    for outcome in ranks.run(run, 4):
        if isinstance(outcome, ServiceRecord):
            assert sorted(outcome.dropped) == [2, 3]
            assert all("rank 0 was lost" in why for why in outcome.dropped.values())
        else:
            assert outcome[0] == 0
            assert "rank 0 was lost" in outcome[1]


@pytest.mark.parametrize("kind", [OSError, ValueError, PeerLostError])
def test_what_ends_a_server_ends_its_workers_with_the_reason(kind: type[Exception]) -> None:
    def run(backend: Backend) -> str:
        def full(record: ServiceRecord) -> None:
            raise kind("the disk is full")

        if backend.rank == 0:
            with pytest.raises(kind, match="full"):
                ParameterServer.serve(
                    params(), backend, sgd, mode=ServerMode.ASYNCHRONOUS, on_step=full
                )
            return ""
        with pytest.raises(PeerLostError) as info:
            ParameterServer.connect(params(), backend).step(ones())
        assert info.value.peer == 0
        return str(info.value)

    _, *texts = simulate(run, 3)
    for rank, text in enumerate(texts, 1):
        assert f"rank {rank}: ParameterClient." in text
        assert f"server rank 0 ended with {kind.__name__}('the disk is full')" in text


def test_a_body_that_raises_is_a_worker_that_is_lost() -> None:
    def run(backend: Backend) -> dict[int, str]:
        if backend.rank == 0:
            mode = ServerMode.ASYNCHRONOUS
            return ParameterServer.serve(params(), backend, sgd, mode=mode).dropped
        with pytest.raises(ZeroDivisionError), ParameterServer.connect(params(), backend):
            _ = 1 / 0
        return {}

    dropped, _ = simulate(run, 2)
    assert list(dropped) == [1]
    assert "worker rank 1 ended with ZeroDivisionError" in dropped[1]


def test_a_rank_that_was_lost_before_the_service_began_is_not_waited_for(
    cluster: Cluster,
) -> None:
    def run(backend: Backend) -> dict[int, int]:
        backend.barrier()  # all have formed: a rank of Gloo may be in the group, and others not yet
        if backend.rank == 2:
            whole(backend).abort()
            return {}
        with contextlib.suppress(PeerLostError):
            backend.barrier()
        if backend.rank == 1:
            with ParameterServer.connect(params(), backend) as client:
                client.push(ones())
            return {}
        mode = ServerMode.staleness(0)
        record = ParameterServer.serve(params(), backend, sgd, mode=mode, quorum=2)
        assert list(record.dropped) == [2]
        return record.pushes

    assert cluster.run(run, 3)[0] == {1: 1, 2: 0}


OTHER_LISTS = {
    "a shape": ([torch.zeros(3), torch.zeros(5)], "parameter 1 (float32 [5])"),
    "a dtype": ([torch.zeros(3).double(), torch.zeros(2)], "parameter 0 (float64 [3])"),
    "too few": ([torch.zeros(3)], "no more parameters"),
    "too many": ([*params(), torch.zeros(1)], "parameter 2 (float32 [1])"),
}


@pytest.mark.parametrize("what", OTHER_LISTS)
@pytest.mark.parametrize("mode", [ServerMode.SYNCHRONOUS, ServerMode.ASYNCHRONOUS], ids=str)
def test_lists_that_differ_are_refused_on_both_sides_naming_the_first_that_does(
    what: str, mode: ServerMode
) -> None:
    other, words = OTHER_LISTS[what]

    def run(backend: Backend) -> str:
        if backend.rank == 0:
            if not mode.together:
                record = ParameterServer.serve(params(), backend, sgd, mode=mode)
                assert record.pushes == {1: 1, 2: 0}
                return record.dropped[2]
            with pytest.raises(DesyncError) as info:
                ParameterServer.serve(params(), backend, sgd, mode=mode)
            assert info.value.peer == 2
            return str(info.value)
        if backend.rank == 1 and not mode.together:
            with ParameterServer.connect(params(), backend) as client:
                client.push(ones())
            return words
        mine = other if backend.rank == 2 else params()
        with pytest.raises(DesyncError) as info:
            ParameterServer.connect(mine, backend).step(ones())
        return str(info.value)

    for text in simulate(run, 3):
        assert words in text
        assert text == words or "worker rank 2 has" in text


def test_other_servers_are_a_difference_too() -> None:
    def run(backend: Backend) -> None:
        if backend.rank == 2:
            with pytest.raises(
                DesyncError, match="rank 2 has servers 0, server rank 0 has servers 0, 1"
            ):
                ParameterServer.connect(params(), backend)
        else:
            with pytest.raises(DesyncError, match="servers 0, 1"):
                ParameterServer.serve(params(), backend, sgd, servers=(0, 1))

    def main(backend: Backend) -> None:
        if backend.rank != 1:
            run(backend)

    simulate(main, 3)


@pytest.mark.timeouts
@pytest.mark.together
def test_a_server_that_hears_of_nobody_says_whom_it_waits_for(cluster: Cluster) -> None:
    def run(backend: Backend) -> None:
        if backend.rank == 0:
            with pytest.raises(CollectiveTimeoutError) as info:
                ParameterServer.serve(params(), backend, sgd, timeout=0.5, quorum=1)
            words = "has heard nothing of anybody for 0.5 s: ranks 1, 2, 3 did not come"
            assert words in str(info.value)
            assert info.value.peer == 1
        backend.barrier()
        if backend.rank == 1:
            with pytest.raises(PeerLostError, match="server rank 0 ended with CollectiveTimeout"):
                ParameterServer.connect(params(), backend)
        backend.barrier()

    cluster.run(run, 4)


@pytest.mark.timeouts
@pytest.mark.together
def test_a_worker_whose_server_does_not_serve_names_it(cluster: Cluster) -> None:
    def run(backend: Backend) -> None:
        if backend.rank == 0:
            backend.barrier()
            with pytest.raises(PeerLostError, match="worker rank 1 ended with Collective"):
                ParameterServer.serve(params(), backend, sgd)
            return
        with pytest.raises(
            CollectiveTimeoutError, match=r"ParameterClient.connect.*rank 0"
        ) as info:
            ParameterServer.connect(params(), backend, timeout=0.5)
        assert info.value.peer == 0
        backend.barrier()

    cluster.run(run, 2)


def test_a_list_of_parameters_that_is_announced_too_long_is_not_waited_for() -> None:
    words = r"rank 1: ParameterClient.connect: server rank 0 announces a list .* are taken at most"

    def run(backend: Backend) -> None:
        if backend.rank == 0:
            pair = backend.subgroup((0, 1))
            message = torch.empty(HEADER_SIZE, dtype=torch.uint8)
            pair.recv(message, 1, tag=HEADERS)
            request = MessageHeader.read(message).request
            answer = MessageHeader(MessageKind.DIFFERS, request, LONGEST_TEXT + 1)
            pair.send(answer.message(), 1, tag=HEADERS)
        else:
            with pytest.raises(SizeMismatchError, match=words):
                ParameterServer.connect(params(), backend)

    simulate(run, 2)
