"""`LocalSGD.join`, `DiLoCo.join`: ranks with fewer batches, or none, take part in others' syncs."""

from __future__ import annotations

import pytest
import torch
from clusters import Cluster
from ddp_runs import assert_same_bits, outcome_of
from forms import sizes
from hypothesis import given, settings
from hypothesis import strategies as st
from local_parts import EVERY, KINDS, OneProcess, assert_near, build, losses, take
from local_runs import adamw, sgd, values

from phalanx import Backend, DesyncError, LocalSGD, MisuseError, TopK, simulate
from phalanx.parallel import SyncBatchNorm
from phalanx.parallel.local_sgd.periodic import PeriodicSync

STEP = [[1.0, 0.5], [2.0]]


def plainly(model: PeriodicSync, optimizer: torch.optim.Optimizer, rank: int, number: int) -> None:
    """The same step without `step()`."""
    optimizer.zero_grad()
    for loss in losses(model, rank, number, STEP):
        (loss / 3.5).backward()
    optimizer.step()


def train(model: PeriodicSync, rank: int, count: int, *, weighted: bool) -> None:
    optimizer = sgd(model.parameters())
    with model.join():
        for number in range(count):
            if weighted:  # more on higher ranks
                take(model, optimizer, rank, number, STEP * (rank + 1))
            else:
                plainly(model, optimizer, rank, number)


def expected(kind: str, counts: list[int], *, weighted: bool) -> OneProcess:
    """In a sync each rank counts with what it has seen since the last; alike, without weights."""
    one = OneProcess(kind, len(counts))
    for number in range(max(counts)):
        for rank, count in enumerate(counts):
            if number < count and weighted:
                one.take(rank, number, STEP * (rank + 1))
            elif number < count:
                one.take(rank, number, STEP, counts=float(one.seen[rank] == 0))
        if (number + 1) % EVERY == 0:
            one.sync()
    if any(one.seen):
        one.sync()
    return one


@pytest.mark.parametrize("weighted", [True, False], ids=["with step()", "without"])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_with_more_and_more_batches_are_as_one_process(kind: str, weighted: bool):
    """Rank r has r + 1 times those of rank 0."""

    def run(backend: Backend):
        model = KINDS[kind](build(), backend)
        train(model, backend.rank, 3 * (backend.rank + 1), weighted=weighted)
        assert (model.steps, model.meetings) == (9, 5)
        return values(model)

    found = simulate(run, 3)
    assert_same_bits(list(found))
    assert_near(found[0], values(expected(kind, [3, 6, 9], weighted=weighted).shared))


@settings(max_examples=sizes(12, 200))
@given(
    counts=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    weighted=st.booleans(),
    kind=st.sampled_from(sorted(KINDS)),
)
def test_so_are_ranks_with_any_numbers_of_batches(counts: list[int], weighted: bool, kind: str):
    def run(backend: Backend):
        model = KINDS[kind](build(), backend)
        train(model, backend.rank, counts[backend.rank], weighted=weighted)
        return values(model)

    found = simulate(run, len(counts))
    assert_same_bits(list(found))
    assert_near(found[0], values(expected(kind, counts, weighted=weighted).shared))


def test_so_they_are_on_every_kind_of_backend(cluster: Cluster):
    def run(backend: Backend):
        model = KINDS["local"](build(), backend)
        train(model, backend.rank, 3 * (backend.rank + 1), weighted=True)
        return values(model)

    found = cluster.run(run, 2)
    assert_same_bits(found)
    assert_near(found[0], values(expected("local", [3, 6], weighted=True).shared))


@pytest.mark.parametrize("weighted", [True, False], ids=["with step()", "without"])
def test_what_compression_left_of_a_rank_without_batches_is_not_lost(weighted: bool):
    """Rank 0 trains once; the others receive all of its change, by and by and in the end."""
    counts = [1, 4, 4]

    def run(backend: Backend):
        rank = backend.rank
        model = LocalSGD(build(), backend, every=1, compression=TopK(0.05))
        optimizer = adamw(model.parameters())
        changes = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        with model.join():
            for number in range(counts[rank]):
                active = sum(number < count for count in counts)
                share = 1 / active
                if weighted:
                    weights = [r + 1 for r, count in enumerate(counts) if number < count]
                    share = (rank + 1) / sum(weights)
                before = values(model)
                trained = []
                hook = optimizer.register_step_post_hook(
                    lambda *_, t=trained: t.append(values(model))
                )
                if weighted:
                    take(model, optimizer, rank, number, [[float(rank + 1)]])
                else:
                    plainly(model, optimizer, rank, number)
                hook.remove()
                for name, change in changes.items():
                    change.add_(trained[0][name] - before[name], alpha=share)
        return changes, values(model)

    found = simulate(run, 3)
    assert_same_bits([after for _, after in found])
    for name, start in build().named_parameters():
        whole = start + sum(changes[name] for changes, _ in found)
        torch.testing.assert_close(found[0][1][name], whole.detach(), rtol=1e-5, atol=1e-6)


def test_afterwards_ranks_train_on_together():
    """Also in the first steps, with a sync after each, of which one rank has taken fewer."""

    def run(backend: Backend):
        model = LocalSGD(build(), backend, every=3, start_after=3)
        train(model, backend.rank, backend.rank + 1, weighted=False)
        optimizer = sgd(model.parameters())
        for number in range(4):
            plainly(model, optimizer, backend.rank, number)
        assert (model.steps, model.meetings) == (6, 4)
        return values(model)

    assert_same_bits(list(simulate(run, 2)))


def test_it_begins_with_a_sync_and_sync_works_in_it():
    def run(backend: Backend):
        model = LocalSGD(build(), backend, every=9)
        optimizer = sgd(model.parameters())
        plainly(model, optimizer, backend.rank, 0)
        with model.join():
            assert model.meetings == 1
            for number in range(2 * backend.rank):
                plainly(model, optimizer, backend.rank, number)
                model.sync()
        assert model.meetings == 1 + 4
        return values(model)

    assert_same_bits(list(simulate(run, 3)))


def test_ranks_without_any_batch_send_no_parameters():
    def run(backend: Backend):
        model = LocalSGD(build(), backend, every=2)
        train(model, backend.rank, 0, weighted=False)
        return model.meetings, model.bytes_sent

    assert list(simulate(run, 2)) == [(0, 0), (0, 0)]


def test_a_rank_that_is_through_may_end_it_for_all():
    def run(backend: Backend):
        model = LocalSGD(build(), backend, every=1)
        optimizer = sgd(model.parameters())

        def train() -> None:
            with model.join(throw_on_early_termination=True):
                for number in range(2 - backend.rank):
                    plainly(model, optimizer, backend.rank, number)

        error = outcome_of(train)
        model.sync()  # and training goes on
        return error

    for error in simulate(run, 2):
        assert isinstance(error, MisuseError)
        assert "rank 1 ran out of batches" in str(error)


def test_ranks_with_and_without_step_are_refused():
    def run(backend: Backend):
        model = LocalSGD(build(), backend, every=1)
        optimizer = sgd(model.parameters())

        def train() -> None:
            with model.join():
                if backend.rank:
                    plainly(model, optimizer, 1, 0)
                else:
                    take(model, optimizer, 0, 0, STEP)

        return outcome_of(train)

    for error in simulate(run, 2):
        assert isinstance(error, DesyncError)
        assert "have trained in step(), and others without it" in str(error)


def test_without_any_weight_the_error_comes_on_every_rank():
    def run(backend: Backend):
        model = LocalSGD(build(), backend, every=1)

        def train() -> None:
            with model.join():
                if backend.rank:
                    take(model, sgd(model.parameters()), 1, 0, [[0.0]])

        return outcome_of(train)

    for error in simulate(run, 2):
        assert isinstance(error, ValueError)
        assert "all weights are 0" in str(error)


def test_what_cannot_be_joined_is_refused():
    def run(backend: Backend):
        model = LocalSGD(torch.nn.Sequential(SyncBatchNorm(3, backend)), backend, every=1)
        with pytest.raises(MisuseError, match="a SyncBatchNorm"), model.join():
            pass
        model = LocalSGD(build(), backend, every=1)
        with pytest.raises(MisuseError, match="inside step"), model.step(1.0), model.join():
            pass
        with pytest.raises(MisuseError, match=r"join\(\) inside join"), model.join(), model.join():
            pass

    simulate(run, 1)
