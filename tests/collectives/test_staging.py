"""The stage of a collective: its memory is used again, and never by two at once."""

from __future__ import annotations

import pytest
import torch
from clusters import Tcp

import phalanx
from phalanx import Backend, ReduceOp, SimulatedBackend
from phalanx.collectives import plan
from phalanx.collectives.layout import STAGE, ReduceStaged
from phalanx.collectives.plan import (
    LARGEST_KEPT,
    STAGE_LIMIT,
    Key,
    borrow_stage,
    make_plan,
    return_stage,
)
from phalanx.core.steps import Round


def one_backend() -> Backend:
    return SimulatedBackend.create_group(1)[0]


def test_a_stage_that_was_returned_is_lent_again_to_whoever_needs_no_more() -> None:
    backend = one_backend()
    first = borrow_stage(backend, 1000)
    return_stage(backend, first)
    assert borrow_stage(backend, 800) is first
    assert borrow_stage(backend, 800) is not first
    return_stage(backend, first)
    assert borrow_stage(backend, 1001).nbytes >= 1001


def test_a_stage_that_is_too_large_is_not_kept() -> None:
    backend = one_backend()
    large = borrow_stage(backend, LARGEST_KEPT + 1)
    return_stage(backend, large)
    assert borrow_stage(backend, 1) is not large


def test_reductions_under_way_at_once_have_a_stage_each() -> None:
    def run(backend: Backend) -> None:
        groups = [backend, *(backend.subgroup(range(3)) for _ in range(2))]
        for _ in range(3):
            tensors = [torch.full((30_000,), float(n + backend.rank)) for n in range(6)]
            pending = [
                phalanx.async_all_reduce(t, groups[n % 3], algorithm="direct")
                for n, t in enumerate(tensors)
            ]
            for n, one in enumerate(pending):
                assert (one.wait() == 3 * n + 3).all()

    Tcp().run(run, 3)


def test_one_call_after_another_has_the_same_stage() -> None:
    def run(backend: Backend) -> None:
        kept = []
        for _ in range(3):
            phalanx.all_reduce_(torch.ones(300), backend, algorithm="direct")
            kept.append(borrow_stage(backend, 1))
            return_stage(backend, kept[-1])
        assert kept[0] is kept[1] is kept[2]
        assert kept[0].nbytes == 2 * 100 * 4

    Tcp().run(run, 3)


@pytest.mark.parametrize("algorithm", ["direct", "star"])
@pytest.mark.parametrize("size", [3, 4, 7])
def test_a_large_tensor_is_reduced_piece_by_piece_and_every_byte_once(
    algorithm: str, size: int
) -> None:
    count = 100_000_003
    key = Key("all_reduce", algorithm, (count,), torch.float32, ReduceOp.SUM)
    plans = [make_plan(key, rank, size) for rank in range(size)]
    assert max(p.stage_size for p in plans) > STAGE_LIMIT // 2
    assert max(p.stage_size for p in plans) <= STAGE_LIMIT < LARGEST_KEPT
    staged = sorted(
        (s.start, s.stop) for p in plans for s in p.program if isinstance(s, ReduceStaged)
    )
    assert [start for start, _ in staged] == [0, *(stop for _, stop in staged[:-1])]
    assert staged[-1][1] == count
    rounds = [[step for step in p.program if isinstance(step, Round)] for p in plans]
    for sender in range(size):
        for receiver in range(size):
            sent = [s for r in rounds[sender] for s in r.sends if s.peer == receiver]
            got = [s for r in rounds[receiver] for s in r.receives if s.peer == sender]
            assert [s.stop - s.start for s in sent] == [s.stop - s.start for s in got]
            for out, into in zip(sent, got, strict=True):
                assert into.buffer == STAGE or out.start == into.start


@pytest.mark.parametrize("algorithm", ["direct", "star"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int32])
def test_pieces_give_the_same_bits_as_the_whole(
    algorithm: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(backend: Backend) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(backend.rank)
        tensor = (torch.randn(30_011, generator=generator) * 100).to(dtype)
        return [
            phalanx.all_reduce(tensor, backend, op, algorithm=algorithm)
            for op in (ReduceOp.SUM, ReduceOp.MEAN)
        ]

    whole = Tcp().run(run, 3)
    monkeypatch.setattr(plan, "STAGE_LIMIT", 8192)
    pieces = Tcp().run(run, 3)
    for expected, found in zip(whole, pieces, strict=True):
        assert all(map(torch.equal, expected, found))
