"""Whatever the model, the ranks and the buckets: DDP's gradients are the mean of the ranks' own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from ddp_models import noise, seeded
from ddp_runs import Gradients, assert_close, assert_same_bits, gradients, mean_of
from forms import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from phalanx import DDP, Backend, simulate

DTYPES = [torch.float32, torch.float64, torch.bfloat16]


@dataclass(frozen=True)
class Layer:
    """One step of a random model: a linear layer, or a parameter to multiply with."""

    width: int
    dtype: torch.dtype
    bias: bool
    frozen: bool
    again: bool  # use an earlier layer of the same shape, if there is one
    skipped_by: int | None  # this rank does not use it


@dataclass(frozen=True)
class Case:
    layers: tuple[Layer, ...]
    definition: tuple[int, ...]  # the order in which layers are registered
    world_size: int
    bucket_size: int
    micro_batches: int
    find_unused: bool
    seed: int


class Random(nn.Module):
    """The model of a case."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.rank = 0
        made: dict[int, nn.Module] = {}
        width = 3
        for place, layer in enumerate(case.layers):
            made[place] = nn.Linear(width, layer.width, bias=layer.bias, dtype=layer.dtype)
            made[place].requires_grad_(not layer.frozen)
            width = layer.width
        for place, layer in enumerate(case.layers):
            for earlier in range(place if layer.again else 0):
                if made[earlier].weight.shape == made[place].weight.shape:
                    made[place] = made[earlier]
        for place in case.definition:
            self.add_module(f"layer{place}", made[place])

    def forward(self, x: Tensor) -> Tensor:
        for place, spec in enumerate(self.case.layers):
            layer = getattr(self, f"layer{place}")
            if spec.skipped_by == self.rank and self.case.find_unused:
                x = x.double().mean(1, keepdim=True).expand(-1, layer.out_features)
            else:
                x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x.double()


@st.composite
def cases(draw: st.DrawFn) -> Case:
    world_size = draw(st.integers(1, 5))
    layer = st.builds(
        Layer,
        width=st.integers(1, 5),
        dtype=st.sampled_from(DTYPES),
        bias=st.booleans(),
        frozen=st.sampled_from([False, False, False, True]),
        again=st.booleans(),
        skipped_by=st.one_of(st.none(), st.integers(0, world_size - 1)),
    )
    layers = tuple(draw(st.lists(layer, min_size=1, max_size=5)))
    return Case(
        layers,
        tuple(draw(st.permutations(range(len(layers))))),
        world_size,
        draw(st.sampled_from([1, 16, 60, 200, 1 << 20])),
        draw(st.integers(1, 3)),
        draw(st.booleans()),
        draw(st.integers(0, 1000)),
    )


def backward(model: nn.Module, seed: int) -> None:
    # The input requires gradients, so that there is a pass even if no parameter does.
    model(noise(2, 3, seed=seed).requires_grad_()).pow(2).sum().backward()


@settings(
    derandomize=True,
    deadline=None,
    max_examples=examples(80),
    suppress_health_check=[HealthCheck.too_slow],
)
@given(cases())
def test_gradients_are_the_mean_of_the_ranks_own(case: Case):
    steps = 2

    def seeds(rank: int, step: int) -> list[int]:
        return [1000 * step + 10 * rank + number for number in range(case.micro_batches)]

    def run(backend: Backend) -> Gradients:
        model = seeded(lambda: Random(case))
        model.rank = backend.rank
        ddp = DDP(
            model,
            backend,
            bucket_size=case.bucket_size,
            find_unused_parameters=case.find_unused,
        )
        for step in range(steps):
            ddp.zero_grad()
            *first, last = seeds(backend.rank, step)
            with ddp.no_sync():
                for seed in first:
                    backward(ddp, seed)
            backward(ddp, last)
        return gradients(ddp)

    alone = []
    for rank in range(case.world_size):
        model = seeded(lambda: Random(case))
        model.rank = rank
        for seed in seeds(rank, steps - 1):
            backward(model, seed)
        alone.append(gradients(model))

    ranks = list(simulate(run, case.world_size, case.seed))
    assert_same_bits(ranks)
    wanted = mean_of(alone)
    for name, grad in ranks[0].items():
        coarse = any(layer.dtype is torch.bfloat16 for layer in case.layers)
        rounding = {"rtol": 0.05, "atol": 0.05} if coarse else {"rtol": 1e-4, "atol": 1e-6}
        assert_close({name: grad}, {name: wanted[name]}, **rounding)
