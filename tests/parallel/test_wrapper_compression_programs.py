"""Random programs of passes, accumulation, layers used twice or not, skips, infinities and
failures, which other ranks, strategies and wrappers go on with:

gradients that came + what averages lack  ==  gradients that there were + what they lacked
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ddp_models import Branches, noise, seeded
from fsdp_runs import FULL_SHARD, NO_SHARD, SHARD_GRAD_OP, gradient_pieces, joined
from residuals import lacking
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from phalanx import (
    DDP,
    FSDP,
    Backend,
    ErrorFeedback,
    PowerSGD,
    Quantized,
    ShardingStrategy,
    TopK,
    simulate,
)
from phalanx.compression import Compressor, RandomK

KINDS: list[Callable[[], Compressor]] = [
    lambda: TopK(0.05),
    lambda: RandomK(0.1),
    lambda: PowerSGD(1),
    lambda: Quantized(1, block=16),
    lambda: Quantized(4, block=7),
]
ACTS = ("average", "twice", "accumulate", "unused", "retained", "recomputed", "infinite", "fail")
STRATEGIES = [FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, ShardingStrategy.hybrid(2)]
SIZES = {name: p.numel() for name, p in seeded(Branches).named_parameters()}


class Failure(Exception):
    """Of a layer, on all ranks."""


def fail(*_: object) -> None:
    raise Failure


class Phase:
    """A few passes on some ranks, beginning with the joined states of the ranks before."""

    def __init__(
        self, kinds: list[Any], draw: random.Random, seed: int, state: dict[str, Tensor]
    ) -> None:
        self.kind = draw.choice(kinds)
        if self.kind is DDP:
            self.options = {
                "bucket_size": draw.choice([1, 100, 1 << 20]),
                "skip_nonfinite": draw.random() < 0.5,
                "find_unused_parameters": True,
            }
            self.ranks = draw.randint(1, 4)
        else:
            one_group = draw.random() < 0.5
            unit = (lambda module: isinstance(module, Branches)) if one_group else None
            self.options = {"strategy": draw.choice(STRATEGIES), "unit": unit}
            hybrid = self.options["strategy"].name == "hybrid"
            self.ranks = draw.choice([2, 4] if hybrid else [1, 2, 3, 4])
        self.acts = draw.choices(ACTS, k=3)
        self.culprit = draw.randrange(self.ranks)
        self.seed = seed
        self.state = state

    def run(self, backend: Backend, make: Any) -> Any:
        compression = ErrorFeedback(make())
        wrapped = self.kind(seeded(Branches), backend, compression=compression, **self.options)
        wrapped.load_own_state(self.state)
        before, came, given = wrapped.own_state(), [], []
        for number, act in enumerate(self.acts):
            wrapped.zero_grad()
            alone = seeded(Branches)
            self.act(wrapped, alone, act, number, backend.rank)
            if act not in ("fail", "infinite"):
                came.append(gradient_pieces(wrapped))
                given.append(alone)
        wrapped(noise(2, 6), "left")  # which finishes or forgets what has failed
        return before, wrapped.own_state(), came, given

    def act(self, wrapped: Any, alone: nn.Module, act: str, number: int, rank: int) -> None:
        inputs = [noise(3, 6, seed=self.seed + 100 * number + 10 * k + rank) for k in range(2)]
        names = ("left",) if act == "unused" else ("left", "right")

        def loss(model: nn.Module, micro: int = 0) -> Tensor:
            return model(inputs[micro], *names).pow(2).sum()

        if act == "accumulate":
            with wrapped.no_sync():
                loss(wrapped, 1).backward()
            loss(alone, 1).backward()
        if act == "infinite":
            (loss(wrapped) * (math.inf if rank == self.culprit else 1)).backward()
        elif act == "fail":
            value = loss(wrapped)
            handle = wrapped.module.trunk.register_full_backward_pre_hook(fail)
            value = loss(wrapped)
            with pytest.raises(Failure):
                value.backward()
            handle.remove()
        elif act == "twice":
            (loss(wrapped) + loss(wrapped, 1)).backward()
            (loss(alone) + loss(alone, 1)).backward()
        elif act == "retained":
            value = loss(wrapped)
            value.backward(retain_graph=True)
            value.backward()
            (2 * loss(alone)).backward()
        elif act == "recomputed":
            given = inputs[0].requires_grad_()
            checkpoint(wrapped, given, *names, use_reentrant=False).pow(2).sum().backward()
            loss(alone).backward()
        else:
            loss(wrapped).backward()
            loss(alone).backward()


@pytest.mark.checkered
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kinds", [[DDP], [FSDP], [DDP, FSDP]], ids=["DDP", "FSDP", "either"])
def test_nothing_is_lost_in_any_program(kinds: list[Any], seed: int):
    """Ranks that have the same elements of a gradient have the same bits (`joined`)."""
    draw = random.Random(seed)
    make = KINDS[seed % len(KINDS)]
    state: dict[str, Tensor] = {}
    lacked_before: dict[str, Tensor] = {}
    for phase_number in range(3):
        phase = Phase(kinds, draw, 1000 * (3 * seed + phase_number), state)
        ran = simulate(lambda b, phase=phase: phase.run(b, make), phase.ranks, seed=seed)
        befores, afters, came, given = zip(*ran, strict=True)
        before, after = lacking(befores, SIZES), lacking(afters, SIZES)
        for name, value in lacked_before.items():
            torch.testing.assert_close(before[name], value, rtol=2**-22, atol=1e-12)
        passes = [joined(list(pieces)) for pieces in zip(*came, strict=True)]
        for name, size in SIZES.items():
            none = torch.zeros(size, dtype=torch.float64)
            sent = sum((flat(one[name], none) for one in passes), none)
            there = sum((flat(m.get_parameter(name).grad, none) for r in given for m in r), none)
            torch.testing.assert_close(
                sent + after.get(name, none),
                there / phase.ranks + before.get(name, none),
                rtol=1e-5,
                atol=1e-5,
                msg=lambda text, name=name, phase=phase: f"{name} {vars(phase)}: {text}",
            )
        lacked_before = after
        state = {key: value for one in afters for key, value in one.items()}


def flat(gradient: Tensor | None, none: Tensor) -> Tensor:
    return none if gradient is None else gradient.double().flatten()
