"""Sequences of collectives in shared memory, from several threads and groups, on real engines.

Whether a rank finds at a epoch that all have come, and goes on at once, or waits for them as an
operation does, is drawn: so every way is taken at every epoch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from clusters import SharedMemory
from shm_model import IN_PLACE, REDUCING, ROOTED, Call, same_bits
from torch import Tensor

import phalanx
from phalanx import Backend, ReduceOp
from phalanx.collectives.shm.plan import SHM_ALGORITHM
from phalanx.core.group import ASYNCHRONOUS, BLOCKING
from phalanx.transport.shm.epoch import ShmEpoch

PIECE = 1 << 10  # of `short_pieces`
LONG = 40  # collectives of a thread
DTYPES = (torch.float32, torch.int64, torch.bfloat16)


pytestmark = pytest.mark.usefixtures("short_pieces")


def a_call(random: Random, size: int) -> Call:
    bits = (0, 255, random.randrange(256))
    return Call(
        random.choice(sorted(SHM_ALGORITHM)),
        random.choice((1, random.randrange(1, 50), random.randrange(1, 4 * PIECE // 8))),
        random.randrange(size),
        random.choice(DTYPES),
        random.choice((ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.MIN)),
        random.randrange(size),
        *(random.choice(bits), random.choice(bits), random.choice(bits)),
    )


def begin(call: Call, given: Tensor, backend: Backend, *, wait: bool) -> Callable[[], Any]:
    """Do it, or begin to; what is called for the result."""
    rank = backend.rank
    tensor = given
    if call.registered >> rank & 1:
        tensor = backend.empty(given.numel(), dtype=given.dtype).copy_(given)
    options: dict[str, Any] = {}
    if call.collective in REDUCING:
        options["op"] = call.op
    if call.collective in ROOTED:
        options["root"] = call.root
    in_place = bool(call.in_place & 1) and call.collective in IN_PLACE[:3]  # the same on all ranks
    name = call.collective + ("_" if in_place else "")
    if wait:
        result = getattr(phalanx, name)(tensor, backend, **options)
        return lambda: result
    return getattr(phalanx, f"async_{name}")(tensor, backend, **options).wait  # type: ignore[no-any-return]


def perform(backend: Backend, seed: int) -> None:
    """Many collectives; some are waited for later, and in another order."""
    size, rank = backend.world_size, backend.rank
    random = Random(seed)  # the same on every rank
    own = Random(seed * 10 + rank)
    under_way: list[tuple[Callable[[], Any], Call, Tensor | None]] = []

    def check(number: int) -> None:
        wait, call, expected = under_way.pop(number)
        result = wait()
        if expected is not None:
            assert same_bits(result, expected), f"rank {rank} of {size}, seed {seed}: {call}"

    for number in range(LONG):
        call = a_call(random, size)
        everything = call.everything(size, seed + number)
        waits = random.random() < 0.6
        now = begin(call, everything.given[rank].clone(), backend, wait=waits)
        under_way.append((now, call, everything.expected[rank]))
        while len(under_way) > own.randrange(1, 5):
            check(own.randrange(len(under_way)))
    while under_way:
        check(0)


@pytest.mark.parametrize("at_once", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("size", [2, 4])
def test_many_collectives_of_several_threads_and_groups_are_right(
    size: int, at_once: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_ready, random = ShmEpoch.ready, Random(size)

    def ready(epoch: ShmEpoch, *, spin: float = 0.0) -> bool:
        if not spin:
            return plain_ready(epoch)
        if random.random() >= at_once:
            return False
        return any(plain_ready(epoch, spin=1.0) for _ in range(20))

    monkeypatch.setattr(ShmEpoch, "ready", ready)

    def run(backend: Backend) -> None:
        everyone = backend.subgroup(range(size))
        groups: list[tuple[Backend, int]] = [(backend, 100), (everyone, 200)]
        if backend.rank < 2:
            groups.append((backend.subgroup([0, 1]), 300))
        if backend.rank >= size - 2:
            groups.append((backend.subgroup([size - 2, size - 1]), 400))
        failures: list[BaseException] = []

        def in_a_thread(group: Backend, seed: int) -> None:
            try:
                perform(group, seed)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=in_a_thread, args=each) for each in groups[1:]]
        for thread in threads:
            thread.start()
        perform(*groups[0])
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    SharedMemory().run(run, size)


def test_an_asynchronous_call_spins_once_and_briefly_and_a_blocking_one_at_every_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain_ready, spins = ShmEpoch.ready, threading.local()

    def ready(epoch: ShmEpoch, *, spin: float = 0.0) -> bool:
        if getattr(spins, "of", None) is None:  # or another thread does it
            return plain_ready(epoch, spin=spin)
        spins.of.append(spin)
        return spin > 0 and any(plain_ready(epoch, spin=spin) for _ in range(1_000_000))

    def run(backend: Backend) -> None:
        large = torch.ones(2 * PIECE)  # staged, so it takes several epochs
        spins.of = blocking = []
        phalanx.all_reduce_(large, backend)
        assert set(blocking) == {BLOCKING.first}
        assert len(blocking) > 1
        for tensor, expected in ((torch.ones(1), [ASYNCHRONOUS.first]), (large, [*ASYNCHRONOUS])):
            spins.of = asynchronous = []
            work = phalanx.async_all_reduce_(tensor, backend)
            assert asynchronous[:2] == expected
            assert not any(asynchronous[1:])
            spins.of = None
            work.wait()

    monkeypatch.setattr(ShmEpoch, "ready", ready)
    SharedMemory().run(run, 2)
