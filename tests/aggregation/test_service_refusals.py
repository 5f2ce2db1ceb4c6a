"""One bad push: refused to its worker by name, and nothing of it reaches the parameters."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import pytest
import torch
from service_runs import MODES, sgd
from torch import Tensor

from phalanx import Backend, ParameterServer, PeerLostError, simulate
from phalanx.aggregation import ParameterClient, ServerMode, ServiceRecord
from phalanx.aggregation.parameter_server.wire import HEADERS, MessageHeader, MessageKind

BAD = [math.nan, math.inf, -math.inf]


def params() -> list[Tensor]:
    return [torch.zeros(3), torch.zeros(2, dtype=torch.bfloat16)]


def ones() -> list[Tensor]:
    return [torch.ones_like(param) for param in params()]


def one_bad(value: float) -> list[Tensor]:
    """The last value of the second gradient."""
    gradients = ones()
    gradients[1][1] = value
    return gradients


@pytest.mark.checkered
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("call", [ParameterClient.push, ParameterClient.step])
def test_a_gradient_that_is_not_finite_is_refused_and_training_goes_on(
    mode: ServerMode, value: float, call: Callable[[ParameterClient, list[Tensor]], object]
) -> None:
    """Rank 2 has a bad second step, and skips it, as the error says."""

    def run(backend: Backend) -> ServiceRecord | None:
        if backend.rank == 0:
            return ParameterServer.serve(params(), backend, sgd, mode=mode, quorum=2)
        with ParameterServer.connect(params(), backend) as client:
            for step in range(4):
                if backend.rank == 2 and step == 1:
                    with pytest.raises(
                        ValueError, match=rf"rank 2: .* gradient 1 .*\[2\].* {value}"
                    ):
                        call(client, one_bad(value))
                    assert client.pushes == 1
                    client.skip()
                else:
                    client.step(ones())
            fresh = client.pull()
            assert all(param.isfinite().all() for param in fresh)
        return None

    record = simulate(run, 3)[0]
    assert record is not None
    assert record.pushes == {1: 4, 2: 4}
    assert record.steps == (4 if mode.together else 7)
    assert record.dropped == {}
    assert all(param.isfinite().all() for param in record.params)


def test_nothing_of_a_bad_push_reaches_any_of_several_servers() -> None:
    """Also not the part of a server whose gradients are finite."""

    def run(backend: Backend) -> ServiceRecord | None:
        if backend.rank < 2:
            return ParameterServer.serve(
                params(), backend, sgd, servers=(0, 1), mode=ServerMode.ASYNCHRONOUS
            )
        client = ParameterServer.connect(params(), backend, servers=(0, 1))
        with pytest.raises(ValueError, match="nothing was sent"):
            client.push(one_bad(math.nan))
        client.close()
        return None

    for record in simulate(run, 3)[:2]:
        assert record is not None
        assert record.steps == 0
        assert not any(param.any() for param in record.params)


def push_unchecked(client: ParameterClient) -> None:
    for connection in client._connections:
        connection.fill(one_bad(math.nan))
    client._call(MessageKind.PUSH, 1, "push", None)


def push_of_nothing(client: ParameterClient) -> None:
    """A header that says PUSH, without gradients."""
    (connection,) = client._connections
    header = MessageHeader(MessageKind.PUSH, 99, 1)
    connection.pair.send(header.message(), 1 - connection.pair.rank, tag=HEADERS)
    client.pull()


LIES = {
    "a gradient of parameter 1 with the value nan": push_unchecked,
    "it says PUSH in a message of another kind": push_of_nothing,
}


def liar_and_server(mode: ServerMode, lie: Callable[[ParameterClient], None]) -> list[object]:
    """What became of the server, an honest worker, and one that does not use its client's calls."""

    def run(backend: Backend) -> object:
        try:
            if backend.rank == 0:
                return ParameterServer.serve(params(), backend, sgd, mode=mode, quorum=2)
            client = ParameterServer.connect(params(), backend)
            if backend.rank == 2:
                lie(client)
            for _ in range(3):
                client.push(ones())
                client.pull()
            client.close()
        except PeerLostError as error:
            return error
        return "well"

    return simulate(run, 3)


@pytest.mark.parametrize(("why", "lie"), LIES.items(), ids=["not finite", "no gradients"])
@pytest.mark.parametrize("mode", [ServerMode.ASYNCHRONOUS, ServerMode.staleness(1)], ids=str)
def test_who_pushes_what_no_client_does_is_dropped_by_name_and_the_rest_go_on(
    mode: ServerMode,
    why: str,
    lie: Callable[[ParameterClient], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "phalanx"):
        record, honest, liar = liar_and_server(mode, lie)
    assert isinstance(record, ServiceRecord)
    assert honest == "well"
    assert record.params[0].tolist() == pytest.approx([-0.1 * (1 + 1.5 + 1.75)] * 3)
    assert why in record.dropped[2]
    assert why in str(liar)
    (line,) = [entry.getMessage() for entry in caplog.records]
    assert "without worker rank 2" in line


@pytest.mark.parametrize(("why", "lie"), LIES.items(), ids=["not finite", "no gradients"])
def test_in_synchronous_mode_all_are_told_who_it_was(
    why: str, lie: Callable[[ParameterClient], None]
) -> None:
    for outcome in liar_and_server(ServerMode.SYNCHRONOUS, lie):
        assert isinstance(outcome, PeerLostError)
        assert why in str(outcome)
