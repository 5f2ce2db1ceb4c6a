"""LocalSGD with compressed messages: what is not sent stays in the parameters of its rank."""

from __future__ import annotations

import logging

import pytest
import torch
from clusters import Cluster
from ddp_models import mlp, noise
from ddp_runs import Watched, assert_close, assert_same_bits
from forms import sizes
from hypothesis import given, settings
from hypothesis import strategies as st
from local_runs import adamw, reference, sgd, take_step, values
from torch import nn

from phalanx import (
    Backend,
    DesyncError,
    ErrorFeedback,
    LocalSGD,
    PowerSGD,
    Quantized,
    TopK,
    UnsupportedOperationError,
    simulate,
)
from phalanx.compression import Compressor, Half, RandomK

COMPRESSORS: dict[str, Compressor] = {
    "top-k": TopK(0.1),
    "random-k": RandomK(0.2),
    "PowerSGD": PowerSGD(1),
    "PowerSGD in 16 bits": PowerSGD(1, dtype=torch.bfloat16),
    "8 bits": Quantized(8, block=16),
    "4 bits": Quantized(4, block=16),
    "1 bit": Quantized(1, block=16),
    "16 bits": Half(),
}


def train(backend: Backend, steps: int, compression: Compressor, **options) -> LocalSGD:
    model = LocalSGD(mlp(), backend, **{"every": 2, "compression": compression, **options})
    optimizer = adamw(model.parameters())
    for number in range(1, steps + 1):
        take_step(model, optimizer, backend.rank, number)
    return model


@pytest.mark.parametrize("exact", [TopK(1), PowerSGD(99), ErrorFeedback(TopK(1))], ids=repr)
def test_a_compressor_that_leaves_nothing_out_changes_nothing(exact: Compressor):
    found = simulate(lambda b: values(train(b, 4, exact)), 3)
    for each in found:
        assert_close(each, reference(3, [2, 4], 4, inner=adamw), rtol=1e-3, atol=1e-5)


@settings(max_examples=sizes(24, 200))
@given(
    name=st.sampled_from(sorted(COMPRESSORS)),
    ranks=st.integers(1, 4),
    every=st.integers(1, 3),
    steps=st.integers(1, 5),
)
def test_the_mean_of_all_parameters_is_kept_whatever_is_left_out(
    name: str, ranks: int, every: int, steps: int
):
    """What every sync keeps, sent or not: nothing is lost, and nothing counts twice."""

    def run(backend: Backend):
        model = LocalSGD(mlp(), backend, every=every, compression=COMPRESSORS[name])
        optimizer = adamw(model.parameters())
        seen = []
        for number in range(steps):
            hook = optimizer.register_step_post_hook(lambda *_: seen.append(values(model)))
            take_step(model, optimizer, backend.rank, number)  # the sync comes after that hook
            hook.remove()
            seen.append(values(model))
        model.sync()
        return [*seen, values(model)]

    stories = simulate(run, ranks)
    means = [
        {key: sum(story[at][key] for story in stories) / ranks for key in stories[0][at]}
        for at in range(len(stories[0]))
    ]
    close = 1e-3 if "16 bits" in name else 1e-5  # where means themselves are rounded to 16 bits
    for before, after in zip(means[0:-1:2], means[1:-1:2], strict=True):
        assert_close(before, after, rtol=close, atol=close)
    assert_close(means[-2], means[-1], rtol=1e-4, atol=1e-5)
    assert_same_bits([story[-1] for story in stories])


@pytest.mark.parametrize("name", COMPRESSORS)
def test_between_syncs_ranks_stay_near_each_other(name: str):
    """What is left out is not left out for ever."""

    def run(backend: Backend):
        model = LocalSGD(mlp(), backend, every=1, compression=COMPRESSORS[name])
        optimizer = sgd(model.parameters())
        for number in range(20):
            for group in optimizer.param_groups:
                group["lr"] = 0.05 if number < 5 else 0.0
            take_step(model, optimizer, backend.rank, number)
            if number == 4:
                early = values(model)
        return early, values(model)

    early, late = zip(*simulate(run, 2), strict=True)

    def apart(pair) -> float:
        return sum((pair[0][key] - pair[1][key]).abs().sum().item() for key in pair[0])

    assert apart(late) < 0.5 * apart(early)


def test_a_rank_keeps_what_it_has_learnt_and_others_hear_of_the_largest_first():
    def run(backend: Backend):
        module = nn.Linear(4, 1, bias=False)
        module.weight.data.zero_()
        model = LocalSGD(module, backend, every=1, compression=TopK(0.25))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        module.weight.grad = -torch.tensor(
            [[8.0, 2.0, 0.0, 0.0]] if backend.rank == 0 else [[0.0] * 4]
        )
        found = []
        for _ in range(3):
            optimizer.step()
            module.weight.grad.zero_()
            found.append(module.weight.tolist()[0])
        model.sync()
        return [*found, module.weight.tolist()[0]]

    #    step 1: 8 is sent, 2 is not     step 2: 2 is sent       nothing is left
    assert simulate(run, 2) == [
        [[4.0, 2.0, 0.0, 0.0], [4.0, 1.0, 0.0, 0.0], [4.0, 1.0, 0.0, 0.0], [4.0, 1.0, 0.0, 0.0]],
        [[4.0, 0.0, 0.0, 0.0], [4.0, 1.0, 0.0, 0.0], [4.0, 1.0, 0.0, 0.0], [4.0, 1.0, 0.0, 0.0]],
    ]


def test_on_every_kind_of_backend_it_is_the_same(cluster: Cluster):
    def run(backend: Backend):
        model = train(backend, 5, TopK(0.1), start_after=1)
        apart = values(model)
        model.sync()
        return apart, values(model)

    found = cluster.run(run, 3)
    expected = simulate(run, 3)
    assert_same_bits([synced for _, synced in found])
    for (apart, synced), (other, other_synced) in zip(found, expected, strict=True):
        assert_close(apart, other, rtol=1e-4, atol=1e-6)
        assert_close(synced, other_synced, rtol=1e-4, atol=1e-6)


def test_the_first_averages_are_whole_and_so_is_sync():
    def run(backend: Backend):
        model = LocalSGD(mlp(), backend, every=2, start_after=2, compression=TopK(0.1))
        optimizer = adamw(model.parameters())
        found = []
        for number in range(4):
            take_step(model, optimizer, backend.rank, number)
            found.append(values(model))
        model.sync()
        return [*found, values(model)]

    stories = simulate(run, 2)
    for at, alike in enumerate([True, True, False, False, True]):
        same = all(torch.equal(stories[0][at][key], stories[1][at][key]) for key in stories[0][at])
        assert same is alike, at


def test_an_average_sends_what_the_compressor_makes_of_it():
    def run(backend: Backend):
        module = nn.Linear(100, 100, bias=False)
        model = LocalSGD(module, backend, every=2, compression=TopK(0.01))
        optimizer = sgd(model.parameters())
        watched = Watched(backend)
        for number in range(4):
            model(noise(2, 100, seed=number + 7 * backend.rank)).sum().backward()
            optimizer.step()
        hashes = 2 * 8  # of the copies
        assert model.bytes_sent + hashes == watched.bytes_sent
        sent = model.bytes_sent
        model.sync()
        return sent, model.bytes_sent - sent

    sent, synced = simulate(run, 2)[0]
    assert 2 * 100 * 4 < sent <= 2 * 100 * 6  # two averages of 1 %, and where they stand
    assert synced == 100 * 100 * 4


def test_one_rank_trains_as_without():
    found = simulate(lambda b: values(train(b, 5, TopK(0.01))), 1)[0]
    assert_close(found, reference(1, [2, 4], 5, inner=adamw), rtol=0, atol=0)


def test_sync_does_nothing_twice_and_acts_after_an_average_that_left_something_out():
    def run(backend: Backend):
        model = train(backend, 4, TopK(0.1))  # the last step has ended with an average
        model.sync()
        synced = model.bytes_sent
        model.sync()
        return model.meetings, model.bytes_sent - synced

    assert simulate(run, 2) == [(3, 0)] * 2


def test_one_looks_at_the_mean():
    def run(backend: Backend):
        model = train(backend, 4, PowerSGD(1))
        own = values(model)
        with model.averaged():
            seen = values(model)
        assert_close(values(model), own, rtol=0, atol=0)
        model.sync()
        return seen, values(model)

    found = simulate(run, 3)
    assert_same_bits([seen for seen, _ in found])
    for seen, synced in found:
        assert_close(seen, synced, rtol=1e-4, atol=1e-6)


def test_what_is_not_finite_is_taken_by_nobody_and_said(caplog):
    def run(backend: Backend):
        model = train(backend, 2, TopK(0.1))
        optimizer = sgd(model.parameters())
        before = values(model)
        for _ in range(2):
            take_step(model, optimizer, backend.rank, 5)
            if backend.rank == 1:
                next(iter(model.module.parameters())).data[0] = torch.nan
        take_step(model, optimizer, backend.rank, 6)
        take_step(model, optimizer, backend.rank, 7)
        return before, values(model)

    with caplog.at_level(logging.WARNING, logger="phalanx"):
        found = simulate(run, 2)
    for _, after in found:
        assert all(value.isfinite().all() for value in after.values())
    said = [record.getMessage() for record in caplog.records]
    assert any("LocalSGD: a sync is skipped" in text and "on rank 1" in text for text in said)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_parameters_of_other_dtypes_keep_their_mean(dtype: torch.dtype):
    def run(backend: Backend):
        module = nn.Linear(8, 8).to(dtype)
        model = LocalSGD(module, backend, every=1, compression=TopK(0.1))
        optimizer = sgd(model.parameters())
        for number in range(4):
            model(noise(2, 8, seed=number + 9 * backend.rank).to(dtype)).sum().backward()
            optimizer.step()
        apart = values(model)
        model.sync()
        return apart, values(model)

    apart, synced = zip(*simulate(run, 2), strict=True)
    for key, value in synced[0].items():
        mean = (apart[0][key].double() + apart[1][key].double()) / 2
        close = 0.05 if dtype is torch.bfloat16 else 1e-12
        torch.testing.assert_close(value.double(), mean, rtol=close, atol=close)


def test_it_learns_though_a_hundredth_is_sent():
    def run(backend: Backend):
        model = LocalSGD(mlp(), backend, every=1, compression=TopK(0.01))
        optimizer = adamw(model.parameters())
        inputs, targets = noise(64, 6, seed=1), noise(64, 6, seed=1).sum(1, keepdim=True).tanh()
        mine = slice(backend.rank, None, backend.world_size)
        losses = []
        for _ in range(60):
            optimizer.zero_grad()
            loss = (model(inputs[mine]).mean(1, keepdim=True) - targets[mine]).pow(2).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        model.sync()
        return losses

    for losses in simulate(run, 2):
        assert losses[-1] < 0.2 * losses[0]


def test_what_cannot_be_compressed_is_refused_by_name():
    def run(backend: Backend) -> None:
        with pytest.raises(TypeError, match=r"LocalSGD\(compression=\) takes a compressor"):
            LocalSGD(mlp(), backend, every=1, compression=TopK)
        complex_ = nn.ParameterList([torch.zeros(2, dtype=torch.complex64)])
        with pytest.raises(UnsupportedOperationError, match="complex64"):
            LocalSGD(complex_, backend, every=1, compression=TopK(0.1))

    simulate(run, 1)


def test_ranks_that_compress_otherwise_are_told():
    def run(backend: Backend) -> None:
        LocalSGD(mlp(), backend, every=1, compression=TopK(0.1 + backend.rank / 10))

    with pytest.raises(DesyncError, match="compression"):
        simulate(run, 2)
