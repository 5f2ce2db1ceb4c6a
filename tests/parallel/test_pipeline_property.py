"""Any layers, batch and schedule: losses and gradients are the plain model's."""

from __future__ import annotations

from typing import Any

import torch
from ddp_models import noise, seeded
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from phalanx import Backend, Pipeline, PipelineParallelConfig, simulate
from phalanx.pipeline import PipelineStage
from phalanx.pipeline.schedules import SCHEDULES


class Fork(nn.Module):
    """One tensor in, a tuple out: the second part has another shape, and a dtype of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> tuple[Tensor, list[Any]]:
        return x, [self.linear(x.double()), None, (x > 0).sum(1)]


class Join(nn.Module):
    """A tuple in, one tensor out; the count needs no gradient."""

    def forward(self, given: tuple[Tensor, list[Any]]) -> Tensor:
        x, (y, nothing, count) = given
        assert nothing is None
        return x + y.float().sum(1, keepdim=True) + count[:, None]


def layer(kind: str, width: int, next_width: int) -> list[nn.Module]:
    if kind == "fork":
        return [Fork(width), Join(), nn.Linear(width, next_width)]
    if kind == "in place":
        return [nn.Linear(width, next_width), nn.ReLU(inplace=True)]
    if kind == "frozen":
        return [nn.Linear(width, next_width).requires_grad_(False)]
    return [nn.Linear(width, next_width), nn.Tanh()]


@st.composite
def tasks(draw: Any) -> Any:
    kinds = draw(
        st.lists(st.sampled_from(["fork", "in place", "frozen", "plain"]), min_size=3, max_size=6)
    )
    widths = [draw(st.integers(1, 5)) for _ in range(len(kinds) + 1)]

    def build() -> nn.Sequential:
        layers = [
            part
            for kind, width, following in zip(kinds, widths, widths[1:], strict=False)
            for part in layer(kind, width, following)
        ]
        return nn.Sequential(*layers, nn.Linear(widths[-1], 2))

    count = len(build())
    schedule = draw(st.sampled_from(list(SCHEDULES)))
    row = SCHEDULES[schedule]
    stages = draw(st.integers(1, min(4, count // row.chunks)))
    most = count // stages if row.more_chunks else row.chunks
    chunks = draw(st.integers(row.chunks, most))
    micro_batches = draw(st.integers(1, 7))
    rows = [draw(st.integers(micro_batches, 12)) for _ in range(3)]
    cuts = sorted(
        draw(
            st.lists(
                st.integers(1, count - 1),
                min_size=stages * chunks - 1,
                max_size=stages * chunks - 1,
                unique=True,
            )
        )
    )
    ends = zip([0, *cuts], [*cuts, count], strict=True)
    split = [PipelineStage(start, end, n) for n, (start, end) in enumerate(ends)]
    config = PipelineParallelConfig(stages, micro_batches, schedule, chunks)
    return build, widths[0], rows, config, split, draw(st.integers(0, 99))


@settings(max_examples=15)
@given(task=tasks())
def test_losses_and_gradients_are_the_plain_model_s(task: Any) -> None:
    build, width, rows, config, split, seed = task
    batches = [(noise(n, width, seed=seed + n), noise(n, 2, seed=seed)) for n in rows]
    plain, losses = seeded(build, seed), []
    for inputs, targets in batches:
        loss = F.mse_loss(plain(inputs), targets)
        loss.backward()
        losses.append(loss.item())

    def run(backend: Backend) -> list[float]:
        pipeline = Pipeline(seeded(build, seed), backend, config, stages=split)
        found = [pipeline.train_step(*given, F.mse_loss).item() for given in batches]
        for name, parameter in pipeline.named_parameters():
            expected = plain.get_parameter(name).grad
            if expected is None:
                assert parameter.grad is None, name
            else:
                torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-5)
        return found

    for found in simulate(run, config.num_stages, seed):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-4, atol=1e-5)
