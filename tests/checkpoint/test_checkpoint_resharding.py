"""What any number of ranks saved, split in any way, any other number loads, split otherwise."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_runs import (
    MEMORY,
    Mixed,
    adamw,
    assert_same,
    cut_like,
    load_plain,
    plain_after,
    save_sharded,
    state_of,
    trained,
)
from flat_shards import FlatShards, step_with
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import phalanx
from phalanx import DDP, Backend, load_checkpoint, save_checkpoint
from phalanx.checkpoint.tensor_files import BLOCK


def plain(model: nn.Module, backend: Backend) -> nn.Module:
    return model


def halves(model: nn.Module, backend: Backend) -> nn.Module:
    return FlatShards(model, backend, shards=max(1, backend.world_size // 2))


WAYS: dict[str, Any] = {"plain": plain, "ddp": DDP, "sharded": FlatShards, "hybrid": halves}


@pytest.mark.checkered
@pytest.mark.parametrize("after", [1, 3, 8])
@pytest.mark.parametrize("before", [1, 2, 5, 8])
def test_a_sharded_model_goes_on_with_any_number_of_ranks(
    before: int, after: int, folder: Path
) -> None:
    whole, next_whole = plain_after(2), plain_after(3)
    phalanx.simulate(save_sharded(folder, 2), before)

    def go_on(backend: Backend) -> None:
        model = FlatShards(Mixed(seed=backend.rank), backend)
        optimizer = adamw(model)
        loaded = load_checkpoint(folder, model=model, optimizer=optimizer)
        assert (loaded.step, loaded.world_size) == (2, before)
        assert_same(state_of(model, optimizer), cut_like(model, whole))
        step_with(model, optimizer, 2)
        assert_same(state_of(model, optimizer), cut_like(model, next_whole))

    phalanx.simulate(go_on, after)


@pytest.mark.checkered
@pytest.mark.parametrize("into", WAYS)
@pytest.mark.parametrize("saved", WAYS)
def test_a_model_goes_on_with_another_strategy(saved: str, into: str, folder: Path) -> None:
    whole = plain_after(2)

    def save(backend: Backend) -> None:
        model = WAYS[saved](Mixed(), backend)
        save_checkpoint(folder, model=model, optimizer=trained(model), step=2, backend=backend)

    def load(backend: Backend) -> None:
        model = WAYS[into](Mixed(seed=backend.rank + 1), backend)
        optimizer = adamw(model)
        load_checkpoint(folder, model=model, optimizer=optimizer, backend=backend)
        mine = cut_like(model, whole) if isinstance(model, FlatShards) else whole
        assert_same(state_of(model, optimizer), mine)

    phalanx.simulate(save, 4)
    phalanx.simulate(load, 3 if into != "hybrid" else 6)


@pytest.mark.parametrize("optimizer_of", ["sgd", "momentum", "adam", "adamw", "nadam", "groups"])
def test_every_elementwise_optimizer_keeps_its_state(optimizer_of: str, folder: Path) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        named = list(model.named_parameters())
        trained_ones = [parameter for _, parameter in named]
        first, second = trained_ones[::2], trained_ones[1::2]
        makers: dict[str, Any] = {
            "sgd": lambda: torch.optim.SGD(trained_ones, lr=0.1),
            "momentum": lambda: torch.optim.SGD(trained_ones, lr=0.1, momentum=0.9, nesterov=True),
            "adam": lambda: torch.optim.Adam(trained_ones, lr=0.1, amsgrad=True),
            "adamw": lambda: torch.optim.AdamW(trained_ones, lr=0.1),
            "nadam": lambda: torch.optim.NAdam(trained_ones, lr=0.1),
            "groups": lambda: torch.optim.AdamW(
                [{"params": first}, {"params": second, "lr": 0.2, "weight_decay": 0.0}], lr=0.1
            ),
        }
        return makers[optimizer_of]()  # type: ignore[no-any-return]

    reference = Mixed()
    whole = state_of(reference, trained(reference, make, steps=3))

    def save(backend: Backend) -> None:
        model = FlatShards(Mixed(), backend)
        save_checkpoint(folder, model=model, optimizer=trained(model, make), step=2)

    def load(backend: Backend) -> None:
        model = FlatShards(Mixed(seed=5), backend)
        optimizer = make(model)
        for group in optimizer.param_groups:
            group["lr"] = 77.0  # the one that was saved counts
        load_checkpoint(folder, model=model, optimizer=optimizer)
        step_with(model, optimizer, 2)
        assert_same(state_of(model, optimizer), cut_like(model, whole))

    phalanx.simulate(save, 3)
    phalanx.simulate(load, 2)


def test_tied_parameters_are_one_under_both_names(folder: Path) -> None:
    phalanx.simulate(save_sharded(folder, 1), 3)
    model = Mixed(seed=4)
    load_checkpoint(folder, model=model)
    state = model.state_dict()
    assert model.head.weight is model.embed.weight
    assert torch.equal(state["head.weight"], state["embed.weight"])
    assert torch.equal(state["embed.weight"], plain_after(1)["model.embed.weight"])


def test_a_model_whose_parameters_are_no_longer_tied_gets_both(folder: Path) -> None:
    save_checkpoint(folder, model=Mixed(), step=0)
    untied = Mixed(seed=3)
    untied.head.weight = nn.Parameter(torch.zeros(7, 3))
    load_checkpoint(folder, model=untied)
    assert torch.equal(untied.head.weight, Mixed().embed.weight)
    assert torch.equal(untied.embed.weight, Mixed().embed.weight)


def test_a_model_no_longer_tied_gets_both_also_whole_blocks_of_them(folder: Path) -> None:
    """Blocks that are read straight into one of the tensors are the other's, too."""

    def make(value: float) -> nn.Module:
        model = nn.Module()
        for name in ("one", "other"):
            elements = 5 * BLOCK // 8  # two and a half blocks
            model.register_parameter(name, nn.Parameter(torch.full((elements,), value)))
        return model

    saved = make(3.0)
    saved.other = saved.one
    save_checkpoint(folder, model=saved, step=0)
    untied = make(0.0)
    load_checkpoint(folder, model=untied)
    assert torch.equal(untied.one, saved.one)
    assert torch.equal(untied.other, saved.one)


def test_buffers_are_those_of_rank_0(folder: Path) -> None:
    def save(backend: Backend) -> None:
        model = FlatShards(Mixed(), backend)
        model.module.get_buffer("mask").fill_(backend.rank == 0)
        model.module.get_buffer("scratch").fill_(5.0)
        save_checkpoint(folder, model=model, step=1)

    phalanx.simulate(save, 3)
    model = Mixed(seed=1)
    scratch = model.get_buffer("scratch").clone()
    load_checkpoint(folder, model=model)
    assert model.get_buffer("mask").all()
    assert torch.equal(model.get_buffer("scratch"), scratch)


def test_gradients_and_requires_grad_are_left_alone(folder: Path) -> None:
    save_checkpoint(folder, model=Mixed(), step=0)
    model = Mixed(seed=2)
    before = {name: (id(p), p.requires_grad) for name, p in model.named_parameters()}
    load_checkpoint(folder, model=model)
    assert {name: (id(p), p.requires_grad) for name, p in model.named_parameters()} == before
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_of_several_wrapped_parts_is_saved_by_its_plain_names(folder: Path) -> None:
    class Both(nn.Module):
        def __init__(self, backend: Backend, seed: int) -> None:
            super().__init__()
            self.one: nn.Module = FlatShards(Mixed(seed), backend)
            self.two: nn.Module = DDP(nn.Linear(2, 2), backend)

    def run(backend: Backend) -> None:
        model = Both(backend, seed=0)
        save_checkpoint(folder, model=model, step=1)
        other = Both(backend, seed=8)
        load_checkpoint(folder, model=other)
        assert torch.equal(other.two.module.weight, model.two.module.weight)  # type: ignore[union-attr]
        for mine, theirs in zip(
            model.one.named_parameters(), other.one.named_parameters(), strict=True
        ):
            assert mine[0] == theirs[0]
            assert torch.equal(mine[1], theirs[1])

    phalanx.simulate(run, 2)
    plain = nn.Module()
    plain.one, plain.two = Mixed(seed=3), nn.Linear(2, 2)
    load_checkpoint(folder, model=plain)


def test_what_modules_keep_beside_tensors_comes_back(folder: Path) -> None:
    class Counter(nn.Linear):
        seen: Any = 0

        def get_extra_state(self) -> Any:
            return self.seen

        def set_extra_state(self, state: Any) -> None:
            self.seen = state

    model = nn.Sequential(Counter(1, 1))
    model[0].seen = {"batches": 7, "last": torch.arange(3)}
    save_checkpoint(folder, model=model, step=1)
    other = nn.Sequential(Counter(1, 1))
    load_checkpoint(folder, model=other)
    assert other[0].seen["batches"] == 7
    assert other[0].seen["last"].tolist() == [0, 1, 2]


def test_a_checkpoint_is_whole_without_a_backend(folder: Path) -> None:
    phalanx.simulate(save_sharded(folder, 2), 4)
    assert_same(load_plain(folder), plain_after(2))


class Plain(nn.Module):
    """Parameters and a buffer of given sizes."""

    def __init__(self, sizes: list[tuple[int, ...]], seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for number, size in enumerate(sizes):
            dtype = [torch.float32, torch.float64, torch.bfloat16][number % 3]
            values = torch.randn(size, generator=generator).to(dtype)
            self.register_parameter(f"w{number}", nn.Parameter(values))
        self.register_buffer("count", torch.tensor(seed))


SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=6)
SPLITS = st.tuples(st.integers(1, 5), st.integers(1, 2), st.booleans())


@settings(max_examples=15)
@given(SHAPES, SPLITS, SPLITS)
def test_any_split_of_any_parameters_becomes_any_other(
    shapes: list[tuple[int, ...]], before: tuple[int, int, bool], after: tuple[int, int, bool]
) -> None:
    reference = Plain(shapes, seed=1)
    whole = state_of(reference, trained(reference))

    def split(seed: int, how: tuple[int, int, bool], backend: Backend) -> FlatShards:
        return FlatShards(Plain(shapes, seed), backend, how[0], joined=how[2])

    def save(backend: Backend) -> None:
        model = split(1, before, backend)
        save_checkpoint(folder, model=model, optimizer=trained(model), step=2)

    def load(backend: Backend) -> None:
        model = split(2, after, backend)
        optimizer = adamw(model)
        load_checkpoint(folder, model=model, optimizer=optimizer)
        assert_same(state_of(model, optimizer), cut_like(model, whole))

    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        phalanx.simulate(save, before[0] * before[1])
        phalanx.simulate(load, after[0] * after[1])
