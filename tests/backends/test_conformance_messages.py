"""Messages between two ranks, on every kind of backend."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
import torch
from clusters import Cluster

from phalanx import Backend, recv, send, sendrecv

pytestmark = pytest.mark.wide

DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
DTYPES += [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn]
DTYPES += [torch.uint16, torch.complex64, torch.complex128]


def test_a_tensor_of_every_dtype_arrives_bit_for_bit(cluster: Cluster) -> None:
    def bits(number: int, dtype: torch.dtype) -> torch.Tensor:
        count = 6 * dtype.itemsize
        mask = 1 if dtype is torch.bool else 255
        return torch.tensor([7 * number + 3 * i & mask for i in range(count)], dtype=torch.uint8)

    def exchange(backend: Backend) -> None:
        for number, dtype in enumerate(DTYPES):
            content = bits(number, dtype)
            if backend.rank == 0:
                backend.send(content.view(dtype).reshape(2, 3), 1)
            else:
                into = torch.zeros(2, 3, dtype=dtype)
                backend.recv(into, 0)
                assert torch.equal(into.flatten().view(torch.uint8), content), dtype

    cluster.run(exchange, 2)


def test_what_is_not_contiguous_is_sent_and_received_by_its_values(cluster: Cluster) -> None:
    def exchange(backend: Backend) -> None:
        values = torch.arange(12.0).reshape(3, 4)
        if backend.rank == 0:
            backend.send(values.t(), 1)
            backend.send(values[:, ::2], 1)
            backend.send(torch.tensor(5.0).expand(3), 1)
            backend.send(values[1:2, :].squeeze(), 1)
            return
        frame = torch.zeros(5, 3)
        backend.recv(frame[:4], 0)
        assert torch.equal(frame, torch.cat([values.t(), torch.zeros(1, 3)]))
        frame = torch.zeros(3, 4)
        backend.recv(frame[:, 1::2], 0)
        assert torch.equal(frame[:, 1::2], values[:, ::2])
        assert not frame[:, ::2].any(), "what lies between must not be touched"
        frame = torch.zeros(3, 2)
        backend.recv(frame[:, 0], 0)
        assert frame.tolist() == [[5.0, 0.0]] * 3
        frame = torch.zeros(4)
        backend.recv(frame.view(2, 2).t(), 0)
        assert frame.view(2, 2).t().flatten().tolist() == values[1].tolist()

    cluster.run(exchange, 2)


def test_a_parameter_can_be_received_into_however_it_lies(cluster: Cluster) -> None:
    def exchange(backend: Backend) -> None:
        weight = torch.nn.Parameter(torch.zeros(3, 2))
        values = torch.arange(6.0)
        if backend.rank == 0:
            backend.send(values.reshape(3, 2).requires_grad_(), 1)
            backend.send(values.reshape(2, 3), 1)
        else:
            backend.recv(weight, 0)
            assert torch.equal(weight.detach(), values.reshape(3, 2))
            backend.recv(weight.t(), 0)
            assert torch.equal(weight.detach(), values.reshape(2, 3).t())
            assert weight.requires_grad
            assert weight.is_leaf

    cluster.run(exchange, 2)


def test_everything_with_the_buffer_protocol_is_a_message(cluster: Cluster) -> None:
    def exchange(backend: Backend) -> None:
        if backend.rank == 0:
            for data in (b"bytes", bytearray(b"array"), memoryview(b"views")):
                backend.send(data, 1)
            backend.send(array("i", [1, 2, 3]), 1)
            backend.send(np.arange(3, dtype=np.int32) + 1, 1)
            return
        for expected in (b"bytes", b"array", b"views"):
            into = bytearray(5)
            backend.recv(into, 0)
            assert into == expected
        numbers = array("i", [0, 0, 0])
        backend.recv(memoryview(numbers), 0)
        assert numbers == array("i", [1, 2, 3])
        matrix = np.zeros((3, 1), dtype=np.int32)
        backend.recv(matrix, 0)
        assert matrix.ravel().tolist() == [1, 2, 3]

    cluster.run(exchange, 2)


def test_a_message_of_no_bytes_is_a_message_all_the_same(cluster: Cluster) -> None:
    empties = [torch.empty(0), torch.empty(3, 0), b"", bytearray(), np.zeros(0), np.zeros((0, 3))]

    def exchange(backend: Backend) -> None:
        for empty in empties:
            if backend.rank == 0:
                backend.send(empty, 1)
                backend.send(b"!", 1)
            else:
                into = bytearray(1)
                backend.recv(bytearray() if isinstance(empty, bytes) else empty, 0)
                backend.recv(into, 0)
                assert into == b"!"

    cluster.run(exchange, 2)


def test_messages_of_one_tag_stay_in_order_and_tags_do_not_mix(cluster: Cluster) -> None:
    tags = (0, 1, 7, 2**31 - 1)

    def exchange(backend: Backend) -> None:
        if backend.rank == 0:
            for number in range(5):
                for tag in tags:
                    backend.send(f"{number} {tag:>10}".encode(), 1, tag=tag)
            return
        into = bytearray(12)
        for tag in reversed(tags):
            for number in range(5):
                backend.recv(into, 0, tag=tag)
                assert into == f"{number} {tag:>10}".encode()

    cluster.run(exchange, 2)


def test_the_sender_may_use_its_memory_again_at_once(cluster: Cluster) -> None:
    def exchange(backend: Backend) -> list[int]:
        got = []
        if backend.rank == 0:
            memory = torch.zeros(1000, dtype=torch.int64)
            for number in range(10):
                memory.fill_(number)
                backend.send(memory, 1)
            backend.send(memory, 1, tag=1)
        else:
            into = torch.empty(1000, dtype=torch.int64)
            backend.recv(into, 0, tag=1)  # by now all of tag 0 have been sent
            for _ in range(10):
                backend.recv(into, 0)
                assert (into == into[0]).all()
                got.append(int(into[0]))
        return got

    assert cluster.run(exchange, 2)[1] == list(range(10))


def test_a_send_does_not_need_its_receiver_to_have_called(cluster: Cluster) -> None:
    def exchange(backend: Backend) -> list[int]:
        right, left = (backend.rank + 1) % 3, (backend.rank - 1) % 3
        out = torch.tensor([backend.rank, 10, 20])
        into = torch.zeros(3, dtype=torch.int64)
        backend.send(out, right)  # all three send before any of them receives
        backend.recv(into, left)
        return into.tolist()

    assert cluster.run(exchange, 3) == [[2, 10, 20], [0, 10, 20], [1, 10, 20]]


def test_large_messages_cross_in_both_directions_at_once(cluster: Cluster) -> None:
    count = (5 << 20) + 3  # more than one frame, and more than a socket takes at once

    def exchange(backend: Backend) -> None:
        other = 1 - backend.rank
        into = torch.zeros(count, dtype=torch.uint8)
        mine = torch.full((count,), backend.rank + 1, dtype=torch.uint8)
        backend.sendrecv(mine, other, into, other)
        assert (into == other + 1).all()
        backend.send(mine, other)
        backend.recv(into.zero_(), other)
        assert (into == other + 1).all()

    cluster.run(exchange, 2)


def test_sendrecv_writes_the_values_of_what_is_not_contiguous_and_nothing_between_them(
    cluster: Cluster,
) -> None:
    def exchange(backend: Backend) -> None:
        other = 1 - backend.rank
        frame = torch.zeros(3, 4)
        sendrecv(torch.arange(6.0).reshape(2, 3).t(), backend, other, frame[:, 1::2], other)
        assert frame.tolist() == [[0, 0, 0, 3], [0, 1, 0, 4], [0, 2, 0, 5]]

    cluster.run(exchange, 2)


def test_sendrecv_goes_round_a_ring(cluster: Cluster) -> None:
    def shift(backend: Backend) -> int:
        size = backend.world_size
        value = torch.tensor(backend.rank)
        for _ in range(size + 1):
            into = torch.empty_like(value)
            sendrecv(value, backend, (backend.rank + 1) % size, into, (backend.rank - 1) % size)
            value = into
        return int(value)

    assert cluster.run(shift, 4) == [3, 0, 1, 2]


def test_the_functions_and_the_methods_are_the_same(cluster: Cluster) -> None:
    def exchange(backend: Backend) -> None:
        into = torch.zeros(2)
        if backend.rank == 0:
            send(torch.ones(2), backend, 1, tag=3, timeout=10)
            backend.recv(into, 1, tag=4, timeout=10)
        else:
            recv(into, backend, 0, tag=3, timeout=float("inf"))
            backend.send(2 * into, 0, tag=4, timeout=10.5)
        assert into.tolist() == [2 - backend.rank] * 2

    cluster.run(exchange, 2)


def test_memory_from_empty_can_be_sent_and_received_into(cluster: Cluster) -> None:
    def exchange(backend: Backend) -> None:
        memory = backend.empty(3, 2, dtype=torch.float64)
        assert (memory.shape, memory.dtype) == ((3, 2), torch.float64)
        assert backend.empty(0).shape == (0,)
        other = 1 - backend.rank
        into = backend.empty(3, 2, dtype=torch.float64)
        backend.sendrecv(memory.fill_(backend.rank), other, into, other)
        assert (into == other).all()

    cluster.run(exchange, 2)


@pytest.mark.checkered
@pytest.mark.parametrize("order", [(1, 2, 3), (3, 1, 2)])
def test_a_rank_receives_from_many_in_the_order_that_it_likes(
    cluster: Cluster, order: tuple[int, ...]
) -> None:
    def gather(backend: Backend) -> list[int]:
        into = torch.zeros(1, dtype=torch.int64)
        if backend.rank:
            backend.send(torch.tensor([backend.rank * 11]), 0)
            return []
        got = []
        for src in order:
            backend.recv(into, src)
            got.append(int(into))
        return got

    assert cluster.run(gather, 4)[0] == [11 * src for src in order]
