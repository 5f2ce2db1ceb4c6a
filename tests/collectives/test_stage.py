"""The stage of a collective: its memory is used again, and never by two at once."""

from __future__ import annotations

import torch
from clusters import Tcp

import phalanx
from phalanx import Backend, SimulatedBackend
from phalanx.collectives.stage import LARGEST_KEPT, borrow_stage, return_stage


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
