"""LocalSGD and DiLoCo in checkpoints and state dicts: ranks have different parameters there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from clusters import Cluster
from torch import Tensor, nn

from phalanx import (
    DDP,
    FSDP,
    Backend,
    DiLoCo,
    ErrorFeedback,
    LocalSGD,
    PowerSGD,
    Quantized,
    SizeMismatchError,
    TopK,
    load_checkpoint,
    save_checkpoint,
    simulate,
)
from phalanx.parallel.local_sgd.periodic import PeriodicSync

EVERY = 3


def nesterov(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def outer_adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01, eps=1e-3)


Make = Callable[[nn.Module, Backend], PeriodicSync]
KINDS: dict[str, Make] = {
    "local sgd": lambda m, b: LocalSGD(m, b, every=EVERY),
    "start after": lambda m, b: LocalSGD(m, b, every=EVERY, start_after=4),
    "local sgd, top-k": lambda m, b: LocalSGD(m, b, every=EVERY, compression=TopK(0.1)),
    "local sgd, PowerSGD": lambda m, b: LocalSGD(
        m, b, every=EVERY, start_after=2, compression=PowerSGD(1)
    ),
    "diloco": lambda m, b: DiLoCo(m, b, every=EVERY, outer=nesterov),
    "diloco, adam": lambda m, b: DiLoCo(m, b, every=EVERY, outer=outer_adam),
    "diloco, 4 bits": lambda m, b: DiLoCo(
        m, b, every=EVERY, outer=nesterov, compression=ErrorFeedback(Quantized(4, block=8))
    ),
}
ALL = list(KINDS)
FEW = ["local sgd", "local sgd, top-k", "diloco, 4 bits"]


def plain(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))


def made(
    backend: Backend, kind: str, module: nn.Module | None = None, *, nested: bool = False
) -> tuple[nn.Module, PeriodicSync, torch.optim.Optimizer]:
    wrapper = KINDS[kind](module if module is not None else plain(), backend)
    optimizer = torch.optim.AdamW(wrapper.parameters(), lr=0.05, eps=1e-3)
    return (nn.ModuleDict({"net": wrapper}) if nested else wrapper), wrapper, optimizer


def train(wrapper: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int) -> None:
    for step in steps:
        draw = torch.Generator().manual_seed(100 * step + rank)
        optimizer.zero_grad()
        wrapper(torch.randn(4, 6, generator=draw)).pow(2).sum().backward()
        optimizer.step()


def state(wrapper: PeriodicSync) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in wrapper.state_dict().items()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize(
    ("kind", "saved_at"),
    [*((kind, 2) for kind in ALL), *((kind, at) for kind in FEW for at in (3, 4))],
)
def test_as_many_ranks_go_on_bit_for_bit(kind: str, saved_at: int, tmp_path: Path):
    """Just before, at, and after a sync; each rank with its own parameters and AdamW."""
    nested = saved_at == 4

    def whole(backend: Backend):
        _, wrapper, optimizer = made(backend, kind)
        train(wrapper, optimizer, range(8), backend.rank)
        return state(wrapper)

    def save(backend: Backend):
        model, wrapper, optimizer = made(backend, kind, nested=nested)
        train(wrapper, optimizer, range(saved_at), backend.rank)
        save_checkpoint(tmp_path, model=model, optimizer=optimizer, step=saved_at)
        train(wrapper, optimizer, range(saved_at, 8), backend.rank)
        return state(wrapper)

    def resume(backend: Backend):
        model, wrapper, optimizer = made(backend, kind, plain(9), nested=nested)
        load_checkpoint(tmp_path, model=model, optimizer=optimizer)
        train(wrapper, optimizer, range(saved_at, 8), backend.rank)
        return state(wrapper)

    undisturbed, saved, resumed = (simulate(run, 3) for run in (whole, save, resume))
    for rank in range(3):
        assert_same(saved[rank], undisturbed[rank])  # to save changes nothing
        assert_same(resumed[rank], undisturbed[rank])


def test_they_do_on_every_kind_of_backend(cluster: Cluster, tmp_path: Path):
    kind = "diloco, 4 bits"
    modules = [plain(seed) for seed in range(4)]

    def save(backend: Backend):
        model, wrapper, optimizer = made(backend, kind, modules[backend.rank])
        train(wrapper, optimizer, range(2), backend.rank)
        save_checkpoint(tmp_path, model=model, optimizer=optimizer, step=2)
        train(wrapper, optimizer, range(2, 5), backend.rank)
        return state(wrapper)

    def resume(backend: Backend):
        model, wrapper, optimizer = made(backend, kind, modules[2 + backend.rank])
        load_checkpoint(tmp_path, model=model, optimizer=optimizer)
        train(wrapper, optimizer, range(2, 5), backend.rank)
        return state(wrapper)

    for one, other in zip(cluster.run(save, 2), cluster.run(resume, 2), strict=True):
        assert_same(one, other)


def save_two_ranks(kind: str, folder: Path, steps: int = 2) -> list[dict[str, Tensor]]:
    def run(backend: Backend):
        model, wrapper, optimizer = made(backend, kind)
        train(wrapper, optimizer, range(steps), backend.rank)
        save_checkpoint(folder, model=model, optimizer=optimizer, step=steps)
        return state(wrapper)

    return list(simulate(run, 2))


def mean_of(states: list[dict[str, Tensor]], name: str) -> Tensor:
    return torch.stack([each[name] for each in states]).mean(0)


@pytest.mark.checkered
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("kind", FEW)
def test_another_number_of_ranks_begins_from_the_mean_and_synchronizes_as_soon(
    kind: str, ranks: int, tmp_path: Path
):
    saved = save_two_ranks(kind, tmp_path)

    def load(backend: Backend):
        model, wrapper, optimizer = made(backend, kind, plain(9))
        load_checkpoint(tmp_path, model=model, optimizer=optimizer)
        loaded = state(wrapper)
        train(wrapper, optimizer, range(2, 3), backend.rank)
        assert (wrapper.steps, wrapper.meetings) == (3, 1)
        wrapper.sync()
        return loaded, state(wrapper)

    found = simulate(load, ranks)
    for loaded, after in found:
        for name, value in plain().state_dict().items():
            if value.is_floating_point():
                torch.testing.assert_close(loaded[name], mean_of(saved, name))
            assert torch.equal(after[name], found[0][1][name])
        for name, value in loaded.items():
            if name.startswith("outer@all."):
                assert torch.equal(value, saved[0][name])


@pytest.mark.parametrize("kind", FEW)
def test_who_does_not_train_so_loads_the_mean(kind: str, tmp_path: Path):
    saved = save_two_ranks(kind, tmp_path)
    module = plain(9)
    load_checkpoint(tmp_path, model=module)
    for name, value in module.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(value, mean_of(saved, name))

    def load(backend: Backend) -> None:
        for wrap in (DDP, FSDP):
            model = wrap(plain(9), backend)
            optimizer = torch.optim.AdamW(model.parameters())
            load_checkpoint(tmp_path, model=model, optimizer=optimizer)

    simulate(load, 2)


@pytest.mark.parametrize("kind", FEW)
def test_what_ddp_has_saved_begins_a_new_period(kind: str, tmp_path: Path):
    def save(backend: Backend) -> None:
        model = DDP(plain(5), backend)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3)
        train(model, optimizer, range(2), 0)
        save_checkpoint(tmp_path, model=model, optimizer=optimizer, step=2)

    def load(backend: Backend):
        model, wrapper, optimizer = made(backend, kind)
        train(wrapper, optimizer, range(2), backend.rank)
        load_checkpoint(tmp_path, model=model, optimizer=optimizer)
        began = {name: p.detach().clone() for name, p in wrapper.named_parameters()}
        train(wrapper, optimizer, range(2), backend.rank)
        assert wrapper.meetings == 0
        if isinstance(wrapper, DiLoCo):
            for name, value in began.items():
                assert torch.equal(wrapper.own_state()[f"outer@all.parameter.{name}"], value)
        train(wrapper, optimizer, range(2, 3), backend.rank)
        assert wrapper.meetings == 1
        wrapper.sync()
        return {name: p.detach().clone() for name, p in wrapper.named_parameters()}

    simulate(save, 2)
    one, other = simulate(load, 2)
    assert_same(one, other)


def test_a_rank_that_is_a_step_behind_is_saved_too(tmp_path: Path):
    """Rank 0 has taken no step since the last sync, rank 1 one: their outer copies stay alike."""

    def run(backend: Backend, resume: bool):
        model, wrapper, _ = made(backend, "diloco")
        optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.05, momentum=0.9)
        if resume:
            load_checkpoint(tmp_path, model=model, optimizer=optimizer)
        else:
            train(wrapper, optimizer, range(3 + backend.rank), backend.rank)
            save_checkpoint(tmp_path, model=model, optimizer=optimizer, step=3)
        train(wrapper, optimizer, range(9, 12 - backend.rank), backend.rank)
        return {name: p.detach().clone() for name, p in wrapper.named_parameters()}

    saved, resumed = (simulate(lambda b, r=resume: run(b, r), 2) for resume in (False, True))
    for rank in range(2):
        assert_same(saved[rank], saved[0])
        assert_same(resumed[rank], saved[0])


# State dicts -----------------------------------------------------------------------------------


@pytest.mark.checkered
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", FEW)
def test_each_rank_s_state_dict_is_enough_for_it(kind: str, nested: bool):
    def save(backend: Backend):
        model, wrapper, optimizer = made(backend, kind, nested=nested)
        train(wrapper, optimizer, range(4), backend.rank)
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        train(wrapper, optimizer, range(4, 5), backend.rank)
        return saved, optimizer.state_dict()

    saved = simulate(save, 2)
    joined = {key: value for each, _ in saved for key, value in each.items()}

    def load(backend: Backend, given: dict[str, Tensor]):
        model, _, _ = made(backend, kind, plain(9), nested=nested)
        model.load_state_dict(given)
        return {name: value.clone() for name, value in model.state_dict().items()}

    for given in ([each for each, _ in saved], [joined, joined]):
        loaded = simulate(lambda b, given=given: load(b, given[b.rank]), 2)
        for rank in range(2):
            assert_same(loaded[rank], saved[rank][0])
    for found in simulate(lambda b: load(b, joined), 3):
        for name in (n for n in found if n.endswith("0.weight") and "@" not in n):
            mean = mean_of([each for each, _ in saved], name)
            torch.testing.assert_close(found[name], mean)


def test_the_state_of_another_model_is_refused_by_name():
    def run(backend: Backend) -> None:
        _, wrapper, _ = made(backend, "diloco")
        for key, words in (
            ("outer@all.parameter.0.weight", r"0.weight of shape \[2\], .* it has shape \[5, 6\]"),
            ("outer@all.state.momentum_buffer.9.weight", "9.weight .* it is not there"),
            ("local@0/1.value.0.weight", r"0.weight of shape \[2\] for one rank"),
        ):
            with pytest.raises(SizeMismatchError, match=words):
                wrapper.load_own_state({key: torch.zeros(2)})

    simulate(run, 1)


def test_a_plain_module_s_state_is_without():
    def run(backend: Backend) -> None:
        _, wrapper, optimizer = made(backend, "diloco")
        train(wrapper, optimizer, range(2), 0)
        assert wrapper.module.state_dict().keys() == plain().state_dict().keys()
        plain().load_state_dict(wrapper.state_dict(), strict=False)

    simulate(run, 1)
