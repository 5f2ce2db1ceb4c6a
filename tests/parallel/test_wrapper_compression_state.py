"""What error feedback has left over: saved, shared out over other ranks, restored."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ddp_models import loss_of, mlp, vectors
from ddp_runs import assert_same_bits
from fsdp_runs import FULL_SHARD, NO_SHARD, SHARD_GRAD_OP
from residuals import lacking
from torch import Tensor, nn

from phalanx import (
    DDP,
    FSDP,
    Backend,
    ErrorFeedback,
    PowerSGD,
    Quantized,
    ShardingStrategy,
    SizeMismatchError,
    TopK,
    load_checkpoint,
    save_checkpoint,
    simulate,
)
from phalanx.compression import Compressor, Half, RandomK

KINDS: dict[str, Callable[[], Compressor]] = {
    "top-k": lambda: ErrorFeedback(TopK(0.1)),
    "random-k": lambda: ErrorFeedback(RandomK(0.2)),
    "1 bit": lambda: ErrorFeedback(Quantized(1, block=16)),
    "float16": lambda: ErrorFeedback(Half(torch.float16)),
    "PowerSGD": lambda: ErrorFeedback(PowerSGD(1)),
}
WITHOUT_FEEDBACK: dict[str, Callable[[], Compressor]] = {
    "top-k alone": lambda: TopK(0.2),
    "bfloat16 alone": Half,
    "8 bits alone": Quantized,
}
HYBRID = ShardingStrategy.hybrid(2)
SIZES = {name: p.numel() for name, p in mlp().named_parameters()}


def model_of(backend: Backend, strategy: Any, kind: str, seed: int = 0) -> Any:
    """A model that compresses, in shards; a DDP if there is no strategy."""
    compression = {**KINDS, **WITHOUT_FEEDBACK}[kind]()
    if strategy is None:
        return DDP(mlp(seed), backend, bucket_size=200, compression=compression)
    return FSDP(mlp(seed), backend, strategy=strategy, compression=compression)


def train(model: Any, steps: range) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number in steps:
        optimizer.zero_grad()
        inputs, targets = vectors(4, seed=10 * number + model.backend.rank)
        loss_of(model(inputs), targets).backward()
        optimizer.step()


def state_of(module: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in sorted(module.state_dict().items())}


# Where nothing has changed ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "ranks", "strategy", "nested", "through_files"),
    [
        *((kind, 2, FULL_SHARD, False, True) for kind in KINDS),
        *((kind, 4, HYBRID, False, False) for kind in KINDS),
        ("1 bit", 2, NO_SHARD, False, False),
        ("top-k", 2, SHARD_GRAD_OP, True, False),
        ("1 bit", 4, HYBRID, True, True),
        *((kind, 2, None, False, False) for kind in (*KINDS, *WITHOUT_FEEDBACK)),
        ("1 bit", 2, None, True, False),
    ],
)
def test_training_goes_on_bit_for_bit(
    kind: str, ranks: int, strategy: Any, nested: bool, through_files: bool, tmp_path: Path
):
    def run(backend: Backend) -> Any:
        def build() -> tuple[Any, nn.Module]:
            fsdp = model_of(backend, strategy, kind)
            return fsdp, nn.ModuleDict({"net": fsdp}) if nested else fsdp

        fsdp, holder = build()
        train(fsdp, range(2))
        if through_files:
            save_checkpoint(tmp_path, model=holder, step=2)
        saved = state_of(holder)
        train(fsdp, range(2, 4))
        again, holder_again = build()
        if through_files:
            load_checkpoint(tmp_path, model=holder_again)
        else:
            holder_again.load_state_dict(saved)
        assert_same_bits([saved, state_of(holder_again)])
        train(again, range(2, 4))
        assert_same_bits([state_of(holder), state_of(holder_again)])
        assert any("residual." in key for key in saved) is (kind in KINDS)

    simulate(run, ranks)


# Where ranks or shards are others --------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "before", "now"),
    [
        *((kind, (3, FULL_SHARD), (2, FULL_SHARD)) for kind in KINDS),
        ("random-k", (4, HYBRID), (2, FULL_SHARD)),
        ("1 bit", (2, FULL_SHARD), (4, HYBRID)),
        ("1 bit", (4, FULL_SHARD), (4, HYBRID)),
        ("PowerSGD", (4, HYBRID), (4, SHARD_GRAD_OP)),
        ("1 bit", (6, HYBRID), (4, HYBRID)),
        ("top-k", (4, HYBRID), (6, ShardingStrategy.hybrid(3))),
        ("1 bit", (3, None), (2, FULL_SHARD)),
        ("PowerSGD", (2, FULL_SHARD), (3, None)),
        ("1 bit", (2, None), (2, FULL_SHARD)),
        ("1 bit", (4, HYBRID), (3, None)),
        ("1 bit", (3, None), (4, HYBRID)),
        ("1 bit", (2, NO_SHARD), (3, FULL_SHARD)),
        ("top-k", (3, FULL_SHARD), (1, FULL_SHARD)),
    ],
    ids=str,
)
def test_averages_lack_as_much_as_before(kind: str, before: Any, now: Any, tmp_path: Path):
    def save(backend: Backend) -> Any:
        model = model_of(backend, before[1], kind)
        train(model, range(2))
        save_checkpoint(tmp_path, model=model, step=2)
        return {key: value.clone() for key, value in model.own_state().items()}

    def load(backend: Backend) -> Any:
        model = model_of(backend, now[1], kind, seed=1)
        load_checkpoint(tmp_path, model=model)
        loaded = {key: value.clone() for key, value in model.own_state().items()}
        train(model, range(2, 3))  # whoever takes it goes on with it
        return loaded

    saved, loaded = (lacking(simulate(f, n[0]), SIZES) for f, n in ((save, before), (load, now)))
    assert set(saved) == set(loaded) == set(SIZES)
    for name, value in saved.items():
        torch.testing.assert_close(loaded[name], value, rtol=2**-23, atol=1e-12)


def test_groups_may_be_others(tmp_path: Path):
    """So what a rank has of each parameter with a hybrid strategy is another part."""

    def build(backend: Backend, unit: Any) -> FSDP:
        return FSDP(mlp(), backend, strategy=HYBRID, unit=unit, compression=KINDS["top-k"]())

    def save(backend: Backend) -> Any:
        fsdp = build(backend, None)
        train(fsdp, range(2))
        save_checkpoint(tmp_path, model=fsdp, step=2)
        return fsdp.own_state()

    def load(backend: Backend) -> Any:
        fsdp = build(backend, lambda module: isinstance(module, nn.Sequential))
        load_checkpoint(tmp_path, model=fsdp)
        return fsdp.own_state()

    saved, loaded = (lacking(simulate(run, 4), SIZES) for run in (save, load))
    for name, value in saved.items():
        torch.testing.assert_close(loaded[name], value, rtol=2**-23, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "strategy", "p", "q"),
    [
        ("1 bit", FULL_SHARD, 3, 2),
        *((kind, None, p, q) for kind in KINDS for p, q in ((3, 2), (2, 3))),
    ],
    ids=str,
)
def test_states_of_all_ranks_may_be_joined_by_hand(kind: str, strategy: Any, p: int, q: int):
    def save(backend: Backend) -> Any:
        model = model_of(backend, strategy, kind)
        train(model, range(2))
        if strategy is None:
            return state_of(model)
        assert not any(key.startswith("compression@") for key in model.full_state_dict())
        return {**model.full_state_dict(), **model.own_state()}

    saved = simulate(save, p)
    everything = {key: value for state in saved for key, value in state.items()}

    def load(backend: Backend) -> Any:
        model = model_of(backend, strategy, kind, seed=1)
        model.load_state_dict(everything)
        plain = state_of(model.module) if strategy is None else model.full_state_dict()
        assert_same_bits([plain, {key: everything[key] for key in plain}])
        loaded = {key: value.clone() for key, value in model.own_state().items()}
        train(model, range(2, 3))  # whoever takes it goes on with it
        return loaded

    before, after = lacking(saved, SIZES), lacking(simulate(load, q), SIZES)
    assert before.keys() == after.keys()
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, rtol=2**-23, atol=0)


def test_a_plain_module_loads_the_module_s_state_or_what_it_knows_of_ddp_s():
    def run(backend: Backend) -> None:
        ddp = model_of(backend, None, "top-k")
        train(ddp, range(1))
        mlp().load_state_dict(ddp.module.state_dict())
        mlp().load_state_dict(ddp.state_dict(), strict=False)
        with pytest.raises(RuntimeError, match=r"Unexpected.*compression@0/1.residual"):
            mlp().load_state_dict(ddp.state_dict())
        fresh = model_of(backend, None, "top-k")
        fresh.load_state_dict(mlp(1).state_dict())  # which has nothing left over
        assert_same_bits([state_of(fresh.module), state_of(mlp(1))])

    simulate(run, 1)


# What is lost is said --------------------------------------------------------------------------


def test_a_rank_s_state_alone_is_not_enough_for_other_shards(caplog: pytest.LogCaptureFixture):
    def run(backend: Backend) -> None:
        fsdp = model_of(backend, HYBRID, "top-k")
        train(fsdp, range(1))
        other = model_of(backend, FULL_SHARD, "top-k")
        other.load_own_state(fsdp.own_state())

    with caplog.at_level(logging.WARNING, logger="phalanx"):
        simulate(run, 4)
    lacks = [record.getMessage() for record in caplog.records]
    assert sorted(text.split(" lacks")[0] for text in lacks) == [
        f"rank {rank}: the state dict" for rank in range(4)
    ]
    assert "ranks 1, 2, 3" in next(text for text in lacks if text.startswith("rank 0"))


@pytest.mark.parametrize("strategy", [None, FULL_SHARD, HYBRID], ids=str)
@pytest.mark.parametrize(
    ("name", "has"), [("0.weight", "48 values"), ("9.weight", "no such gradient")]
)
def test_the_state_of_another_model_is_refused_by_name(name: str, has: str, strategy: Any):
    def run(backend: Backend) -> None:
        model = model_of(backend, strategy, "top-k")
        whole = {f"compression@{rank}/3.residual.{name}": torch.zeros(5) for rank in range(3)}
        with pytest.raises(SizeMismatchError, match=f"over of {name}, and .* has {has}"):
            model.load_own_state(whole)

    simulate(run, 4)


@pytest.mark.parametrize("strategy", [None, FULL_SHARD], ids=str)
def test_who_does_not_compress_is_told_that_something_is_lost(
    strategy: Any, caplog: pytest.LogCaptureFixture
):
    def run(backend: Backend) -> None:
        model = model_of(backend, strategy, "top-k")
        train(model, range(1))
        state = model.state_dict()
        kind = type(model)
        del model
        kind(mlp(1), backend).load_state_dict(state)

    with caplog.at_level(logging.WARNING, logger="phalanx"):
        simulate(run, 1)
    assert ["there is no compression now" in r.getMessage() for r in caplog.records] == [True]
