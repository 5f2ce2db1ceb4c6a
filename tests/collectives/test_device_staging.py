"""Collectives of tensors on a device, on a stand-in that lags behind (`lagging_copies.py`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from clusters import Cluster, Hybrid, SharedMemory, Tcp
from hypothesis import given
from hypothesis import strategies as st
from lagging_copies import LaggingCopies
from torch import Tensor

import phalanx
from phalanx import (
    Backend,
    CollectiveTimeoutError,
    DesyncError,
    PeerLostError,
    PendingCollective,
    ReduceOp,
)
from phalanx.collectives.resolve import _resolve
from phalanx.collectives.staging import SLICES, StagedCollective
from phalanx.core.device import BUFFERS_KEPT

CLUSTERS = pytest.mark.parametrize("over", [Tcp(), SharedMemory(), Hybrid()], ids=str)
CPU = torch.device("cpu")
SHAPES = ((1, torch.float32), (128, torch.bfloat16), (65, torch.int64), (500, torch.float32))
MEMORY = 2 * LaggingCopies.staging_bytes  # of a collective that is under way


def device_of(backend: Backend) -> LaggingCopies:
    """The stand-in for this rank's device."""
    copies = backend.engine.copies.setdefault(CPU, LaggingCopies())
    assert isinstance(copies, LaggingCopies)
    return copies


def issue(form: Any, *args: Any, **options: Any) -> PendingCollective[Any]:
    """What `async_` forms do with tensors on a device."""
    request = form.request(*args, **options)
    backend = request.backend
    device_of(backend)
    arguments, result = request._staged(_resolve(request).plan, CPU)
    name, steps, buffers, combine, signature, fingerprint, timeout = arguments
    return backend.issue(
        name,
        steps,
        buffers,
        combine=combine,
        result=result,
        signature=signature,
        fingerprint=fingerprint,
        timeout=timeout,
        background=True,
    )


def ramp(length: int, dtype: torch.dtype, rank: int) -> Tensor:
    return (torch.arange(length) % 7 + rank).to(dtype)


Arguments = Callable[[Tensor, Tensor], "tuple[Any, Tensor, Mapping[str, Any]]"]

# A form of each collective, and what it is given: a tensor, or one with a slice for each rank.
CALLS: dict[str, Arguments] = {
    "all_reduce": lambda t, w: (phalanx.all_reduce, t, {}),
    "all_reduce mean": lambda t, w: (phalanx.all_reduce, t, {"op": ReduceOp.MEAN}),
    "all_reduce in rank order": lambda t, w: (phalanx.all_reduce, t, {"reproducible": True}),
    "all_reduce_": lambda t, w: (phalanx.all_reduce_, t, {}),
    "reduce": lambda t, w: (phalanx.reduce, t, {"root": 1}),
    "reduce_": lambda t, w: (phalanx.reduce_, t, {"root": 1}),
    "reduce_scatter": lambda t, w: (phalanx.reduce_scatter, w, {}),
    "broadcast": lambda t, w: (phalanx.broadcast, t, {"root": 1}),
    "broadcast_": lambda t, w: (phalanx.broadcast_, t, {"root": 1}),
    "all_gather": lambda t, w: (phalanx.all_gather, t, {}),
    "gather": lambda t, w: (phalanx.gather, t, {"root": 1}),
    "scatter": lambda t, w: (phalanx.scatter, w, {"root": 1}),
    "all_to_all": lambda t, w: (phalanx.all_to_all, w, {}),
}


@CLUSTERS
def test_every_collective_gives_what_it_gives_on_the_cpu(over: Cluster) -> None:
    def run(backend: Backend) -> None:
        for length, dtype in SHAPES:
            tensor = ramp(length, dtype, backend.rank)
            whole = torch.cat([tensor + k for k in range(backend.world_size)])
            for name, arguments in CALLS.items():
                form, given, options = arguments(tensor.clone(), whole.clone())
                expected = form(given, backend, **options)
                form, given, options = arguments(tensor.clone(), whole.clone())
                came = issue(form, given, backend, **options).wait()
                if expected is not None:
                    device_of(backend).read(came)
                    assert torch.equal(came, expected), (name, length, dtype)

    over.run(run, 3)


def test_each_collective_of_the_table_is_staged() -> None:
    assert {name.split()[0].rstrip("_") for name in CALLS} == set(SLICES)


def test_memory_does_not_grow_with_the_tensor_and_is_used_again() -> None:
    def run(backend: Backend) -> None:
        device = device_of(backend)
        for length in (10, 10_000, 5_000):
            for form in (phalanx.all_reduce, phalanx.all_gather):
                came = issue(form, torch.zeros(length), backend).wait()
                device.read(came)
        assert device.taken == MEMORY
        assert len(device._buffers) == 2 <= BUFFERS_KEPT

    Tcp().run(run, 2)


def test_each_byte_crosses_the_bus_once() -> None:
    def run(backend: Backend) -> None:
        device = device_of(backend)
        for name, arguments in CALLS.items():
            device.bytes_to_host = device.bytes_to_device = 0
            form, given, options = arguments(torch.zeros(1000), torch.zeros(3000))
            came = issue(form, given, backend, **options).wait()
            if backend.rank == 1:  # which is the root, where there is one
                assert (device.bytes_to_host, device.bytes_to_device) == (
                    given.nbytes,
                    came.nbytes,
                ), name

    Tcp().run(run, 3)


@given(
    length=st.integers(1, 3000), itemsize=st.sampled_from([1, 2, 4, 8, 16]), p=st.integers(2, 90)
)
def test_pieces_fit_their_buffer_whatever_the_size(length: int, itemsize: int, p: int) -> None:
    dtypes = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
    for name, (gives, gets) in SLICES.items():
        staged = StagedCollective(
            LaggingCopies(),
            name,
            None,
            None,
            rank=p - 1,
            size=p,
            shape=(length * (p if gives or gets else 1),),
            dtype=dtypes[itemsize],
            bind=lambda *_: ((), (), None, int),
        )
        rows = max(staged._first_given + staged._rows_given, staged._rows)
        assert staged._piece >= 1
        assert rows * min(staged._piece, length) * itemsize <= staged._size
        assert staged._length == length


# ------------------------------------------------------------------------------
# Order: what the caller's stream does before and after.


@CLUSTERS
def test_it_comes_behind_what_the_stream_was_given_before(over: Cluster) -> None:
    def run(backend: Backend) -> None:
        device, tensor = device_of(backend), torch.zeros(1000)
        device.kernels.add(lambda: tensor.fill_(backend.rank + 1))
        assert issue(phalanx.all_reduce_, tensor, backend).wait() is tensor
        device.kernels.add(lambda: tensor.mul_(2))
        assert set(device.read(tensor)) == {6.0}

    over.run(run, 2)


def test_a_result_is_ordered_and_not_waited_for() -> None:
    def run(backend: Backend) -> None:
        device = device_of(backend)
        came = issue(phalanx.broadcast, torch.full((50,), 5.0), backend).wait()
        assert device.copies.done < len(device.copies.actions)
        assert device.read(came) == [5.0] * 50

    Tcp().run(run, 2)


def test_works_under_way_at_once_end_in_any_order() -> None:
    def run(backend: Backend) -> None:
        groups = [backend, *(backend.subgroup(range(2)) for _ in range(3))]
        for group in groups:
            group.engine.copies.setdefault(CPU, device_of(backend))
        tensors = [torch.full((700,), float(n + backend.rank)) for n in range(8)]
        works = [issue(phalanx.all_reduce_, t, groups[n % 4]) for n, t in enumerate(tensors)]
        for n in (5, 2, 7, 0, 1, 6, 3, 4):
            assert set(device_of(backend).read(works[n].wait())) == {2.0 * n + 1}

    Tcp().run(run, 2)


# ------------------------------------------------------------------------------
# What goes wrong.


@CLUSTERS
def test_a_tensor_of_the_cpu_on_another_rank_is_told(over: Cluster) -> None:
    def run(backend: Backend) -> None:
        tensor, on_cpu = torch.zeros(9), backend.rank == 1
        begin = phalanx.async_all_reduce if on_cpu else partial(issue, phalanx.all_reduce)
        work = begin(tensor, backend)
        with pytest.raises(DesyncError, match=r"float32 \[9\], sum.*, on a device"):
            work.wait()

    over.run(run, 2)


def test_a_rank_that_dies_in_between_is_named_and_buffers_are_given_back() -> None:
    def run(backend: Backend) -> None:
        device = device_of(backend)
        issue(phalanx.all_reduce, torch.zeros(1000), backend).wait()
        backend.barrier()
        if backend.rank == 1:
            backend.abort()
            return
        with pytest.raises(PeerLostError, match="rank 1"):
            issue(phalanx.all_reduce, torch.zeros(100_000), backend).wait()
        assert sum(stage.nbytes for stage in device._buffers) == device.taken == MEMORY

    Tcp().run(run, 2)


def test_a_device_that_does_not_come_to_it_is_what_a_deadline_names() -> None:
    def run(backend: Backend) -> None:
        device_of(backend).copies.stuck = True
        with pytest.raises(
            CollectiveTimeoutError, match=r"waited 0\.2 s for copies to or from its"
        ):
            issue(phalanx.all_reduce, torch.zeros(5), backend, timeout=0.2).wait()

    Tcp().run(run, 2)
