"""Backward passes for chosen tensors: gradients of inputs average nothing, whatever follows does.

Gradient penalties (WGAN-GP), saliency, adversarial examples: `torch.autograd.grad(loss, x)` and
`backward(inputs=[x])` through a DDP. Compared with one process that has all batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ddp_models import Branches, mlp, noise, seeded
from ddp_runs import Watched, assert_close, assert_same_bits, gradients, mean_of, outcome_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from phalanx import DDP, Backend, DesyncError, ErrorFeedback, MisuseError, TopK, simulate

RANKS = 3
OPTIONS: dict[str, dict[str, Any]] = {
    "one bucket": {},
    "many buckets": {"bucket_size": 1},
    "unused": {"find_unused_parameters": True},
    "finite": {"skip_nonfinite": True},
    "compressed": {"compression": ErrorFeedback(TopK(1.0))},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def rows(rank: int, number: int = 0) -> Tensor:
    return noise(4, 6, seed=rank + 10 * number).requires_grad_()


def penalty(model: nn.Module, x: Tensor) -> Tensor:
    """How far the norm of the gradient by the input is from 1."""
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.square().mean() + (slope.norm(dim=1) - 1).square().mean()


def penalty_apart(model: nn.Module, x: Tensor) -> Tensor:
    """The same, of a forward pass of its own."""
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return model(x).square().mean() + (slope.norm(dim=1) - 1).square().mean()


def adversarial(model: nn.Module, x: Tensor) -> Tensor:
    """The loss where a step up the gradient leads to."""
    (up,) = torch.autograd.grad(model(x).square().mean(), x)
    return model((x + 0.1 * up.sign()).detach()).square().mean()


def saliency_by_backward(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    out.sum().backward(inputs=[x], retain_graph=True)
    return out.square().mean() * x.grad.square().sum()


def of_the_outputs(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    loss = out.square().mean()
    (slope,) = torch.autograd.grad(loss, out, retain_graph=True)
    return loss * slope.norm()


def of_the_parameters(model: nn.Module, x: Tensor) -> Tensor:
    """This rank's gradients, as of the plain module: balances two losses."""
    out = model(x)
    first, second = out.square().mean(), out.abs().mean()
    weights = [p for p in model.parameters() if p.dim() > 1]
    norms = [
        torch.cat([g.flatten() for g in torch.autograd.grad(loss, weights, retain_graph=True)])
        .norm()
        .item()
        for loss in (first, second)
    ]
    return first + norms[0] / norms[1] * second


LOSSES = [
    penalty,
    penalty_apart,
    adversarial,
    saliency_by_backward,
    of_the_outputs,
    of_the_parameters,
]
every_loss = pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)


def alone(loss: Callable[[nn.Module, Tensor], Tensor], build=mlp, numbers=(0,)):
    """The mean of the gradients of plain models, one for each rank, over some batches."""

    def one(rank: int):
        model = build()
        for number in numbers:
            loss(model, rows(rank, number)).backward()
        return gradients(model)

    return mean_of([one(rank) for rank in range(RANKS)])


@pytest.mark.checkered
@every_option
@every_loss
def test_a_loss_with_gradients_in_it_is_trained_as_in_one_process(loss, options):
    def run(backend: Backend):
        ddp = DDP(mlp(), backend, **options)
        found = []
        for number in range(2):
            ddp.zero_grad()
            loss(ddp, rows(backend.rank, number)).backward()
            found.append(gradients(ddp))
        return found

    ranks = list(simulate(run, RANKS))
    for number in range(2):
        assert_same_bits([found[number] for found in ranks])
        assert_close(ranks[0][number], alone(loss, numbers=[number]), rtol=1e-4, atol=1e-6)


@every_loss
def test_passes_are_accumulated_under_no_sync(loss):
    def run(backend: Backend):
        ddp = DDP(mlp(), backend)
        with ddp.no_sync():
            loss(ddp, rows(backend.rank, 0)).backward()
        loss(ddp, rows(backend.rank, 1)).backward()
        return gradients(ddp)

    found = simulate(run, RANKS)
    assert_close(found[0], alone(loss, numbers=[0, 1]), rtol=1e-4, atol=1e-6)


@every_loss
def test_in_join_ranks_without_a_batch_are_not_asked_for_gradients_of_inputs(loss):
    """Rank r has r + 1 batches; the last is rank 2's alone."""

    def run(backend: Backend):
        ddp = DDP(mlp(), backend)
        found = []
        with ddp.join(lambda: found.append(gradients(ddp))):
            for number in range(backend.rank + 1):
                ddp.zero_grad()
                loss(ddp, rows(backend.rank, number)).backward()
                found.append(gradients(ddp))
        return found

    ranks = list(simulate(run, RANKS))
    last = mlp()
    loss(last, rows(2, 2)).backward()
    for found in ranks:
        assert len(found) == RANKS
        assert_close(found[2], gradients(last), rtol=1e-4, atol=1e-6)


def test_a_penalty_is_weighted_like_the_loss():
    def run(backend: Backend):
        ddp = DDP(mlp(), backend)
        x = rows(backend.rank)[: backend.rank]  # none on rank 0, whose mean is NaN
        ddp.weighted(penalty(ddp, x), len(x)).backward()
        return gradients(ddp)

    ranks = list(simulate(run, RANKS))
    plain = mlp()
    joined = torch.cat([rows(rank)[:rank] for rank in range(RANKS)])
    penalty(plain, joined).backward()
    assert_same_bits(ranks)
    assert_close(ranks[0], gradients(plain), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_is_checkpointed_is_still_averaged(reentrant: bool):
    """With reentrant checkpoints no parameter is in the outermost graph."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        if reentrant:  # torch has no gradient of chosen tensors through these
            return model(x).square().mean()
        return penalty(model, x)

    def run(backend: Backend):
        ddp = DDP(Checkpointed(), backend, bucket_size=1)
        for _ in range(2):
            ddp.zero_grad()
            loss(ddp, rows(backend.rank)).backward()
        return gradients(ddp)

    found = simulate(run, RANKS)
    assert_close(found[0], alone(loss, Checkpointed), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("where", ["one rank", "every rank"])
def test_a_penalty_may_leave_out_parameters_of_some_ranks(where: str):
    def loss(model: nn.Module, x: Tensor, rank: int) -> Tensor:
        names = ["left"] if rank == 1 or where == "every rank" else ["left", "right"]
        out = model(x, *names)
        (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return slope.square().mean()

    def one(rank: int):
        model = seeded(Branches)
        loss(model, rows(rank), rank).backward()
        return gradients(model)

    def run(backend: Backend):
        ddp = DDP(seeded(Branches), backend, find_unused_parameters=True)
        for _ in range(2):
            ddp.zero_grad()
            loss(ddp, rows(backend.rank), backend.rank).backward()
        return gradients(ddp)

    expected = mean_of([one(rank) for rank in range(RANKS)])
    assert_close(simulate(run, RANKS)[0], expected, rtol=1e-4, atol=1e-6)


@every_option
def test_gradients_of_inputs_send_nothing_and_one_rank_may_ask_for_them(options):
    def run(backend: Backend) -> None:
        ddp = DDP(mlp(), backend, **options)
        ddp(rows(backend.rank)).sum().backward()
        watched = Watched(backend)
        for _ in range(backend.rank):
            x = rows(backend.rank)
            torch.autograd.grad(ddp(x).sum(), x)
            ddp(x).sum().backward(inputs=[x])
            torch.autograd.functional.hessian(lambda x: ddp(x).square().sum(), x)
            torch.func.grad(lambda x: ddp(x).square().sum())(x.detach())
        assert watched.events == []
        ddp(rows(backend.rank)).sum().backward()

    simulate(run, RANKS)


def test_backward_with_parameters_as_inputs_averages_them():
    def run(backend: Backend):
        ddp = DDP(mlp(), backend)
        ddp(rows(backend.rank)).square().mean().backward(inputs=list(ddp.parameters()))
        return gradients(ddp)

    found = simulate(run, RANKS)
    assert_close(found[0], alone(lambda model, x: model(x).square().mean()))


@pytest.mark.parametrize("unused", [True, False])
def test_parameters_that_inputs_leaves_out_count_as_unused(unused: bool):
    def run(backend: Backend):
        ddp = DDP(mlp(), backend, find_unused_parameters=unused)
        loss = ddp(rows(backend.rank)).square().mean()
        backend.barrier()  # all ranks are past what came before
        error = outcome_of(lambda: loss.backward(inputs=[ddp.module[0].weight]))
        return error or gradients(ddp)

    found = simulate(run, RANKS)
    if unused:
        expected = alone(lambda model, x: model(x).square().mean())
        others = dict.fromkeys(expected)
        assert_close(found[0], {**others, "0.weight": expected["0.weight"]})
    else:
        for error in found:
            assert isinstance(error, (MisuseError, DesyncError))
            assert "backward(inputs=)" in str(error)
