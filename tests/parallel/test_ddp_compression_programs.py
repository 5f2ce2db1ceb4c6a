"""Random programs of passes, accumulation, skips and failures, resumed on other numbers of ranks:

gradients that came + what averages lack  ==  gradients that there were + what they lacked
"""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from ddp_models import Branches, noise, seeded
from torch import Tensor, nn

from phalanx import DDP, Backend, ErrorFeedback, PowerSGD, Quantized, TopK, simulate
from phalanx.compression import RandomK
from phalanx.compression.error_feedback import total_residual

KINDS = [
    lambda: TopK(0.05),
    lambda: RandomK(0.1),
    lambda: PowerSGD(1),
    lambda: Quantized(1, block=16),
    lambda: Quantized(4, block=7),
]
ACTS = ("average", "average", "accumulate", "unused", "infinite", "fail")


class Failure(Exception):
    """Of a layer, on all ranks."""


def fail(grad: Tensor) -> None:
    raise Failure


class Phase:
    """A few passes on some ranks, beginning with the joined states of the ranks before."""

    def __init__(self, draw: random.Random, seed: int, state: dict[str, Tensor]) -> None:
        self.ranks = draw.randint(1, 4)
        self.bucket_size = draw.choice([1, 100, 1 << 20])
        self.skip = draw.random() < 0.5
        self.acts = draw.choices(ACTS, k=3)
        self.culprit = draw.randrange(self.ranks)
        self.seed = seed
        self.state = state

    def run(self, backend: Backend, make: Any) -> tuple[Any, ...]:
        ddp = DDP(
            seeded(Branches),
            backend,
            bucket_size=self.bucket_size,
            skip_nonfinite=self.skip,
            find_unused_parameters=True,
            compression=ErrorFeedback(make()),
        )
        ddp.load_own_state(self.state)
        before, came, given = ddp.own_state(), {}, {}
        for number, act in enumerate(self.acts):
            ddp.zero_grad()
            alone = seeded(Branches)
            self.act(ddp, alone, act, number, backend.rank)
            if act not in ("fail", "infinite"):
                add(came, ddp.module)
                add(given, alone)
        ddp(noise(2, 6))  # which finishes what has failed
        return before, ddp.own_state(), came, given

    def act(self, ddp: DDP, alone: nn.Module, act: str, number: int, rank: int) -> None:
        inputs = [noise(3, 6, seed=self.seed + 100 * number + 10 * k + rank) for k in range(2)]
        names = ("left",) if act == "unused" else ("left", "right")

        def loss(model: nn.Module, micro: int = 0) -> Tensor:
            return model(inputs[micro], *names).pow(2).sum()

        if act == "accumulate":
            with ddp.no_sync():
                loss(ddp, 1).backward()
            loss(alone, 1).backward()
        if act == "infinite":
            (loss(ddp) * (math.inf if rank == self.culprit else 1)).backward()
        elif act == "fail":
            handle = ddp.module.trunk.bias.register_hook(fail)
            with pytest.raises(Failure):
                loss(ddp).backward()
            handle.remove()
        else:
            loss(ddp).backward()
            loss(alone).backward()


def add(total: dict[str, Tensor], model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            flat = parameter.grad.double().flatten()
            total[name] = total[name] + flat if name in total else flat


def lacked(states: Any, ranks: int) -> dict[str, Tensor]:
    cut = [{key.split(".", 1)[1]: value for key, value in state.items()} for state in states]
    return total_residual(cut, ranks)


@pytest.mark.parametrize("seed", range(5))
def test_nothing_is_lost_in_any_program(seed: int):
    draw = random.Random(seed)
    make = KINDS[seed % len(KINDS)]
    state: dict[str, Tensor] = {}
    lacked_before: dict[str, Tensor] = {}
    for phase_number in range(3):
        phase = Phase(draw, 1000 * (3 * seed + phase_number), state)
        ran = simulate(lambda b, phase=phase: phase.run(b, make), phase.ranks, seed=seed)
        befores, afters, came, given = zip(*ran, strict=True)
        before, after = lacked(befores, phase.ranks), lacked(afters, phase.ranks)
        for name, value in lacked_before.items():
            torch.testing.assert_close(before[name], value, rtol=2**-22, atol=1e-12)
        for name, parameter in seeded(Branches).named_parameters():
            none = torch.zeros(parameter.numel(), dtype=torch.float64)
            mean = sum(one.get(name, none) for one in given) / phase.ranks
            for other in came:
                assert torch.equal(other.get(name, none), came[0].get(name, none))
            torch.testing.assert_close(
                came[0].get(name, none) + after.get(name, none),
                mean + before.get(name, none),
                rtol=1e-5,
                atol=1e-5,
                msg=lambda text, name=name, phase=phase: f"{name} {vars(phase)}: {text}",
            )
        lacked_before = after
        state = {key: value for one in afters for key, value in one.items()}
