"""Random steps of a joined batch, compared with one process: `make exact` tries thousands."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from ddp_models import seeded
from ddp_runs import assert_same_bits, gradients, values
from forms import sizes
from fsdp_runs import gradient_pieces, joined
from hypothesis import given, settings
from hypothesis import strategies as st
from joined_runs import assert_equal_to_rounding
from torch import Tensor, nn
from torch.nn import functional as F

from phalanx import DDP, FSDP, Backend, ShardingStrategy, clip_grad_norm_, simulate

WORDS, LENGTH, IGNORED = 9, 3, -100
FSDPS = ["full_shard", "shard_grad_op", "no_shard"]


class Tagger(nn.Module):
    """A label for each word; the embedding is the output layer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 6)
        self.mix = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6))
        self.out = nn.Linear(6, WORDS)
        self.out.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        return self.out(x + self.mix(x)).flatten(0, 1)


class Program(NamedTuple):
    """
    kind      "ddp", or a strategy
    rows      of each step, rank and micro-batch
    ignored   of each rank, the share of its labels that do not count
    option    bucket_size of DDP, prefetch of FSDP
    """

    kind: str
    rows: list[list[list[int]]]
    ignored: list[float]
    option: int
    adam: bool
    seed: int


@st.composite
def programs(draw: st.DrawFn, steps: int) -> Program:
    ranks = draw(st.integers(1, 8))
    hybrids = [f"hybrid {each}" for each in range(1, ranks + 1) if ranks % each == 0]
    kind = draw(st.sampled_from(["ddp", *FSDPS, *hybrids]))
    micro_batches = st.lists(st.integers(0, 3), max_size=3)
    rows = [draw(st.lists(micro_batches, min_size=ranks, max_size=ranks)) for _ in range(steps)]
    for step in rows:
        if not any(map(sum, step)):
            step[draw(st.integers(0, ranks - 1))] = [1]
    ignored = draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=ranks, max_size=ranks))
    option = draw(st.sampled_from([1, 150, 1 << 20] if kind == "ddp" else [0, 1, 2]))
    return Program(kind, rows, ignored, option, draw(st.booleans()), draw(st.integers(0, 99)))


def build() -> nn.Module:
    return seeded(Tagger).double()


def micro_batch(program: Program, step: int, rank: int, part: int) -> tuple[Tensor, Tensor]:
    """Words, and labels, of which at least one of all ranks counts."""
    rows = program.rows[step][rank][part]
    draw = torch.Generator().manual_seed(1000 * step + 100 * rank + 10 * part + program.seed)
    words, labels = torch.randint(WORDS, (2, rows, LENGTH), generator=draw)
    labels = labels.masked_fill(
        torch.rand(labels.shape, generator=draw) < program.ignored[rank], IGNORED
    )
    first = next(r for r, own in enumerate(program.rows[step]) if any(own))
    if rank == first and part == next(n for n, r in enumerate(program.rows[step][rank]) if r):
        labels[0, 0] = 1
    return words, labels.flatten()


def parts_of(program: Program, step: int, rank: int) -> list[tuple[Tensor, Tensor]]:
    count = len(program.rows[step][rank])
    return [micro_batch(program, step, rank, part) for part in range(count)]


def weight_of(parts: list[tuple[Tensor, Tensor]]) -> int:
    return sum(int((labels != IGNORED).sum()) for _, labels in parts)


def sum_of_losses(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs, labels, ignore_index=IGNORED, reduction="sum")


def optimizer_of(model: nn.Module, program: Program) -> torch.optim.Optimizer:
    kind: Any = torch.optim.AdamW if program.adam else torch.optim.SGD
    return kind(model.parameters(), lr=0.02)  # type: ignore[no-any-return]


def wrapped(program: Program, backend: Backend) -> Any:
    if program.kind == "ddp":
        return DDP(build(), backend, bucket_size=program.option)
    strategy: Any = program.kind
    if strategy.startswith("hybrid"):
        strategy = ShardingStrategy.hybrid(int(strategy.split()[1]))
    return FSDP(build(), backend, strategy=strategy, prefetch=program.option)


def on_a_rank(program: Program, backend: Backend) -> Any:
    """Of each step the loss, the gradients, and their norm before and after clipping."""
    model = wrapped(program, backend)
    optimizer, found = optimizer_of(model, program), []
    for number in range(len(program.rows)):
        parts = parts_of(program, number, backend.rank)
        with model.step(weight_of(parts), micro_batches=len(parts)) as step:
            for words, labels in parts:
                step.backward(sum_of_losses(model(words), labels))
        pieces = gradient_pieces(model)
        norms = [clip_grad_norm_(model, bound).item() for bound in (0.05, 1e9)]
        found.append((step.loss, pieces, norms))
        optimizer.step()
        optimizer.zero_grad()
    return found, model.full_state_dict() if isinstance(model, FSDP) else values(model)


def in_one_process(program: Program) -> Any:
    model = build()
    optimizer, found = optimizer_of(model, program), []
    for number, step in enumerate(program.rows):
        ranks = [parts_of(program, number, rank) for rank in range(len(step))]
        total, losses = sum(map(weight_of, ranks)), []
        for words, labels in (part for parts in ranks for part in parts):
            losses.append(sum_of_losses(model(words), labels) / total)
            losses[-1].backward()
        before = gradients(model)
        norms = [nn.utils.clip_grad_norm_(model.parameters(), b).item() for b in (0.05, 1e9)]
        found.append((torch.stack(losses).sum().item(), before, norms))
        optimizer.step()
        optimizer.zero_grad()
    return found, values(model)


def assert_as_in_one_process(program: Program) -> None:
    ranks = list(simulate(lambda b: on_a_rank(program, b), len(program.ignored), program.seed))
    expected, parameters = in_one_process(program)
    for steps in zip(expected, *(found for found, _ in ranks), strict=True):
        (loss, right, norms), *of_ranks = steps
        assert_equal_to_rounding(joined([pieces for _, pieces, _ in of_ranks]), right, 1e-12)
        for found, _, own in of_ranks:
            for value, one in zip([found, *own], [loss, *norms], strict=True):
                assert abs(value - one) <= 1e-10 * one
    assert_same_bits([state for _, state in ranks])
    assert_equal_to_rounding(ranks[0][1], parameters, 1e-10)


@settings(max_examples=sizes(10, 2000))
@given(programs(1))
def test_any_step_has_the_gradients_loss_and_norms_of_one_process(program: Program):
    assert_as_in_one_process(program)


@settings(max_examples=sizes(2, 250))
@given(programs(10))
def test_ten_steps_of_any_kind_end_with_the_parameters_of_one_process(program: Program):
    assert_as_in_one_process(program)
