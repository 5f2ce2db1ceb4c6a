"""Buckets: what is sent, how much of it, in which order, and when."""

from __future__ import annotations

import pytest
import torch
from ddp_models import DefinedBackwards, mlp, noise, seeded
from ddp_runs import (
    Gradients,
    Watched,
    assert_close,
    assert_same_bits,
    gradients,
    mean_of,
    naive_gradients,
    over_tcp,
)
from torch import Tensor, nn

from phalanx import DDP, Backend, MisuseError, simulate


def backward(model: nn.Module, seed: int) -> None:
    model(noise(4, 6, seed=seed)).pow(2).sum().backward()


class Block(nn.Module):
    """One parameter whose gradient is large enough for a ring, and divisible by 2, 3, 4 and 5."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(120_000))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.sum() * x.sum()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_a_step_sends_2_times_p_minus_1_over_p_of_the_gradients_bytes(world_size: int):
    def run(backend: Backend) -> tuple[int, int]:
        ddp = DDP(Block(), backend)
        watched = Watched(backend)
        sent = []
        for _ in range(2):
            watched.clear()
            backward(ddp, backend.rank)
            sent.append(watched.bytes_sent)
        return sent[1]

    gradient = 120_000 * 4
    expected = 2 * (world_size - 1) * gradient // world_size
    assert list(simulate(run, world_size)) == [expected] * world_size


def test_nothing_but_gradients_is_sent_after_the_first_step():
    def run(backend: Backend) -> list[str]:
        ddp = DDP(seeded(DefinedBackwards), backend)
        watched = Watched(backend)
        for seed in range(3):
            watched.clear()
            backward(ddp, seed)
        return watched.events

    for events in simulate(run, 3):
        assert [event.split()[0] for event in events] == ["all_reduce"]


def test_the_bucket_size_bounds_what_is_averaged_as_one_message():
    def run(backend: Backend, bucket_size: int) -> list[str]:
        ddp = DDP(
            nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))), backend, bucket_size=bucket_size
        )
        watched = Watched(backend)
        backward(ddp, 0)
        return watched.sizes()

    pair = (36 + 6) * 4  # bytes of one layer
    for bucket_size, sizes in {
        1: ["[6]", "[36]"] * 4,
        pair: ["[42]"] * 4,
        2 * pair + 1: ["[84]"] * 2,
        1 << 40: ["[168]"],
    }.items():
        assert list(simulate(lambda b, s=bucket_size: run(b, s), 2)) == [sizes] * 2


@pytest.mark.parametrize("bucket_size", [0, -1])
def test_a_bucket_holds_at_least_a_byte(bucket_size: int):
    def run(backend: Backend) -> None:
        DDP(mlp(), backend, bucket_size=bucket_size)

    with pytest.raises(ValueError, match="bucket_size"):
        simulate(run, 1)


def test_the_first_pass_goes_backwards_through_the_parameters_and_later_ones_as_they_arrive():
    def run(backend: Backend) -> list[list[str]]:
        ddp = DDP(seeded(DefinedBackwards), backend, bucket_size=1)
        watched = Watched(backend)
        orders = []
        for seed in range(4):
            watched.clear()
            backward(ddp, seed)
            orders.append(watched.sizes())
        return orders

    last, first, middle = ["[3]", "[15]"], ["[4]", "[24]"], ["[5]", "[20]"]
    for orders in simulate(run, 3):
        assert orders == [
            middle + first + last,  # as defined: last, first, middle
            *[last + middle + first] * 3,  # as gradients arrive
        ]


@pytest.mark.parametrize("seed", range(4))
def test_all_ranks_take_the_order_in_which_gradients_arrived_on_rank_0(seed: int):
    class Sum(nn.Module):
        def __init__(self, order: tuple[int, ...]) -> None:
            super().__init__()
            self.scales = nn.ParameterList(nn.Parameter(torch.ones(n)) for n in (1, 2, 3, 4))
            self.order = order

        def forward(self, x: Tensor) -> Tensor:
            total = x.sum()
            for place in self.order:
                total = total + (self.scales[place] * x.mean()).sum()
            return total

    arrivals = {0: (2, 0, 3, 1), 1: (0, 1, 2, 3), 2: (3, 1, 0, 2)}  # the reverse of what is used

    def build(rank: int) -> nn.Module:
        return Sum(tuple(reversed(arrivals[rank])))

    def run(backend: Backend):
        ddp = DDP(build(backend.rank), backend, bucket_size=1)
        watched = Watched(backend)
        for number in range(2):
            ddp.zero_grad()
            watched.clear()
            backward(ddp, 10 * number + backend.rank)
        return watched.sizes(), gradients(ddp)

    plain = [build(rank) for rank in range(3)]
    for rank, model in enumerate(plain):
        backward(model, 10 + rank)
    for sizes, found in simulate(run, 3, seed):
        assert sizes == ["[3]", "[1]", "[4]", "[2]"]
        assert_close(found, mean_of([gradients(model) for model in plain]))


def test_buckets_are_on_their_way_before_backward_reaches_the_first_layer():
    def run(backend: Backend) -> None:
        layers = [nn.Linear(6, 6) for _ in range(4)]
        ddp = DDP(nn.Sequential(*layers), backend, bucket_size=(36 + 6) * 4)
        watched = Watched(backend)
        for place, layer in enumerate(layers):
            layer.register_full_backward_pre_hook(
                lambda *_, place=place: watched.events.append(f"layer {place}")
            )
        for seed in range(3):
            watched.clear()
            ddp(noise(4, 6, seed=seed).requires_grad_()).pow(2).sum().backward()
        short = [event.split()[0] if "all_reduce" in event else event for event in watched.events]
        assert short == [
            *("layer 3", "all_reduce"),
            *("layer 2", "all_reduce"),
            *("layer 1", "all_reduce"),
            *("layer 0", "all_reduce"),
        ]

    simulate(run, 2)


def test_large_gradients_are_averaged_over_tcp_while_backward_computes():
    layers = 4
    models = [
        seeded(lambda: nn.Sequential(*(nn.Linear(300, 300) for _ in range(layers))), rank)
        for rank in range(2)
    ]

    def run(backend: Backend) -> Gradients:
        ddp = DDP(models[backend.rank], backend, bucket_size=100_000)
        watched = Watched(backend)
        for number in range(3):
            ddp.zero_grad()
            watched.clear()
            ddp(noise(8, 300, seed=10 * number + backend.rank)).pow(2).sum().backward()
        assert watched.bytes_sent == layers * (300 * 300 + 300) * 4
        return gradients(ddp)

    expected = naive_gradients(
        lambda: seeded(lambda: nn.Sequential(*(nn.Linear(300, 300) for _ in range(layers)))),
        2,
        lambda model, rank: model(noise(8, 300, seed=20 + rank)).pow(2).sum().backward(),
    )
    ranks = over_tcp(run, 2)
    assert_same_bits(ranks)
    assert_close(ranks[0], expected)


def test_a_gradient_is_final_when_backward_returns_and_stays_where_it_is():
    def run(backend: Backend):
        ddp = DDP(mlp(), backend, bucket_size=1)
        backward(ddp, backend.rank)
        first = {name: p.grad for name, p in ddp.named_parameters()}
        final = gradients(ddp)
        backend.barrier()
        ddp(noise(4, 6))  # a forward pass changes no gradient
        assert all(p.grad is first[name] for name, p in ddp.named_parameters())
        assert_same_bits([final, gradients(ddp)])

    simulate(run, 3)


def test_a_program_that_replaces_the_data_of_a_gradient_trains_as_any_other():
    def run(backend: Backend):
        ddp, found = DDP(mlp(), backend), []
        for _ in range(3):
            ddp.zero_grad()
            backward(ddp, backend.rank)
            found.append(gradients(ddp))
            for parameter in ddp.parameters():
                parameter.grad.data = parameter.grad.data * 3  # as some programs scale, or clip
        return found

    for first, *later in simulate(run, 3):
        assert_same_bits([first, *later])


def test_a_model_that_is_wrapped_again_sends_its_gradients_once():
    def run(backend: Backend) -> list[str]:
        model = mlp()
        ddp = DDP(model, backend)
        backward(ddp, 0)
        del ddp
        ddp = DDP(model, backend, bucket_size=1)
        watched = Watched(backend)
        backward(ddp, 0)
        return watched.sizes()

    for sizes in simulate(run, 2):
        assert len(sizes) == 6


def test_a_module_that_another_ddp_holds_is_refused():
    def run(backend: Backend) -> None:
        ddp = DDP(mlp(), backend)
        with pytest.raises(MisuseError, match="DDP"):
            DDP(ddp, backend)

    simulate(run, 2)
