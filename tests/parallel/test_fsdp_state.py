"""State goes from plain models to sharded ones and back, whole or in shards."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from clusters import Cluster
from ddp_models import TiedTransformer, mlp, noise, seeded
from ddp_runs import assert_close, assert_same_bits, outcome_of, values
from fsdp_runs import (
    COMMON,
    COOPERATIVE,
    FULL_SHARD,
    MESSAGES,
    SHARD_GRAD_OP,
    WITH_HYBRID,
    every_way,
    on_ranks,
)
from torch import Tensor, nn

from phalanx import FSDP, Backend, MisuseError, ShardingStrategy, SizeMismatchError

RANKS = 3
way = every_way(WITH_HYBRID)


class Many(nn.Module):
    """Tied parameters, buffers of two kinds, a frozen one, an empty one, extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.body = TiedTransformer()
        self.norm = nn.BatchNorm1d(3)
        self.norm.weight.requires_grad_(False)
        self.table = nn.Parameter(torch.arange(4), requires_grad=False)
        self.nothing = nn.Parameter(torch.zeros(2, 0))
        self.register_buffer("hidden", torch.ones(2), persistent=False)
        self.steps = 0

    def get_extra_state(self) -> Any:
        return {"steps": self.steps}

    def set_extra_state(self, state: Any) -> None:
        self.steps = state["steps"]

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


def build() -> nn.Module:
    return seeded(Many)


def shifted(model: nn.Module) -> dict[str, Any]:
    """Other values."""
    return {
        name: value + 1 if isinstance(value, Tensor) else {"steps": 5}
        for name, value in model.state_dict().items()
    }


def tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


@way
def test_full_state_goes_in_and_comes_out_with_the_plain_names(strategy: Any, where: Any):
    def body(model: nn.Module, backend: Backend) -> Any:
        fsdp = FSDP(model, backend, strategy=strategy)
        assert list(fsdp.state_dict()) == list(build().state_dict())
        assert_same_bits([tensors(build().state_dict()), tensors(fsdp.full_state_dict())])
        other = shifted(build())
        found = fsdp.load_state_dict(other)
        assert found.missing_keys == found.unexpected_keys == []
        assert model.steps == 5
        again = build()
        again.load_state_dict(fsdp.full_state_dict())
        assert_same_bits([tensors(other), tensors(again.state_dict())])
        assert again.steps == 5
        only = fsdp.full_state_dict(rank0_only=True)
        assert (list(only) == list(other)) if backend.rank == 0 else not only
        return list(fsdp.full_state_dict())

    on_ranks(where, RANKS, build, body)


@way
def test_shards_go_out_and_in_without_a_message(strategy: Any, where: Any):
    def body(model: nn.Module, backend: Backend) -> None:
        fsdp = FSDP(model, backend, strategy=strategy)
        own = dict(fsdp.named_parameters())
        local = copy.deepcopy(fsdp.state_dict())
        assert all(local[name].shape == p.shape for name, p in own.items())
        file = io.BytesIO()
        torch.save(local, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        before = fsdp.full_state_dict()
        fsdp.load_state_dict(shifted(build()))
        fsdp.load_state_dict(loaded)
        assert_same_bits([tensors(before), tensors(fsdp.full_state_dict())])

    on_ranks(where, RANKS, build, body)


@way
def test_what_was_loaded_is_what_the_next_forward_pass_uses(strategy: Any, where: Any):
    def body(model: nn.Module, backend: Backend) -> None:
        fsdp = FSDP(model, backend, strategy=strategy)
        x = noise(4, 6)
        fsdp(x)
        other = mlp(seed=1)
        fsdp.load_state_dict(other.state_dict())
        torch.testing.assert_close(fsdp(x), other(x))

    on_ranks(where, RANKS, mlp, body)


@way
def test_a_tensor_that_is_neither_whole_nor_a_shard_is_named_and_nothing_is_changed(
    strategy: Any, where: Any
):
    def body(model: nn.Module, backend: Backend) -> None:
        fsdp = FSDP(model, backend, strategy=strategy)
        before = fsdp.full_state_dict()
        state = {name: value + 1 for name, value in mlp().state_dict().items()}
        state["4.weight"] = torch.zeros(3, 8)
        error = outcome_of(lambda: fsdp.load_state_dict(state))
        assert isinstance(error, SizeMismatchError)
        for part in (f"rank {backend.rank}", "4.weight", "[3, 8]", "[3, 7]"):
            assert part in str(error)
        assert_same_bits([before, fsdp.full_state_dict()])

    on_ranks(where, RANKS, mlp, body)


def test_missing_and_unexpected_names_are_torch_s_own_errors():
    def body(model: nn.Module, backend: Backend) -> None:
        fsdp = FSDP(model, backend)
        full = mlp(seed=1).state_dict()
        part = {name: value for name, value in full.items() if name != "0.bias"}
        with pytest.raises(RuntimeError, match=r'Missing key.* "0.bias"'):
            fsdp.load_state_dict(part)
        with pytest.raises(RuntimeError, match=r'Unexpected key.* "odd"'):
            fsdp.load_state_dict({**full, "odd": torch.ones(1)})
        found = fsdp.load_state_dict({**part, "odd": torch.ones(1)}, strict=False)
        assert found.missing_keys == ["0.bias"]
        assert found.unexpected_keys == ["odd"]
        with pytest.raises(RuntimeError, match="assign=True"):
            fsdp.load_state_dict(full, assign=True)
        assert_same_bits([full, fsdp.full_state_dict()])

    on_ranks(COOPERATIVE, RANKS, mlp, body)


def test_state_fits_any_number_of_ranks_and_any_strategy():
    states = []
    for ranks, strategy in ((2, FULL_SHARD), (3, SHARD_GRAD_OP), (4, ShardingStrategy.hybrid(2))):

        def body(model: nn.Module, backend: Backend, strategy: Any = strategy) -> dict[str, Tensor]:
            fsdp = FSDP(model, backend, strategy=strategy)
            if states:
                fsdp.load_state_dict(states[-1])
            fsdp(noise(4, 6)).pow(2).sum().backward()
            torch.optim.SGD(fsdp.parameters(), lr=0.1).step()
            return fsdp.full_state_dict()

        states.append(on_ranks(COMMON, ranks, lambda: mlp(seed=7), body)[0])
    plain = mlp(seed=7)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for state in states:
        optimizer.zero_grad()
        plain(noise(4, 6)).pow(2).sum().backward()
        optimizer.step()
        torch.testing.assert_close(state, dict(plain.state_dict()))


def test_a_full_state_is_a_copy():
    def body(model: nn.Module, backend: Backend) -> None:
        fsdp = FSDP(model, backend)
        first = fsdp.full_state_dict()
        for value in first.values():
            value.zero_()
        assert_same_bits([values(mlp()), fsdp.full_state_dict()])

    for where in (COMMON, MESSAGES):
        on_ranks(where, 2, mlp, body)


@pytest.mark.parametrize("where", [COMMON, MESSAGES], ids=lambda where: where.name)
def test_torch_save_of_a_local_state_writes_no_more_than_the_shards(where: Cluster) -> None:
    def body(model: nn.Module, backend: Backend) -> int:
        file = io.BytesIO()
        torch.save(FSDP(model, backend).state_dict(), file)
        return file.tell()

    def large() -> nn.Module:
        return nn.Sequential(nn.Linear(256, 256))

    alone = io.BytesIO()
    torch.save(large().state_dict(), alone)
    for size in on_ranks(where, RANKS, large, body):
        assert size < alone.tell() / RANKS + 4096


@pytest.mark.parametrize("where", [COMMON, MESSAGES], ids=["common", "messages"])
def test_after_a_backward_pass_that_failed_states_are_those_of_shards(where: Any) -> None:
    def body(model: nn.Module, backend: Backend) -> None:
        fsdp = FSDP(model, backend)
        before, whole = fsdp.state_dict(), fsdp.full_state_dict()
        output = fsdp(noise(4, 6))
        output.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            output.sum().backward()
        assert_close(fsdp.state_dict(), before)
        assert_close(fsdp.full_state_dict(), whole)
        fsdp.load_state_dict(whole)
        assert_close(fsdp.state_dict(), before)

    on_ranks(where, 2, mlp, body)


def test_nothing_is_loaded_inside_of_summon_full_params() -> None:
    def body(model: nn.Module, backend: Backend) -> None:
        fsdp = FSDP(model, backend)
        state = fsdp.full_state_dict()
        with fsdp.summon_full_params(), pytest.raises(MisuseError, match="leave it first"):
            fsdp.load_state_dict(state)

    on_ranks(COMMON, 2, mlp, body)
