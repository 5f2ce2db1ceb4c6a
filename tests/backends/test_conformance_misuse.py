"""Calls that cannot be right are refused before anything is sent, on every kind of backend."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from clusters import Cluster

import phalanx
from phalanx import (
    Backend,
    InvalidRankError,
    MisuseError,
    SelfSendError,
    SimulatedBackend,
    UnsupportedOperationError,
    simulate,
)

Call = Callable[[Backend, int], object]  # (backend, peer)

CALLS: dict[str, Call] = {
    "send": lambda backend, peer: backend.send(b"x", peer),
    "recv": lambda backend, peer: backend.recv(bytearray(1), peer),
    "sendrecv to": lambda backend, peer: backend.sendrecv(b"x", peer, bytearray(1), 1),
    "sendrecv from": lambda backend, peer: backend.sendrecv(b"x", 1, bytearray(1), peer),
}

WAITING: dict[str, Callable[[Backend, float], object]] = {
    "send": lambda backend, seconds: backend.send(b"x", 1, timeout=seconds),
    "recv": lambda backend, seconds: backend.recv(bytearray(1), 1, timeout=seconds),
    "sendrecv": lambda backend, s: backend.sendrecv(b"x", 1, bytearray(1), 1, timeout=s),
    "barrier": lambda backend, seconds: backend.barrier(timeout=seconds),
    "all_reduce": lambda b, s: phalanx.all_reduce(torch.ones(2), b, timeout=s),
    "all_gather": lambda b, s: phalanx.all_gather(torch.ones(2), b, timeout=s),
    "broadcast": lambda b, s: phalanx.broadcast(torch.ones(2), b, timeout=s),
    "reduce_scatter": lambda b, s: phalanx.reduce_scatter(torch.ones(2), b, timeout=s),
    "async_all_reduce": lambda b, s: phalanx.async_all_reduce(torch.ones(2), b, timeout=s),
    "async_barrier": lambda b, s: phalanx.async_barrier(b, timeout=s),
}


def still_in_step(backend: Backend) -> None:
    """What every one of these tests ends with: the refused call has left no trace."""
    total = phalanx.all_reduce(torch.tensor([backend.rank + 1]), backend)
    assert total.tolist() == [sum(range(backend.world_size + 1))]
    other = backend.rank ^ 1
    if other < backend.world_size:
        into = bytearray(1)
        backend.sendrecv(b"y", other, into, other)
        assert into == b"y"


@pytest.mark.checkered
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_a_message_to_oneself_is_refused(cluster: Cluster, call: Call) -> None:
    def talk_to_oneself(backend: Backend) -> None:
        if backend.rank == 0:
            with pytest.raises(SelfSendError, match="rank 0: a message to or from itself") as info:
                call(backend, 0)
            assert (info.value.rank, info.value.peer) == (0, 0)
            assert isinstance(info.value, ValueError)
        still_in_step(backend)

    cluster.run(talk_to_oneself, 2)


@pytest.mark.checkered
@pytest.mark.parametrize("peer", [2, -1, 10**6])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_a_peer_that_does_not_exist_is_refused(cluster: Cluster, call: Call, peer: int) -> None:
    def call_nobody(backend: Backend) -> None:
        if backend.rank == 0:
            with pytest.raises(InvalidRankError, match=f"{peer} is not one of the 2 ranks") as info:
                call(backend, peer)
            assert (info.value.rank, info.value.peer) == (0, peer)
            assert isinstance(info.value, ValueError)
        still_in_step(backend)

    cluster.run(call_nobody, 2)


@pytest.mark.checkered
@pytest.mark.parametrize("peer", [(), "1", 1.0])
def test_a_rank_is_a_whole_number(cluster: Cluster, peer: object) -> None:
    def call(backend: Backend) -> None:
        for each in CALLS.values() if backend.rank == 0 else ():
            with pytest.raises(InvalidRankError, match=r"rank 0: peer .* is not one") as info:
                each(backend, peer)  # type: ignore[arg-type]
            assert (info.value.rank, info.value.peer) == (0, None)
        still_in_step(backend)

    cluster.run(call, 2)


@pytest.mark.checkered
@pytest.mark.parametrize("whole", [bool, np.int64, torch.tensor], ids=["bool", "numpy", "torch"])
def test_any_integer_may_say_which_rank(cluster: Cluster, whole: Callable[[int], int]) -> None:
    def exchange(backend: Backend) -> None:
        other, into = whole(1 - backend.rank), bytearray(1)
        backend.sendrecv(b"a", other, into, other)
        pending = phalanx.isend(b"b", backend, other)
        sender = backend.recv(into, other)
        pending.wait()
        assert (sender, type(sender), into) == (1 - backend.rank, int, b"b")
        still_in_step(backend)

    cluster.run(exchange, 2)


@pytest.mark.checkered
@pytest.mark.parametrize("call", WAITING.values(), ids=WAITING.keys())
def test_a_timeout_must_be_positive_and_a_refused_one_leaves_the_group_in_step(
    cluster: Cluster, call: Callable[[Backend, float], object]
) -> None:
    def refuse(backend: Backend) -> None:
        if backend.rank == 0:
            for seconds in (0, -1, -0.5, math.nan, -math.inf):
                with pytest.raises(ValueError, match="timeout must be a positive number"):
                    call(backend, seconds)
        still_in_step(backend)

    cluster.run(refuse, 2, timeout=15)


@pytest.mark.parametrize("seconds", [0, -1.0, math.nan])
def test_a_backend_without_a_positive_timeout_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="timeout must be a positive number"):
        SimulatedBackend.create_group(2, timeout=seconds)


@pytest.mark.parametrize("value", ["0", "-1", "nan", "soon"])
def test_a_heartbeat_that_is_no_positive_number_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("PHALANX_HEARTBEAT", value)
    with pytest.raises(
        ValueError, match=rf"\(PHALANX_HEARTBEAT\) must be a positive .* not.*{value}"
    ):
        phalanx.TcpBackend(0, 1, "127.0.0.1:29500")


@pytest.mark.checkered
@pytest.mark.parametrize("tag", [-1, 2**31, 2**70])
def test_a_tag_out_of_range_is_refused(cluster: Cluster, tag: int) -> None:
    def refuse(backend: Backend) -> None:
        other = 1 - backend.rank
        with pytest.raises(ValueError, match="tag must be between 0 and 2147483647"):
            backend.send(b"x", other, tag=tag)
        with pytest.raises(ValueError, match="tag must be between 0 and 2147483647"):
            backend.recv(bytearray(1), other, tag=tag)
        still_in_step(backend)

    cluster.run(refuse, 2)


def test_receiving_into_read_only_memory_is_refused_and_the_message_stays(cluster: Cluster) -> None:
    frozen = np.zeros(3, dtype=np.uint8)
    frozen.setflags(write=False)

    def exchange(backend: Backend) -> bytes:
        if backend.rank == 0:
            backend.send(b"abc", 1)
            return b""
        for target in (b"xyz", memoryview(b"xyz"), frozen):
            with pytest.raises(TypeError, match="read-only"):
                backend.recv(target, 0)
        into = bytearray(3)
        backend.recv(into, 0)
        return bytes(into)

    assert cluster.run(exchange, 2)[1] == b"abc"


def test_what_is_no_tensor_and_no_buffer_is_a_type_error(cluster: Cluster) -> None:
    def exchange(backend: Backend) -> None:
        other = 1 - backend.rank
        for thing in ("text", 5, None, [1, 2]):
            kind = type(thing).__name__
            with pytest.raises(TypeError, match=f"send takes a tensor, or a buffer .* not {kind}"):
                backend.send(thing, other)
            with pytest.raises(TypeError, match=f"recv takes a tensor, or a buffer .* not {kind}"):
                backend.recv(thing, other)
        still_in_step(backend)

    cluster.run(exchange, 2)


def test_a_tensor_that_is_not_dense_or_cannot_hold_a_message_is_refused_before_it_comes(
    cluster: Cluster,
) -> None:
    def exchange(backend: Backend) -> None:
        other = 1 - backend.rank
        for call in (
            lambda: backend.send(torch.eye(3).to_sparse(), other),
            lambda: backend.recv(torch.eye(3).to_sparse(), other),
        ):
            with pytest.raises(UnsupportedOperationError, match=r"moves dense .*\.to_dense\(\)"):
                call()
        with pytest.raises(MisuseError, match="several elements in one place"):
            backend.recv(torch.zeros(1).expand(3), other)
        still_in_step(backend)

    cluster.run(exchange, 2)


@pytest.mark.parametrize("tag", [1.0, "1", None])
def test_a_tag_is_a_whole_number(tag: Any) -> None:
    def refuse(backend: Backend) -> None:
        with pytest.raises(TypeError, match="tag is a whole number"):
            backend.send(b"x", 1 - backend.rank, tag=tag)
        still_in_step(backend)

    simulate(refuse, 2)


@pytest.mark.parametrize("call", WAITING.values(), ids=WAITING.keys())
def test_a_timeout_is_a_number(call: Callable[[Backend, Any], object]) -> None:
    def refuse(backend: Backend) -> None:
        if backend.rank == 0:
            with pytest.raises(TypeError, match="timeout is a number of seconds, not '5'"):
                call(backend, "5")
        still_in_step(backend)

    simulate(refuse, 2)


def test_a_tensor_on_another_device_is_refused(cluster: Cluster) -> None:
    def exchange(backend: Backend) -> None:
        other = 1 - backend.rank
        elsewhere = torch.empty(3, device="meta")
        for call in (
            lambda: backend.send(elsewhere, other),
            lambda: backend.recv(elsewhere, other),
            lambda: phalanx.all_reduce(elsewhere, backend),
            lambda: phalanx.all_reduce_(elsewhere, backend),
            lambda: phalanx.broadcast_(elsewhere, backend),
        ):
            with pytest.raises(UnsupportedOperationError, match="meta"):
                call()
        still_in_step(backend)

    cluster.run(exchange, 2)


def test_a_message_of_another_size_is_refused_by_name_and_the_next_one_is_fine(
    cluster: Cluster,
) -> None:
    def exchange(backend: Backend) -> None:
        if backend.rank == 0:
            for size in (12, 0, 3 << 20, 8):
                backend.send(bytes(size), 1, tag=5)
            backend.recv(bytearray(1), 1)
            for size in (12, 0, 3 << 20, 8):
                backend.send(bytes(size), 1, tag=5)
            return
        for time in ("the messages are here first", "the receives are posted first"):
            for number, size in enumerate((12, 0, 3 << 20)):
                with pytest.raises(phalanx.SizeMismatchError) as info:
                    backend.recv(bytearray(8), 0, tag=5)
                error = info.value
                assert "expected 8 bytes" in str(error), time
                assert f"sent {size} bytes" in str(error), time
                assert (error.rank, error.peer, error.op) == (1, 0, "recv"), time
                assert error.sequence == number + (time != "the messages are here first") * 4
            backend.recv(bytearray(8), 0, tag=5)
            if time == "the messages are here first":
                backend.send(b"!", 0)

    cluster.run(exchange, 2)
