"""Forward and backward passes in any order that plain training allows."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
from ddp_models import mlp, noise, seeded
from ddp_runs import Watched, assert_close, values
from fsdp_runs import (
    COMMON,
    COOPERATIVE,
    FULL_SHARD,
    MESSAGES,
    NO_SHARD,
    SHARD_GRAD_OP,
    STRATEGIES,
    gradient_pieces,
    joined,
    on_ranks,
)
from torch import Tensor, nn

from phalanx import FSDP, Backend

RANKS = 2
Play = Callable[[nn.Module, int], Any]  # what is done with a model on a rank


def x_of(rank: int, number: int = 0) -> Tensor:
    return noise(4, 6, seed=10 * number + rank)


def once(model: nn.Module, rank: int) -> None:
    model(x_of(rank)).pow(2).sum().backward()


def two_forwards_then_backwards(model: nn.Module, rank: int) -> None:
    first, second = model(x_of(rank)), model(x_of(rank, 1))
    second.pow(2).sum().backward()
    first.pow(2).sum().backward()


def two_forwards_one_backward(model: nn.Module, rank: int) -> None:
    (model(x_of(rank)) * model(x_of(rank, 1))).sum().backward()


def one_forward_two_backwards(model: nn.Module, rank: int) -> None:
    output = model(x_of(rank))
    output.pow(2).sum().backward(retain_graph=True)
    output.sum().backward()


def a_column_at_a_time(model: nn.Module, rank: int) -> None:
    output = model(x_of(rank))
    output[:, 0].sum().backward(retain_graph=True)
    output[:, 1:].pow(2).sum().backward()


def a_list_of_losses(model: nn.Module, rank: int) -> None:
    output = model(x_of(rank))
    torch.autograd.backward([output[:2].sum(), output[2:].pow(2).sum()])


def chained(model: nn.Module, rank: int) -> None:
    x = model(x_of(rank))
    model(torch.cat([x, x], 1)).pow(2).sum().backward()


def evaluation_between(model: nn.Module, rank: int) -> None:
    output = model(x_of(rank))
    model.eval()
    with torch.no_grad():
        model(x_of(rank, 1))
    with torch.inference_mode():
        model(x_of(rank, 2))
    model.train()
    output.pow(2).sum().backward()


def a_forward_that_is_not_used(model: nn.Module, rank: int) -> None:
    model(x_of(rank, 1))
    once(model, rank)
    model(x_of(rank, 1))


def gradients_of_inputs(model: nn.Module, rank: int) -> Tensor:
    x = x_of(rank).requires_grad_()
    model(x).pow(2).sum().backward()
    assert x.grad is not None
    return x.grad


def gradients_of_inputs_alone(model: nn.Module, rank: int) -> Tensor:
    x = x_of(rank).requires_grad_()
    (found,) = torch.autograd.grad(model(x).pow(2).sum(), x)
    once(model, rank)
    return found


def a_trunk_before_and_a_head_after(model: nn.Module, rank: int) -> Tensor:
    trunk, head = noise(6, 6, seed=50).requires_grad_(), noise(3, seed=51).requires_grad_()
    (model(torch.tanh(x_of(rank) @ trunk)) @ head).sum().backward()
    assert trunk.grad is not None
    assert head.grad is not None
    return torch.cat([trunk.grad.flatten(), head.grad])


def one_row_only(model: nn.Module, rank: int) -> None:
    model(x_of(rank))[rank].sum().backward()


def steps_with_accumulation(model: nn.Module, rank: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    for number in range(4):
        (model(x_of(rank, number)).pow(2).sum() / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=number == 1)
    once(model, rank)


PLAYS: dict[str, Play] = {
    play.__name__.replace("_", " "): play
    for play in (
        *(once, two_forwards_then_backwards, two_forwards_one_backward, one_forward_two_backwards),
        *(a_column_at_a_time, a_list_of_losses, chained, evaluation_between),
        *(a_forward_that_is_not_used, gradients_of_inputs, gradients_of_inputs_alone),
        *(a_trunk_before_and_a_head_after, one_row_only, steps_with_accumulation),
    )
}


def plain(play: Play, build: Callable[[], nn.Module] = mlp) -> tuple[Any, list[Any]]:
    """The mean gradient over the ranks, and what the play gave on each.

    Of a play that steps the ranks are one model: then each step needs the mean.
    """
    models = [build() for _ in range(RANKS)]
    given = [play(model, rank) for rank, model in enumerate(models)]
    grads: dict[str, Any] = {}
    for (name, first), *others in zip(*(m.named_parameters() for m in models), strict=True):
        parts = [first.grad, *(p.grad for _, p in others)]
        grads[name] = None if first.grad is None else torch.stack(parts).mean(0)
    return grads, given


@pytest.mark.checkered
@pytest.mark.parametrize(
    ("strategy", "where", "unit"),
    [
        (FULL_SHARD, COMMON, nn.Linear),
        (FULL_SHARD, MESSAGES, nn.Linear),
        (SHARD_GRAD_OP, MESSAGES, nn.Sequential),
        (NO_SHARD, COMMON, nn.Linear),
    ],
    ids=["full-common", "full-messages", "grad_op-messages, whole", "no_shard"],
)
@pytest.mark.parametrize("play", PLAYS.values(), ids=PLAYS)
def test_gradients_are_those_of_plain_passes(play: Play, strategy: Any, where: Any, unit: Any):
    same_data = play is steps_with_accumulation  # so that plain models stay the same, too

    def body(model: nn.Module, backend: Backend) -> Any:
        fsdp = FSDP(model, backend, strategy=strategy, unit=unit)
        given = play(fsdp, 0 if same_data else backend.rank)
        return gradient_pieces(fsdp), given

    if same_data:
        model = mlp()
        steps_with_accumulation(model, 0)
        wanted, given = {n: p.grad for n, p in model.named_parameters()}, [None] * RANKS
    else:
        wanted, given = plain(play)
    ranks = on_ranks(where, RANKS, mlp, body)
    assert_close(joined([pieces for pieces, _ in ranks]), wanted)
    for (_, found), expected in zip(ranks, given, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("where", [COMMON, MESSAGES], ids=["common", "messages"])
def test_evaluation_gives_what_the_plain_model_gives_and_needs_no_backward(grad: Any, where: Any):
    def body(model: nn.Module, backend: Backend) -> None:
        fsdp = FSDP(model, backend)
        optimizer = torch.optim.SGD(fsdp.parameters(), lr=0.1)
        for number in range(3):
            once(fsdp, 0)
            optimizer.step()
            optimizer.zero_grad()
            with grad():
                found = fsdp(x_of(backend.rank, number))
            state = fsdp.full_state_dict()
            other = mlp()
            other.load_state_dict(state)
            torch.testing.assert_close(found, other(x_of(backend.rank, number)).detach())
            assert not found.requires_grad

    on_ranks(where, RANKS, mlp, body)


def test_buffers_are_rank_0_s_when_it_is_built_and_each_rank_s_own_afterwards():
    def body(model: nn.Module, backend: Backend) -> list[float]:
        model[0].running_mean.fill_(backend.rank + 1)
        fsdp = FSDP(model, backend)
        start = values(model)["0.running_mean"].tolist()
        fsdp(x_of(backend.rank)).sum().backward()
        return start

    build = lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 1))  # noqa: E731
    assert on_ranks(COMMON, 2, build, body) == [[1.0] * 6] * 2


# What passes leave behind -----------------------------------------------------------------------


def parts_alive() -> int:
    gc.collect()
    kinds = Counter(map(type, gc.get_objects()))
    return sum(count for kind, count in kinds.items() if "phalanx.fsdp" in str(kind))


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_steps_leave_nothing_behind(strategy: Any):
    """Neither memory, nor passes that later ones would wait for."""

    def body(model: nn.Module, backend: Backend) -> list[int]:
        fsdp = FSDP(model, backend, strategy=strategy)
        counts = []
        for _ in range(4):
            fsdp(noise(4, 6)).sum().backward()
            backend.barrier()
            counts.append(parts_alive() if backend.rank == 0 else 0)
            backend.barrier()
        return counts

    counts = on_ranks(COOPERATIVE, 2, lambda: seeded(mlp), body)[0]
    # What tests before this one have left to the collector may go meanwhile.
    assert all(later <= earlier for earlier, later in pairwise(counts)), counts


class Penalized(nn.Module):
    """A gradient penalty inside of forward, which goes on with the parameters after it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.last = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        output = self.net(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return self.last(self.net(slope)).square() + output.square().mean() + slope.norm()


@pytest.mark.checkered
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("where", [COMMON, MESSAGES], ids=["common", "messages"])
@pytest.mark.parametrize("unit", [None, nn.Linear], ids=["children", "linear"])
def test_a_gradient_penalty_inside_of_forward(strategy: Any, where: Any, unit: Any):
    def body(model: nn.Module, backend: Backend) -> Any:
        fsdp = FSDP(model, backend, strategy=strategy, unit=unit)
        for _ in range(2):
            fsdp.zero_grad()
            fsdp(x_of(backend.rank)).mean().backward()
        return gradient_pieces(fsdp)

    plain = seeded(Penalized)
    sum(plain(x_of(rank)).mean() / RANKS for rank in range(RANKS)).backward()
    found = joined(on_ranks(where, RANKS, lambda: seeded(Penalized), body))
    assert_close(found, {name: p.grad for name, p in plain.named_parameters()})


@pytest.mark.parametrize("where", [COMMON, MESSAGES], ids=["common", "messages"])
def test_gradients_of_inputs_reduce_nothing(where: Any):
    def body(model: nn.Module, backend: Backend) -> Any:
        fsdp = FSDP(model, backend)
        x = x_of(0).requires_grad_()
        watched = Watched(backend)
        (slope,) = torch.autograd.grad(fsdp(x).sum(), x)
        assert not [event for event in watched.events if "reduce" in event]
        assert all(p.grad is None for p in fsdp.parameters())
        once(fsdp, backend.rank)
        return slope, gradient_pieces(fsdp)

    plain, x = mlp(), x_of(0).requires_grad_()
    (expected,) = torch.autograd.grad(plain(x).sum(), x)
    sum(plain(x_of(rank)).pow(2).sum() / RANKS for rank in range(RANKS)).backward()
    found = on_ranks(where, RANKS, mlp, body)
    for slope, _ in found:
        torch.testing.assert_close(slope, expected)
    gradients = joined([pieces for _, pieces in found])
    assert_close(gradients, {name: p.grad for name, p in plain.named_parameters()})


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("where", [COMMON, MESSAGES], ids=["common", "messages"])
def test_sparse_gradients_become_dense_shards(strategy: Any, where: Any):
    build = lambda: seeded(  # noqa: E731
        lambda: nn.Sequential(nn.Embedding(7, 3, sparse=True), nn.Linear(3, 2))
    )

    def body(model: nn.Module, backend: Backend) -> Any:
        fsdp = FSDP(model, backend, strategy=strategy)
        with fsdp.no_sync():
            fsdp(torch.tensor([backend.rank, 5])).pow(2).sum().backward()
        fsdp(torch.tensor([6, backend.rank])).pow(2).sum().backward()
        return gradient_pieces(fsdp)

    plain = build()
    for rank in range(RANKS):
        for words in ([rank, 5], [6, rank]):
            (plain(torch.tensor(words)).pow(2).sum() / RANKS).backward()
    expected = {name: p.grad.to_dense() for name, p in plain.named_parameters()}
    assert_close(joined(on_ranks(where, RANKS, build, body)), expected)


# Layers that give back what they were given ---------------------------------------------------


class Dropped(nn.Module):
    """A residual layer that is left out, as LayerDrop does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.left_out = True

    def forward(self, x: Tensor) -> Tensor:
        return x if self.left_out else x + self.inner(x)


class InPlace(Dropped):
    """A residual layer that adds to what it was given."""

    def forward(self, x: Tensor) -> Tensor:
        x += self.inner(x.tanh())
        return x


class Beside(Dropped):
    """It gives back its input, and beside it what it has computed of that."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.inner(x)


class Gives(nn.Module):
    """A layer of this kind behind one whose backward pass reads its weight."""

    def __init__(self, kind: type[Dropped]) -> None:
        super().__init__()
        self.stem, self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.given = kind()

    def forward(self, x: Tensor) -> Tensor:
        out = self.given(self.first(self.stem(x)))
        return self.last(out[0] + out[1].square() if isinstance(out, tuple) else out)


def three_steps(model: nn.Module, rank: int) -> None:
    for number in range(3):
        model(x_of(rank, number)).pow(2).sum().backward()


@pytest.mark.checkered
@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("where", [COMMON, COOPERATIVE, MESSAGES], ids=lambda each: each.name)
@pytest.mark.parametrize("kind", [Dropped, InPlace, Beside])
def test_a_layer_may_give_back_its_input(kind: type[Dropped], where: Any, prefetch: int):
    def body(model: nn.Module, backend: Backend) -> Any:
        fsdp = FSDP(model, backend, prefetch=prefetch)
        three_steps(fsdp, backend.rank)
        return gradient_pieces(fsdp)

    def build() -> nn.Module:
        return seeded(lambda: Gives(kind))

    wanted, _ = plain(three_steps, build)
    assert_close(joined(on_ranks(where, RANKS, build, body)), wanted)


class Partly(nn.Module):
    """A layer of which one rank leaves out a part."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(8, 8), nn.Linear(8, 8)
        self.left_out = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.always(x).tanh()
        return x if self.left_out else x + self.sometimes(x)


@pytest.mark.parametrize("where", [COMMON, MESSAGES], ids=lambda each: each.name)
@pytest.mark.parametrize("keeps", ["create_graph", "retain_graph"])
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def test_ranks_use_other_parameters_while_an_earlier_graph_is_kept(keeps: str, where: Any):
    def build() -> nn.Module:
        return seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), Partly(), nn.Tanh()))

    def two_passes(model: nn.Module, layers: Any, rank: int, between: Any) -> list[Tensor]:
        layers[2].left_out = rank == 0
        losses = [model(x_of(rank, 0)).pow(2).sum()]
        with between:
            losses[0].backward(**{keeps: True})
        losses.append(model(x_of(rank, 1)).pow(2).sum())
        losses[1].backward(**{keeps: True})
        return losses

    def body(model: nn.Module, backend: Backend) -> Any:
        fsdp = FSDP(model, backend)
        _ = two_passes(fsdp, model, backend.rank, fsdp.no_sync())
        return {name: (at, part.detach()) for name, (at, part) in gradient_pieces(fsdp).items()}

    plain_models = [build() for _ in range(RANKS)]
    for rank, model in enumerate(plain_models):
        two_passes(model, model, rank, nullcontext())
    wanted = {}
    for name, _ in plain_models[0].named_parameters():
        grads = [model.get_parameter(name).grad for model in plain_models]
        wanted[name] = sum(grad.detach() for grad in grads if grad is not None) / RANKS
    assert_close(joined(on_ranks(where, RANKS, build, body)), wanted)
