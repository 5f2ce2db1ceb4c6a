"""Parameters of every kind: shared, frozen, scalar, empty, strided, of several dtypes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ddp_models import mlp, noise, seeded
from ddp_runs import (
    assert_close,
    assert_same_bits,
    gradients,
    naive_gradients,
    outcome_of,
    values,
)
from torch import Tensor, nn

from phalanx import DDP, Backend, DesyncError, ErrorFeedback, MisuseError, TopK, simulate


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.again = self.first
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.tied(torch.tanh(self.again(torch.tanh(self.first(x)))))


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Linear(6, 5)
        self.doubled = nn.Linear(5, 4, dtype=torch.float64)
        self.brain = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.wave = nn.Parameter(torch.ones(4, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        y = self.doubled(torch.tanh(self.plain(x)).double())
        return (self.brain(y.bfloat16()).float() * self.wave).abs() * self.scale


class Odd(nn.Module):
    """A scalar, an empty, a transposed and a channels-last parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(3.0))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.transposed = nn.Parameter(torch.randn(4, 6).t())
        self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        y = (x @ self.transposed).view(-1, 1, 2, 2).expand(-1, 2, -1, -1)
        y = self.conv(y.contiguous(memory_format=torch.channels_last))
        return y * self.scalar + self.empty.sum()


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 4).requires_grad_(False)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


KINDS: dict[str, Callable[[], nn.Module]] = {
    "shared": Shared,
    "mixed dtypes": Mixed,
    "odd shapes": Odd,
    "partly frozen": Frozen,
}


def backward(model: nn.Module, seed: int) -> None:
    model(noise(4, 6, seed=seed)).pow(2).sum().backward()


@pytest.mark.checkered
@pytest.mark.parametrize("bucket_size", [1, 70, 1 << 20])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_every_kind_of_parameter_are_averaged(kind, world_size, bucket_size):
    def run(backend: Backend):
        ddp = DDP(seeded(KINDS[kind], backend.rank), backend, bucket_size=bucket_size)
        start = values(ddp)
        for number in range(3):
            ddp.zero_grad()
            backward(ddp, 10 * number + backend.rank)
        return start, gradients(ddp)

    ranks = list(simulate(run, world_size))
    assert_same_bits([start for start, _ in ranks])
    assert_same_bits([found for _, found in ranks])
    wanted = naive_gradients(
        lambda: seeded(KINDS[kind]), world_size, lambda model, rank: backward(model, 20 + rank)
    )
    for name, grad in ranks[0][1].items():
        rounding = {"rtol": 0.05, "atol": 0.5} if "brain" in name else {"rtol": 1e-5, "atol": 1e-6}
        assert_close({name: grad}, {name: wanted[name]}, **rounding)


def test_the_memory_layout_and_identity_of_parameters_stay():
    def run(backend: Backend) -> None:
        model = Odd()
        strides = [p.stride() for p in model.parameters()]
        before = [(p, p.data_ptr()) for p in model.parameters()]
        ddp = DDP(model, backend)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
        for number in range(2):
            optimizer.zero_grad()
            backward(ddp, number)
            optimizer.step()
        ddp.broadcast_parameters(root=1)
        after = list(ddp.parameters())
        assert all(a is b and a.data_ptr() == at for a, (b, at) in zip(after, before, strict=True))
        assert strides == [p.stride() for p in after]
        assert all(p.grad.dtype == p.dtype and p.grad.shape == p.shape for p in after)

    simulate(run, 2)


def test_broadcast_parameters_takes_those_of_the_root_that_is_asked_for():
    def run(backend: Backend):
        ddp = DDP(mlp(), backend)
        with torch.no_grad():
            for p in ddp.parameters():
                p.fill_(float(backend.rank))
        ddp.broadcast_parameters(root=2)
        return values(ddp)

    ranks = list(simulate(run, 3))
    assert_same_bits(ranks)
    assert all((value == 2).all() for value in ranks[0].values())


def test_a_frozen_parameter_gets_no_gradient():
    def run(backend: Backend) -> bool:
        ddp = DDP(Frozen(), backend)
        backward(ddp, backend.rank)
        return ddp.module.body.weight.grad is None

    assert list(simulate(run, 2)) == [True, True]


@pytest.mark.parametrize(
    "build", [nn.Identity, lambda: nn.Linear(6, 2).requires_grad_(False), nn.ReLU]
)
def test_models_without_trained_parameters_work(build):
    def run(backend: Backend) -> list[int]:
        ddp = DDP(build(), backend)
        x = torch.ones(1, 6, requires_grad=True)
        ddp(x).sum().backward()
        with ddp.no_sync():
            ddp(x).sum().backward()
        ddp.sync_gradients()
        return list(x.grad.shape)

    assert list(simulate(run, 2)) == [[1, 6]] * 2


# Freezing and unfreezing after `DDP(...)` ------------------------------------------------------


STAGES = [(), ("0", "2"), ("2",), ("0", "2", "4"), ("0",)]  # the layers that are frozen
OPTIONS = {
    "one bucket": {},
    "many buckets": {"bucket_size": 1},
    "unused": {"find_unused_parameters": True},
    "finite": {"skip_nonfinite": True},
    "compressed": {"compression": ErrorFeedback(TopK(1.0))},
}


def freeze(model: nn.Module, layers: tuple[str, ...]) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.split(".")[0] not in layers)


@pytest.mark.checkered
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("first", STAGES, ids=str)
def test_parameters_are_frozen_and_unfrozen_between_passes(first, options):
    def one(model: nn.Module, rank: int, number: int) -> None:
        x = noise(4, 6, seed=10 * number + rank).requires_grad_()
        model(x).pow(2).sum().backward()

    def run(backend: Backend):
        model = mlp()
        freeze(model, first)
        ddp = DDP(model, backend, **options)
        found = []
        for number, layers in enumerate(STAGES):
            freeze(model, layers)
            ddp.zero_grad()
            with ddp.no_sync():
                one(ddp, backend.rank, number)
            one(ddp, backend.rank, number)
            found.append(gradients(ddp))
        return found

    def alone(layers: tuple[str, ...], number: int):
        model = mlp()
        freeze(model, layers)
        for rank in range(3):
            one(model, rank, number)
            one(model, rank, number)
        return {name: grad if grad is None else grad / 3 for name, grad in gradients(model).items()}

    ranks = list(simulate(run, 3))
    for number, layers in enumerate(STAGES):
        assert_same_bits([found[number] for found in ranks])
        assert_close(ranks[0][number], alone(layers, number))


def test_what_no_sync_has_accumulated_for_a_parameter_is_averaged_after_it_is_frozen():
    def run(backend: Backend):
        ddp = DDP(mlp(), backend)
        with ddp.no_sync():
            backward(ddp, backend.rank)
        ddp.module[0].requires_grad_(False)
        ddp.sync_gradients()
        return gradients(ddp)

    ranks = list(simulate(run, 2))
    assert_same_bits(ranks)
    assert_close(ranks[0], naive_gradients(mlp, 2, backward))


def test_a_parameter_may_be_frozen_between_a_forward_pass_and_its_backward_pass():
    def run(backend: Backend):
        ddp = DDP(mlp(), backend)
        loss = ddp(noise(4, 6, seed=backend.rank)).pow(2).sum()
        ddp.module[0].requires_grad_(False)
        loss.backward()
        return gradients(ddp)

    ranks = list(simulate(run, 2))
    assert_same_bits(ranks)
    expected = naive_gradients(mlp, 2, backward)
    assert_close(ranks[0], {**expected, "0.weight": None, "0.bias": None})


@pytest.mark.checkered
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("first", [(), ("2",)], ids=str)
@pytest.mark.parametrize("then", [(), ("2",), ("0", "2", "4")], ids=str)
def test_ranks_that_do_not_freeze_alike_are_told_which_parameter(first, then, ranks):
    def run(backend: Backend) -> BaseException | None:
        model = mlp()
        freeze(model, first)
        ddp = DDP(model, backend)

        def one() -> None:
            ddp(noise(4, 6).requires_grad_()).pow(2).sum().backward()

        one()
        if backend.rank == 1:
            freeze(model, then)
        # A rank whose own part is complete by then learns of it at its next call.
        return outcome_of(one) or outcome_of(one)

    if first != then:
        for error in simulate(run, ranks):
            assert isinstance(error, DesyncError)
            assert "requires_grad switched for" in str(error)
            assert ("2.weight" if "2" in {*first} ^ {*then} else "0.weight") in str(error)


@pytest.mark.parametrize("how", ["added", "replaced"])
def test_parameters_that_come_after_ddp_was_built_are_refused_by_name(how: str):
    def run(backend: Backend) -> BaseException | None:
        ddp = DDP(nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2)), backend)
        if how == "added":
            ddp.module.append(nn.Linear(2, 2))
        else:
            ddp.module[1] = nn.Linear(4, 2)
        backend.barrier()
        return outcome_of(lambda: ddp(torch.ones(1, 6)))

    for error in simulate(run, 2):
        assert isinstance(error, MisuseError)
        assert ("2.weight, 2.bias" if how == "added" else "1.weight, 1.bias") in str(error)


def test_frozen_parameters_may_come_later():
    def run(backend: Backend) -> None:
        ddp = DDP(nn.Sequential(nn.Linear(6, 4)), backend)
        ddp.module.append(nn.Linear(4, 2).requires_grad_(False))
        ddp(torch.ones(1, 6)).sum().backward()

    simulate(run, 2)
