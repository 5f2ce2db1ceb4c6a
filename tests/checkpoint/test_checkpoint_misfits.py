"""What does not fit is named before anything is written, or changed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_runs import Mixed, adamw, assert_same, small, state_of, trained
from flat_shards import FlatShards
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import phalanx
from phalanx import (
    DDP,
    Backend,
    CheckpointError,
    CheckpointMismatchError,
    MisuseError,
    UnsupportedObjectError,
    load_checkpoint,
    save_checkpoint,
)


def with_layer(model: nn.Sequential) -> nn.Module:
    return model.append(nn.Linear(2, 2))


def wider(model: nn.Sequential) -> nn.Module:
    model[1] = nn.Linear(4, 3)
    return model


def in_double(model: nn.Sequential) -> nn.Module:
    model[1].double()
    return model


MISFITS: dict[str, tuple[Callable[[Any], nn.Module], str]] = {
    "missing": (with_layer, r"it has no 2\.weight, 2\.bias, which the model has"),
    "unexpected": (lambda model: model[:1], r"no place for 1\.weight, 1\.bias"),
    "shape": (wider, r"1\.weight is float32 \[2, 4\] there and float32 \[3, 4\] here"),
    "dtype": (in_double, r"1\.weight is float32 \[2, 4\] there and float64 \[2, 4\] here"),
}


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("misfit", MISFITS)
def test_a_model_that_does_not_fit_is_named_and_left_as_it_was(
    misfit: str, ranks: int, folder: Path
) -> None:
    change, problem = MISFITS[misfit]
    saved = small()
    save_checkpoint(folder, model=saved, optimizer=trained(saved), step=1)

    def load(backend: Backend) -> None:
        model = FlatShards(change(small(seed=2)), backend)
        optimizer = trained(model, steps=1)
        before, states = state_of(model, optimizer), torch.get_rng_state()
        with pytest.raises(CheckpointMismatchError, match=problem):
            load_checkpoint(folder, model=model, optimizer=optimizer)
        assert_same(state_of(model, optimizer), before)
        assert torch.equal(torch.get_rng_state(), states)

    phalanx.simulate(load, ranks)


def test_an_optimizer_that_does_not_fit_is_refused(folder: Path) -> None:
    saved = small()
    save_checkpoint(folder, model=saved, optimizer=trained(saved), step=1)
    model = small()
    cases = {
        "AdamW, and the one here SGD": torch.optim.SGD(model.parameters()),
        r"no place for the optimizer's 1\.weight, the optimizer's 1\.bias": torch.optim.AdamW(
            model[0].parameters()  # type: ignore[index]
        ),
    }
    for problem, optimizer in cases.items():
        with pytest.raises(CheckpointMismatchError, match=problem):
            load_checkpoint(folder, model=model, optimizer=optimizer)
    stranger = torch.optim.AdamW(small().parameters())
    with pytest.raises(MisuseError, match="is not one of the model's"):
        load_checkpoint(folder, model=model, optimizer=stranger)
    with pytest.raises(MisuseError, match="give model="):
        load_checkpoint(folder, optimizer=stranger)
    save_checkpoint(folder, model=saved, step=2)
    with pytest.raises(CheckpointMismatchError, match="saved without an optimizer"):
        load_checkpoint(folder, model=model, optimizer=adamw(model))


def test_groups_may_be_put_together_anew_unless_their_options_differed(folder: Path) -> None:
    def grouped(model: Any, lr: float) -> torch.optim.Optimizer:
        groups = [{"params": [*layer.parameters()]} for layer in model]
        groups[1]["lr"] = lr
        return torch.optim.AdamW(groups, lr=0.1)

    for lr in (0.1, 0.2):
        saved = small()
        save_checkpoint(folder, model=saved, optimizer=grouped(saved, lr), step=1)
        model = small()
        optimizer = torch.optim.AdamW(reversed(list(model.parameters())))
        if lr == 0.1:
            load_checkpoint(folder, model=model, optimizer=optimizer)
            assert optimizer.param_groups[0]["lr"] == lr
        else:
            with pytest.raises(CheckpointMismatchError, match="had other options"):
                load_checkpoint(folder, model=model, optimizer=optimizer)


def test_state_that_cannot_be_cut_is_loaded_as_it_was_saved_or_not_at_all(folder: Path) -> None:
    def adafactor(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(model.parameters(), lr=0.1)

    model = small()
    optimizer = trained(model, adafactor)
    save_checkpoint(folder, model=model, optimizer=optimizer, step=2)
    other = small(seed=1)
    fresh = adafactor(other)
    load_checkpoint(folder, model=other, optimizer=fresh)
    assert_same(state_of(other, fresh), state_of(model, optimizer))

    def load(backend: Backend) -> None:
        sharded = FlatShards(small(), backend)
        with pytest.raises(CheckpointMismatchError, match=r"row_var of 0\.weight cannot be cut"):
            load_checkpoint(folder, model=sharded, optimizer=adafactor(sharded))

    phalanx.simulate(load, 2)


def test_state_that_only_looks_like_a_part_of_the_parameter_is_refused(folder: Path) -> None:
    """One number for each parameter, on a rank that holds one element of it and on one with two."""

    def save(backend: Backend) -> None:
        model = FlatShards(nn.Linear(3, 1, bias=False), backend)
        optimizer = torch.optim.SGD(model.parameters())
        for parameter in model.parameters():
            optimizer.state[parameter]["scale"] = torch.ones(1)
        save_checkpoint(folder, model=model, optimizer=optimizer, step=1)

    with pytest.raises(CheckpointMismatchError, match="scale of weight has the shape"):
        phalanx.simulate(save, 2)
    assert list(folder.iterdir()) == []


def test_lists_in_the_state_of_an_optimizer_come_back(folder: Path) -> None:
    def lbfgs_after(model: nn.Module, steps: int) -> torch.optim.Optimizer:
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(1, 3)).square().sum()
            loss.backward()
            return loss

        for _ in range(steps):
            optimizer.step(closure)  # type: ignore[arg-type]
        return optimizer

    model, other = small(), small(seed=5)
    optimizer, fresh = lbfgs_after(model, 2), lbfgs_after(other, 0)
    save_checkpoint(folder, model=model, optimizer=optimizer, step=2)
    load_checkpoint(folder, model=other, optimizer=fresh)
    mine, theirs = (next(iter(each.state.values()))["old_dirs"] for each in (optimizer, fresh))
    assert len(mine) == len(theirs) > 1
    assert all(map(torch.equal, mine, theirs))


def test_bad_requests_are_refused_before_anything_is_written(folder: Path) -> None:
    model = small()
    requests: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (MisuseError, "step must be 0 or more", {"step": -1}),
        (CheckpointError, "TypeError", {"step": 1.5}),
        (MisuseError, "keep must be 1 or more", {"keep": 0}),
        (UnsupportedObjectError, r"extra\.when\.1 is a set", {"extra": {"when": [1, {2}]}}),
        (MisuseError, "not one of the model's", {"optimizer": adamw(small())}),
        (
            phalanx.UnsupportedOperationError,
            "meta device",
            {"model": nn.Linear(1, 1, device="meta")},
        ),
    ]
    for kind, problem, request in requests:
        with pytest.raises(kind, match=problem):
            save_checkpoint(folder, **{"model": model, "step": 1, **request})
    assert list(folder.iterdir()) == []


def test_tensors_that_keep_their_elements_elsewhere_are_refused(folder: Path) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = nn.Linear(2, 2)
    model = small()
    model.register_buffer("sparse", torch.eye(2).to_sparse())
    for each, problem in ((fake, "weight is a FakeTensor"), (model, "sparse is sparse_coo")):
        with pytest.raises(phalanx.UnsupportedOperationError, match=problem):
            save_checkpoint(folder, model=each, step=1)
    assert list(folder.iterdir()) == []


def test_ranks_that_ask_for_different_things_are_told(folder: Path) -> None:
    def different_steps(backend: Backend) -> None:
        save_checkpoint(folder, model=DDP(small(), backend), step=backend.rank)

    def different_options(backend: Backend) -> None:
        model = DDP(small(), backend)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + backend.rank))
        save_checkpoint(folder, model=model, optimizer=optimizer, step=1)

    def different_models(backend: Backend) -> None:
        model = nn.Linear(2, 2 + backend.rank)
        save_checkpoint(folder, model=model, step=1, backend=backend)

    def one_without(backend: Backend) -> None:
        model = small()
        optimizer = adamw(model) if backend.rank else None
        save_checkpoint(folder, model=model, optimizer=optimizer, step=1, backend=backend)

    for run, problem in {
        different_steps: "rank 0 asks for step=0 and rank 1 for step=1",
        different_options: "rank 1 has another optimizer than rank 0",
        different_models: re.escape("weight is float32 [2, 2] on rank 0 and float32 [3, 2]"),
        one_without: "rank 1 gave an optimizer and rank 0 gave none",
    }.items():
        with pytest.raises(phalanx.DistributedError, match=problem):
            phalanx.simulate(run, 2)
    assert list(folder.iterdir()) == []


def test_elements_that_no_rank_holds_are_named(folder: Path) -> None:
    class Half(FlatShards):
        def __init__(self, module: nn.Module, backend: Backend) -> None:
            super().__init__(module, backend, shards=2 * backend.world_size)

    def save(backend: Backend) -> None:
        save_checkpoint(folder, model=Half(small(), backend), step=1)

    with pytest.raises(CheckpointMismatchError, match=r"no rank holds the elements of 0\.weight"):
        phalanx.simulate(save, 2)
    assert list(folder.iterdir()) == []


def test_what_one_rank_cannot_save_no_rank_saves(folder: Path) -> None:
    def save(backend: Backend) -> str:
        model = DDP(Mixed(), backend)
        optimizer = adamw(model if backend.rank != 2 else Mixed())
        with pytest.raises(MisuseError) as caught:
            save_checkpoint(folder, model=model, optimizer=optimizer, step=1)
        return str(caught.value)

    texts = phalanx.simulate(save, 3)
    assert len(set(texts)) == 1
    assert "save_checkpoint: rank 2: the optimizer's parameter 0 of group 0" in texts[0]
    assert list(folder.iterdir()) == []
