"""FSDP's checkpoints: saved with one strategy and number of ranks, gone on with in another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_runs import ONE_AT_A_TIME, assert_same, state_of
from clusters import Cluster, Cooperative, Hybrid, SharedMemory
from flat_shards import shard_of
from safetensors.torch import load_file
from torch import Tensor, nn

from phalanx import DDP, FSDP, Backend, ShardingStrategy, load_checkpoint, save_checkpoint

ROWS = 24  # of each batch, all ranks together: as many on each of 1, 2, 3, 4, 6 or 8
STRATEGIES: dict[str, ShardingStrategy] = {
    "full_shard": ShardingStrategy.FULL_SHARD,
    "shard_grad_op": ShardingStrategy.SHARD_GRAD_OP,
    "no_shard": ShardingStrategy.NO_SHARD,
    "hybrid": ShardingStrategy.hybrid(intra_node_size=2),
}


class Tied(nn.Module):
    """An embedding that is the output layer, too; frozen parts; sizes that do not divide."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with ONE_AT_A_TIME:
            torch.manual_seed(seed)
            self.embed = nn.Embedding(7, 5)
            self.body = nn.Sequential(nn.Linear(5, 11), nn.Tanh(), nn.Linear(11, 5))
            self.frozen = nn.Linear(5, 5)
            self.head = nn.Linear(5, 7)
        self.frozen.requires_grad_(False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.frozen(self.body(self.embed(tokens))) * self.scale)


def way(name: str) -> Callable[[nn.Module, Backend], nn.Module]:
    if name == "plain":
        return lambda module, backend: module
    if name == "ddp":
        return DDP
    return lambda module, backend: FSDP(module, backend, strategy=STRATEGIES[name])


def adam(model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.Adam(trained, lr=0.01, eps=1e-3)


def train(model: nn.Module, optimizer: Any, first: int, last: int, rank: int, ranks: int) -> None:
    mine = slice(rank * ROWS // ranks, (rank + 1) * ROWS // ranks)
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        tokens, targets = torch.randint(7, (2, ROWS), generator=generator)[:, mine]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens), targets).backward()
        optimizer.step()


def stretch(folder: Path, how: str, first: int, last: int) -> Callable[[Backend], None]:
    """Go on from step `first`, save after step `last`, and check what was saved."""

    def run(backend: Backend) -> None:
        model = way(how)(Tied(seed=first), backend)
        optimizer = adam(model)
        rank, ranks = (backend.rank, backend.world_size) if how != "plain" else (0, 1)
        if first > 0:
            assert (
                load_checkpoint(folder, model=model, optimizer=optimizer, backend=backend).step
                == first
            )
        train(model, optimizer, first, last, rank, ranks)
        saved = save_checkpoint(
            folder, model=model, optimizer=optimizer, step=last, backend=backend
        )
        before = state_of(model, optimizer)
        other = way(how)(Tied(seed=99), backend)
        fresh = adam(other)
        load_checkpoint(saved.folder, model=other, optimizer=fresh, backend=backend)
        assert_same(state_of(other, fresh), before)
        if isinstance(other, FSDP):
            full = other.full_state_dict()
            assert torch.equal(full["head.weight"], full["embed.weight"])
            for name, part in other.slices().items():
                mine = dict(other.named_parameters())[name].detach().reshape(-1)
                assert torch.equal(shard_of(full[name], part), mine)

    return run


def check_like_plain_training(folder: Path, steps: int) -> None:
    reference, loaded = Tied(seed=0), Tied(seed=5)
    train(reference, adam(reference), 0, steps, 0, 1)
    assert load_checkpoint(folder, model=loaded).step == steps
    torch.testing.assert_close(loaded.state_dict(), reference.state_dict())


ROUTES = [
    [("full_shard", 3), ("shard_grad_op", 2), ("no_shard", 4), ("hybrid", 4), ("full_shard", 1)],
    [("hybrid", 6), ("full_shard", 4), ("plain", 1), ("shard_grad_op", 3), ("ddp", 2)],
    [("ddp", 3), ("full_shard", 8), ("hybrid", 2), ("no_shard", 3), ("shard_grad_op", 6)],
]


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route[0][0])
def test_training_goes_on_over_strategies_and_numbers_of_ranks(
    route: list[tuple[str, int]], folder: Path
) -> None:
    for first, (how, ranks) in enumerate(route):
        Cooperative().run(stretch(folder, how, first, first + 1), ranks)
    check_like_plain_training(folder, len(route))


@pytest.mark.parametrize("shared", [SharedMemory(), Hybrid()], ids=lambda shared: shared.name)
def test_parameters_that_ranks_share_are_loaded_for_all_of_them(
    shared: Cluster, folder: Path
) -> None:
    for first, (how, ranks) in enumerate([("full_shard", 3), ("hybrid", 2), ("shard_grad_op", 2)]):
        shared.run(stretch(folder, how, first, first + 1), ranks)
    check_like_plain_training(folder, 3)


def test_without_shards_plain_tools_read_whole_tensors(folder: Path) -> None:
    Cooperative().run(stretch(folder, "no_shard", 0, 1), 2)
    tensors: dict[str, Tensor] = {}
    for path in (folder / "000001-step-1").glob("model-*"):
        tensors |= load_file(path)
    reference = Tied(seed=0)
    train(reference, adam(reference), 0, 1, 0, 1)
    assert tensors.keys() == {name for name in reference.state_dict() if name != "head.weight"}
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, reference.state_dict()[name])


def test_what_is_saved_in_the_background_is_not_what_is_trained_on(folder: Path) -> None:
    def run(backend: Backend) -> None:
        model = FSDP(Tied(seed=0), backend)
        optimizer = adam(model)
        train(model, optimizer, 0, 1, backend.rank, backend.world_size)
        pending = save_checkpoint(folder, model=model, optimizer=optimizer, step=1, async_save=True)
        train(model, optimizer, 1, 4, backend.rank, backend.world_size)
        pending.wait()

    SharedMemory().run(run, 2)
    check_like_plain_training(folder, 1)


def test_a_model_that_was_never_whole_on_a_rank_is_loaded_shard_by_shard(folder: Path) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))

    saved = make()
    save_checkpoint(folder, model=saved, step=1)

    def run(backend: Backend) -> None:
        with torch.device("meta"):
            module = make()
        model = FSDP(module, backend)
        load_checkpoint(folder, model=model)
        full = model.full_state_dict()
        for name, tensor in saved.state_dict().items():
            assert torch.equal(full[name], tensor)

    Cooperative().run(run, 3)
