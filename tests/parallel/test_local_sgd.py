"""LocalSGD: ranks train by themselves, and take the mean of their parameters every H steps."""

from __future__ import annotations

import logging
from itertools import accumulate

import pytest
import torch
from ddp_models import TASKS, loss_of, mlp, noise, seeded, vectors
from ddp_runs import Watched, assert_close, assert_same_bits, over_tcp
from forms import sizes
from hypothesis import given, settings
from hypothesis import strategies as st
from local_runs import reference, sgd, take_step, values
from torch import nn

from phalanx import DDP, Backend, LocalSGD, simulate


@pytest.mark.parametrize("task", TASKS)
def test_with_an_average_after_every_step_it_is_ddp(task: str):
    make, draw = TASKS[task]

    def run(backend: Backend, kind: str):
        module = make()
        wrapped = DDP(module, backend) if kind == "ddp" else LocalSGD(module, backend, every=1)
        optimizer = sgd(wrapped.parameters())
        for number in range(4):
            inputs, targets = draw(4, seed=100 * backend.rank + number)
            optimizer.zero_grad()
            loss_of(wrapped(inputs), targets).backward()
            optimizer.step()
        return values(wrapped)

    local = simulate(lambda b: run(b, "local"), 3)
    assert_same_bits(list(local))
    assert_close(local[0], simulate(lambda b: run(b, "ddp"), 3)[0], rtol=1e-4, atol=1e-6)


@settings(max_examples=sizes(8, 60))
@given(
    ranks=st.integers(1, 4),
    every=st.integers(1, 5),
    start_after=st.integers(0, 3),
    pieces=st.lists(st.integers(0, 4), min_size=1, max_size=3),
)
def test_ranks_synchronize_after_every_hth_step_and_at_sync(
    ranks: int, every: int, start_after: int, pieces: list[int]
):
    """Steps in several pieces, with `sync` after each; all syncs follow from the numbers."""
    synced_at, since = [], 0
    for number in range(1, sum(pieces) + 1):
        since += 1
        synced = number in accumulate(pieces)
        if synced or since >= (1 if number <= start_after else every):
            synced_at.append(number)
            since = 0

    def run(backend: Backend):
        model = LocalSGD(mlp(), backend, every=every, start_after=start_after)
        optimizer = sgd(model.parameters())
        number = 0
        for piece in pieces:
            for _ in range(piece):
                number += 1
                take_step(model, optimizer, backend.rank, number)
            model.sync()
        assert (model.steps, model.meetings) == (sum(pieces), len(synced_at))
        return values(model)

    found = simulate(run, ranks)
    assert_same_bits(list(found))
    assert_close(found[0], reference(ranks, synced_at, sum(pieces)), rtol=1e-4, atol=1e-6)


def test_between_syncs_ranks_differ_and_send_nothing():
    def run(backend: Backend):
        model = LocalSGD(mlp(), backend, every=3)
        optimizer = sgd(model.parameters())
        watched = Watched(backend)
        found = []
        for number in range(3):
            take_step(model, optimizer, backend.rank, number)
            found.append((values(model), len(watched.events)))
        return found

    first, second = simulate(run, 2)
    for number in range(2):
        assert not torch.equal(first[number][0]["0.weight"], second[number][0]["0.weight"])
        assert first[number][1] == 0
    assert_same_bits([first[2][0], second[2][0]])


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_step_sends_an_hth_of_what_ddp_sends(size: int):
    """Over all ranks: which of them sends how much is the algorithm's business."""
    steps, every, width = 4, 2, 24

    def run(backend: Backend):
        model = LocalSGD(nn.Linear(width, width, bias=False), backend, every=every)
        optimizer = sgd(model.parameters())
        watched = Watched(backend)
        for number in range(steps):
            optimizer.zero_grad()
            model(noise(2, width, seed=number + backend.rank)).sum().backward()
            optimizer.step()
        return model.bytes_sent, watched.bytes_sent

    said, sent = zip(*over_tcp(run, size), strict=True)
    each = 2 * (size - 1) / size * (width * width * 4) / every * steps
    assert said == (each,) * size
    assert sum(sent) == size * each


def test_gradients_that_are_accumulated_are_no_steps():
    def run(backend: Backend, accumulate_by: int):
        model = LocalSGD(mlp(), backend, every=2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for number in range(2):
            optimizer.zero_grad()
            inputs, targets = vectors(4, seed=10 * backend.rank + number)
            for rows in torch.arange(4).chunk(accumulate_by):
                with model.no_sync():
                    loss = loss_of(model(inputs[rows]), targets[rows]) / accumulate_by
                    loss.backward()
            optimizer.step()
        assert (model.steps, model.meetings) == (2, 1)
        return values(model)

    whole, parts = (simulate(lambda b, n=n: run(b, n), 2)[0] for n in (1, 2))
    assert_close(parts, whole)


def test_sync_does_nothing_twice_and_before_any_step():
    def run(backend: Backend):
        model = LocalSGD(mlp(backend.rank), backend, every=10)
        before = values(model)
        model.sync()
        assert_same_bits([before, values(model)])
        assert (model.meetings, model.bytes_sent) == (0, 0)
        take_step(model, sgd(model.parameters()), backend.rank, 0)
        model.sync()
        synced, sent = values(model), model.bytes_sent
        model.sync()
        assert_same_bits([synced, values(model)])
        assert (model.meetings, model.bytes_sent) == (1, sent)
        return synced

    assert_same_bits(list(simulate(run, 3)))


def test_ranks_with_other_numbers_of_steps_are_alike_after_sync():
    def run(backend: Backend):
        model = LocalSGD(mlp(), backend, every=10)
        optimizer = sgd(model.parameters())
        for number in range(2 * backend.rank):  # none on rank 0
            take_step(model, optimizer, backend.rank, number)
        model.sync()
        assert model.meetings == 1
        return values(model)

    assert_same_bits(list(simulate(run, 3)))


def test_one_looks_at_the_mean_and_training_goes_on_as_if_nobody_had():
    def run(backend: Backend, look: bool):
        model = LocalSGD(mlp(), backend, every=4)
        optimizer = sgd(model.parameters())
        seen = []
        for number in range(1, 7):
            take_step(model, optimizer, backend.rank, number)
            if look:
                with model.averaged():
                    seen.append(values(model))
        return seen, values(model)

    looked, plain = (simulate(lambda b, look=look: run(b, look), 2) for look in (True, False))
    for rank in range(2):
        assert_same_bits([looked[rank][1], plain[rank][1]])
    for number in range(6):
        assert_same_bits([looked[rank][0][number] for rank in range(2)])
    assert_close(looked[0][0][2], reference(2, [3], 3))
    assert_close(looked[0][0][5], reference(2, [4, 6], 6))


def test_floating_buffers_are_averaged_and_others_are_rank_0_s():
    class Buffered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)
            self.register_buffer("mean", torch.zeros(3))
            self.register_buffer("count", torch.zeros(2, dtype=torch.int64))
            self.register_buffer("mask", torch.zeros(2, dtype=torch.bool))
            self.register_buffer("scratch", torch.zeros(2), persistent=False)

        def forward(self, x):
            return self.layer(x)

    def run(backend: Backend):
        model = LocalSGD(seeded(Buffered), backend, every=1)
        inner = model.module
        inner.mean += backend.rank
        inner.count += backend.rank + 7
        inner.mask.fill_(backend.rank == 1)
        inner.scratch += backend.rank
        take_step(model, sgd(model.parameters()), backend.rank, 0)
        return inner.mean, inner.count, inner.mask, inner.scratch

    for rank, (mean, count, mask, scratch) in enumerate(simulate(run, 3)):
        assert mean.tolist() == [1, 1, 1]
        assert count.tolist() == [7, 7]
        assert mask.tolist() == [False, False]
        assert scratch.tolist() == [rank, rank]


def test_parameters_that_are_frozen_are_neither_sent_nor_changed():
    def run(backend: Backend):
        module = mlp()
        module[0].requires_grad_(False)
        model = LocalSGD(module, backend, every=1)
        take_step(model, sgd(model.parameters()), backend.rank, 0)
        trained = sum(p.nbytes for p in module.parameters() if p.requires_grad)
        assert model.bytes_sent == trained  # 2(p-1)/p of it
        return values(model)

    found = simulate(run, 2)
    assert_same_bits(list(found))
    assert torch.equal(found[0]["0.weight"], values(mlp())["0.weight"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_every_floating_dtype_is_averaged(dtype: torch.dtype):
    def run(backend: Backend):
        model = LocalSGD(nn.Linear(3, 2).to(dtype), backend, every=1)
        for p in model.parameters():
            p.grad = torch.full_like(p, backend.rank)
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        torch.optim.SGD(model.parameters(), 1.0).step()
        return values(model)

    for found in simulate(run, 3):
        assert all((value == -1).all() for value in found.values())


def test_parameters_of_any_layout_are_averaged():
    """Complex, without elements, without dimensions, not contiguous, in many messages."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.waves = nn.Parameter(torch.ones(3, dtype=torch.complex64))
            self.nothing = nn.Parameter(torch.empty(0, 4, dtype=torch.float64))
            self.scale = nn.Parameter(torch.ones(()))
            self.turned = nn.Parameter(torch.ones(4, 3).T)

    def run(backend: Backend):
        model = LocalSGD(Odd(), backend, every=1)
        for p in model.parameters():
            p.grad = torch.full_like(p, backend.rank)
        torch.optim.SGD(model.parameters(), 1.0).step()
        assert not model.module.turned.is_contiguous()
        return values(model)

    for found in simulate(run, 3):
        assert all((value == 0).all() for value in found.values())


def test_what_is_not_finite_on_one_rank_is_said_with_its_name(caplog):
    def run(backend: Backend) -> bool:
        model = LocalSGD(mlp(), backend, every=2)
        optimizer = sgd(model.parameters())
        take_step(model, optimizer, backend.rank, 0)
        if backend.rank == 1:
            with torch.no_grad():
                model.module[2].bias[3] = float("nan")
        take_step(model, optimizer, backend.rank, 1)
        return all(v.isfinite().all() for v in values(model).values())

    with caplog.at_level(logging.WARNING, logger="phalanx"):
        assert simulate(run, 2) == [False, False]
    messages = sorted(record.getMessage() for record in caplog.records)
    assert len(messages) == 2
    for rank, message in enumerate(messages):
        assert message.startswith(f"rank {rank}: LocalSGD: parameters are not finite")
        assert "on rank 1. Go back to a checkpoint" in message
        assert "on rank 0" not in message


def test_one_rank_trains_as_without():
    def run(backend: Backend):
        model = LocalSGD(mlp(), backend, every=2)
        optimizer = sgd(model.parameters())
        for number in range(1, 6):
            take_step(model, optimizer, 0, number)
        model.sync()
        assert model.bytes_sent == 0
        return values(model)

    assert_same_bits([simulate(run, 1)[0], reference(1, [], 5)])


def test_a_model_without_anything_to_train_is_left_alone():
    def run(backend: Backend) -> None:
        model = LocalSGD(nn.Linear(2, 2).requires_grad_(False), backend, every=1)
        model.sync()
        with model.averaged():
            model(torch.ones(1, 2))

    simulate(run, 2)
