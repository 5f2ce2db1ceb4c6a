"""Random programs of training with uneven batches, compared with one process that has them all."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from ddp_models import Branches, loss_of, noise, seeded
from ddp_runs import assert_close, assert_same_bits, over_tcp, values
from forms import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from phalanx import DDP, Backend, simulate

EXACT = {"rtol": 1e-9, "atol": 1e-11}


class Counted(nn.Module):
    """Branches of which a batch names those it uses, and a buffer that counts forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = Branches()
        self.register_buffer("passes", torch.zeros(2, dtype=torch.int64))

    def forward(self, x: Tensor, *names: str) -> Tensor:
        self.passes += 1
        return self.branches(x, *names)


class Program(NamedTuple):
    micro: list[list[list[int]]]  # for each rank, each step, each micro-batch: its rows
    bucket_size: int
    weighted: bool
    catch_up: bool
    find_unused: bool
    checkpoint: bool
    skip: bool
    seed: int


@st.composite
def programs(draw: st.DrawFn) -> Program:
    size = draw(st.integers(1, 4))
    accumulated = draw(st.integers(1, 3))
    weighted = draw(st.booleans())
    rows = st.integers(0 if weighted else 1, 4)
    micro = [
        [[draw(rows) for _ in range(accumulated)] for _ in range(draw(st.integers(0, 4)))]
        for _ in range(size)
    ]
    return Program(
        micro,
        draw(st.sampled_from([1, 150, 1 << 20])),
        weighted,
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.integers(0, 1000)),
    )


def build() -> nn.Module:
    return seeded(Counted).double()


def sample(rank: int, step: int, part: int, rows: int) -> tuple[Tensor, Tensor]:
    seed = 1000 * rank + 10 * step + part
    return noise(rows, 6, seed=seed).double(), noise(rows, 3, seed=seed + 7).double()


def names_of(program: Program, rank: int, step: int) -> list[str]:
    if not program.find_unused:
        return ["left", "right"]
    return [["left"], ["right"], ["left", "right"]][(rank + step) % 3]


def train(backend: Backend, program: Program, model: nn.Module) -> dict[str, Tensor]:
    ddp = DDP(
        model,
        backend,
        bucket_size=program.bucket_size,
        find_unused_parameters=program.find_unused,
        skip_nonfinite=program.skip,
        check_replicas_every=2,
    )
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01, eps=1e-2)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def backward(number: int, part: int, rows: int) -> None:
        x, y = sample(backend.rank, number, part, rows)
        names = names_of(program, backend.rank, number)
        if program.checkpoint:
            output = checkpoint(ddp, x.requires_grad_(), *names, use_reentrant=False)
        else:
            output = ddp(x, *names)
        loss = loss_of(output, y)
        (ddp.weighted(loss, rows) if program.weighted else loss).backward()

    with ddp.join(step):
        for number, parts in enumerate(program.micro[backend.rank]):
            *first, last = enumerate(parts)
            with ddp.no_sync():
                for part, rows in first:
                    backward(number, part, rows)
                if program.catch_up:
                    backward(number, *last)
            if program.catch_up:
                ddp.sync_gradients()
            else:
                backward(number, *last)
            step()
    assert ddp.skipped_steps == 0
    found = values(ddp)
    found.pop("passes")  # a checkpoint counts twice
    return found


def reference(program: Program) -> dict[str, Tensor]:
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-2)
    for number in range(max(map(len, program.micro))):
        active = [r for r, steps in enumerate(program.micro) if number < len(steps)]
        for part in range(len(program.micro[active[0]][number])):
            own = {rank: program.micro[rank][number][part] for rank in active}
            for rank, rows in own.items():
                x, y = sample(rank, number, part, rows)
                loss = loss_of(model(x, *names_of(program, rank, number)), y)
                weight = rows / max(1, sum(own.values())) if program.weighted else 1 / len(own)
                (loss * weight if weight else torch.nan_to_num(loss) * 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = values(model)
    found.pop("passes")
    return found


@settings(max_examples=examples(60))
@given(programs())
def test_any_program_ends_with_the_parameters_of_one_process(program: Program):
    size = len(program.micro)
    ranks = list(simulate(lambda b: train(b, program, build()), size, program.seed))
    assert_same_bits(ranks)
    assert_close(ranks[0], reference(program), **EXACT)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("find_unused", [True, False])
def test_a_program_over_tcp_ends_with_the_parameters_of_one_process(weighted, find_unused):
    micro = [[[2, 1], [3, 3]], [], [[1, 4], [2, 2], [1, 1], [3, 1]]]
    program = Program(micro, 150, weighted, False, find_unused, False, True, 0)
    models = [build() for _ in micro]
    ranks = over_tcp(lambda b: train(b, program, models[b.rank]), 3)
    assert_same_bits(ranks)
    assert_close(ranks[0], reference(program), **EXACT)
