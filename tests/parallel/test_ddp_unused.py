"""Parameters that a backward pass does not reach."""

from __future__ import annotations

import pytest
import torch
from ddp_models import Branches, noise, seeded
from ddp_runs import Gradients, assert_close, assert_same_bits, gradients, mean_of, outcome_of
from torch import nn

from phalanx import DDP, Backend, MisuseError, simulate

Plan = list[list[list[str]]]  # for each step, for each rank, the branches that it uses

PLANS: dict[str, Plan] = {
    "all used": [[["left", "right"]] * 3] * 3,
    "one on no rank": [[["left"]] * 3] * 3,
    "one on rank 0 only": [[["left", "right"], ["left"], ["left"]]] * 3,
    "one on rank 2 only": [[["left"], ["left"], ["left", "right"]]] * 3,
    "another on each rank": [[["left"], ["right"], []]] * 3,
    "none on any rank": [[[], [], []]] * 3,
    "another in each step": [[["left"]] * 3, [["right"]] * 3, [["left", "right"]] * 3],
    "first everywhere, then here and there": [
        [["left", "right"]] * 3,
        [["left"], ["right"], ["left", "right"]],
        [["right"], [], ["right"]],
    ],
}


def step(model: nn.Module, rank: int, number: int, names: list[str]) -> None:
    model(noise(4, 6, seed=10 * number + rank), *names).pow(2).sum().backward()


@pytest.mark.checkered
@pytest.mark.parametrize("bucket_size", [1, 1 << 20])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_unused_parameters_count_as_zeros_and_stay_none_where_no_rank_used_them(
    plan: Plan, seed: int, bucket_size: int
):
    def run(backend: Backend) -> list[Gradients]:
        ddp = DDP(seeded(Branches), backend, bucket_size=bucket_size, find_unused_parameters=True)
        found = []
        for number, names in enumerate(plan):
            ddp.zero_grad()
            step(ddp, backend.rank, number, names[backend.rank])
            found.append(gradients(ddp))
        return found

    ranks = list(simulate(run, 3, seed))
    for number, names in enumerate(plan):
        plain = [seeded(Branches) for _ in range(3)]
        for rank, model in enumerate(plain):
            step(model, rank, number, names[rank])
        assert_close(ranks[0][number], mean_of([gradients(model) for model in plain]))
        assert_same_bits([found[number] for found in ranks])


def test_an_unused_parameter_is_not_moved_by_the_optimizer():
    def run(backend: Backend) -> bool:
        ddp = DDP(seeded(Branches), backend, find_unused_parameters=True)
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.1, weight_decay=0.5)
        before = ddp.module.right.weight.detach().clone()
        for number in range(3):
            optimizer.zero_grad()
            step(ddp, backend.rank, number, ["left"])
            optimizer.step()
        return torch.equal(before, ddp.module.right.weight)

    assert list(simulate(run, 2)) == [True, True]


def test_gradients_of_earlier_passes_are_kept_where_a_later_one_does_not_reach():
    plan = [[["left", "right"], ["left"]], [["left"], ["left"]], [["right"], ["left"]]]

    def run(backend: Backend) -> Gradients:
        ddp = DDP(seeded(Branches), backend, find_unused_parameters=True)
        for number, names in enumerate(plan):
            step(ddp, backend.rank, number, names[backend.rank])
        return gradients(ddp)

    plain = [seeded(Branches) for _ in range(2)]
    for rank, model in enumerate(plain):
        for number, names in enumerate(plan):
            step(model, rank, number, names[rank])
    for found in simulate(run, 2):
        assert_close(found, mean_of([gradients(model) for model in plain]))


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("culprits", ["one rank", "every rank"])
def test_without_find_unused_parameters_the_error_names_them_on_every_rank_at_once(
    world_size: int, culprits: str
):
    def run(backend: Backend) -> BaseException | None:
        ddp = DDP(seeded(Branches), backend, broadcast_buffers=False)
        step(ddp, backend.rank, 0, ["left", "right"])
        ddp.zero_grad()
        backend.barrier()  # all ranks are past what came before
        odd = culprits == "every rank" or backend.rank == world_size - 1
        names = ["left"] if odd else ["left", "right"]
        return outcome_of(lambda: step(ddp, backend.rank, 1, names))

    for error in simulate(run, world_size):
        assert isinstance(error, MisuseError)
        assert "right.weight" in str(error)
        assert "right.bias" in str(error)
        assert "left" not in str(error)
        assert "find_unused_parameters" in str(error)


def test_many_unused_parameters_are_counted_not_listed():
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Linear(6, 2)
            self.unused = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(40))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    def run(backend: Backend) -> None:
        DDP(Wide(), backend)(torch.ones(1, 6)).sum().backward()

    with pytest.raises(MisuseError, match=r"unused\.\d+\.weight.* and 30 more"):
        simulate(run, 2)


def test_a_loss_that_depends_on_no_parameter_is_an_error_that_names_them():
    class Passes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    def run(backend: Backend) -> None:
        ddp = DDP(Passes(), backend)
        ddp(torch.ones(2, requires_grad=True)).sum().backward()

    with pytest.raises(MisuseError, match="scale"):
        simulate(run, 2)


def test_a_loss_that_depends_on_no_parameter_on_one_rank_counts_as_zeros():
    plan = [["left"], None]

    def loss(model: nn.Module, rank: int) -> torch.Tensor:
        x = noise(4, 6, seed=rank).requires_grad_()
        return model(x, "left").pow(2).sum() * (0.0 if plan[rank] is None else 1.0)

    def run(backend: Backend) -> Gradients:
        ddp = DDP(seeded(Branches), backend, find_unused_parameters=True)
        loss(ddp, backend.rank).backward()
        return gradients(ddp)

    plain = [seeded(Branches) for _ in range(2)]
    for rank, model in enumerate(plain):
        loss(model, rank).backward()
    for found in simulate(run, 2):
        assert_close(found, mean_of([gradients(model) for model in plain]))


def test_a_loss_without_a_graph_is_torch_s_own_error_and_training_goes_on():
    def run(backend: Backend) -> Gradients:
        ddp = DDP(seeded(Branches), backend)
        with pytest.raises(RuntimeError, match="does not require grad"):
            ddp(torch.ones(2, 6), "left", "right").detach().sum().backward()
        step(ddp, backend.rank, 0, ["left", "right"])
        return gradients(ddp)

    assert_same_bits(list(simulate(run, 2)))
