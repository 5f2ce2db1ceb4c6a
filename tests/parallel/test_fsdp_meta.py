"""Models on the meta device get their values group by group, the same as when they are built."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ddp_models import TiedTransformer, noise, sentences
from ddp_runs import assert_same_bits, outcome_of, values
from fsdp_runs import COOPERATIVE, FULL_SHARD, NO_SHARD, SHARD_GRAD_OP, STRATEGIES, on_ranks
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx import FSDP, Backend, MisuseError, ShardingStrategy


class ConvNet(nn.Module):
    """Buffers, too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.blocks = nn.ModuleList(nn.LSTM(4, 4) for _ in range(2))
        self.head = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(x.view(-1, 1, 6, 6)))).mean((-1, -2))
        for block in self.blocks:
            x, _ = block(x)
        return self.head(x)


class TiedInTheMiddle(nn.Module):
    """A layer that shares its weight, and not its bias, with one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(6, 6) for _ in range(3))
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Gain(nn.Module):
    """A parameter that nothing gives a value."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


KINDS: dict[str, Any] = {
    "convnet": (ConvNet, lambda: noise(4, 36)),
    "tied transformer": (TiedTransformer, lambda: sentences(3)[0]),
    "tied in the middle": (TiedInTheMiddle, lambda: noise(3, 6)),
}


def on_meta(kind: Any) -> nn.Module:
    with torch.device("meta"):
        model = kind()
    if isinstance(model, TiedTransformer):
        assert model.out.weight is model.embed.weight
    return model


@pytest.mark.checkered
@pytest.mark.parametrize("strategy", [*STRATEGIES, ShardingStrategy.hybrid(1)], ids=str)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_they_are_equal_to_models_built_on_the_cpu_with_the_same_seed(kind: Any, strategy: Any):
    """The scheduler gives each rank a random state of its own: rank 0's values count."""
    build, batch = kind

    def body(model: nn.Module, backend: Backend) -> Any:
        torch.manual_seed(5 if backend.rank == 0 else 6 + backend.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if strategy is NO_SHARD else None
        fsdp = FSDP(model, backend, strategy=strategy)
        assert not any(t.is_meta for t in [*fsdp.parameters(), *fsdp.buffers()])
        state = fsdp.full_state_dict()
        fsdp(batch()).pow(2).sum().backward()
        assert optimizer is None or all(p.is_meta for p in optimizer.param_groups[0]["params"])
        return state

    with torch.random.fork_rng():
        torch.manual_seed(5)
        plain = values(build())
    for state in on_ranks(COOPERATIVE, 2, lambda: on_meta(build), body):
        assert_same_bits([plain, state])


class Largest(TorchDispatchMode):
    """Counts the bytes of storages that are alive, and how many there were at most."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, Any] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, Tensor) and not value.is_meta:
                storage = value.untyped_storage()
                self.alive[storage._cdata] = storage._weak_ref()
        self.alive = {
            key: weak for key, weak in self.alive.items() if not torch.UntypedStorage._expired(weak)
        }
        total = 0
        for weak in self.alive.values():
            storage = torch.UntypedStorage._new_with_weak_ptr(weak)
            total += storage.nbytes() if storage is not None else 0
        self.most = max(self.most, total)
        return result


def test_no_rank_ever_holds_more_than_its_shards_and_a_group():
    layers, side, ranks = 8, 64, 4
    group = side * (side + 1) * 4

    def build() -> nn.Module:
        return on_meta(lambda: nn.Sequential(*(nn.Linear(side, side) for _ in range(layers))))

    def body(model: nn.Module, backend: Backend) -> int:
        with Largest() as largest:
            FSDP(model, backend)
        return largest.most

    from fsdp_runs import MESSAGES

    for most in on_ranks(MESSAGES, ranks, build, body):
        assert most <= layers * group / ranks + 3 * group  # the values, joined, on their way
        assert most < layers * group / 1.5


def test_a_module_that_cannot_give_values_is_named():
    def body(model: nn.Module, backend: Backend) -> None:
        error = outcome_of(lambda: FSDP(model, backend))
        assert isinstance(error, MisuseError)
        for part in (f"rank {backend.rank}", "1 (Gain)", "reset_parameters", "initialize="):
            assert part in str(error)

    build = lambda: on_meta(lambda: nn.Sequential(nn.Linear(3, 3), Gain()))  # noqa: E731
    on_ranks(COOPERATIVE, 2, build, body)


@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP], ids=str)
def test_a_function_may_give_the_values(strategy: Any):
    def initialize(module: nn.Module) -> None:
        with torch.no_grad():
            for number, parameter in enumerate(module.parameters(recurse=False)):
                parameter.fill_(number + 2)

    def body(model: nn.Module, backend: Backend) -> Any:
        fsdp = FSDP(model, backend, strategy=strategy, initialize=initialize)
        return {name: value.unique().tolist() for name, value in fsdp.full_state_dict().items()}

    build = lambda: on_meta(lambda: nn.Sequential(nn.Linear(3, 3), Gain()))  # noqa: E731
    wanted = {"0.weight": [2.0], "0.bias": [3.0], "1.gain": [2.0]}
    assert on_ranks(COOPERATIVE, 2, build, body) == [wanted] * 2


def test_parts_on_the_meta_device_and_parts_with_values_may_be_mixed():
    def build() -> nn.Module:
        ready = nn.Linear(3, 3)
        nn.init.constant_(ready.weight, 7.0)
        return nn.Sequential(ready, on_meta(lambda: nn.Linear(3, 3)))

    def body(model: nn.Module, backend: Backend) -> None:
        fsdp = FSDP(model, backend)
        state = fsdp.full_state_dict()
        assert state["0.weight"].unique().tolist() == [7.0]
        assert state["1.weight"].isfinite().all()
        fsdp(noise(2, 3)).sum().backward()

    on_ranks(COOPERATIVE, 2, build, body)


def test_parameters_keep_the_hooks_and_the_attributes_that_they_had_there():
    """Gradients are three times those of a model without hooks; every parameter is stepped once."""

    def body(model: nn.Module, backend: Backend) -> Any:
        stepped: list[Tensor] = []
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: 3 * gradient)
            parameter.register_post_accumulate_grad_hook(stepped.append)
            parameter.decays = False
        torch.manual_seed(0)
        fsdp = FSDP(model, backend)
        torch.manual_seed(0)
        plain = nn.Linear(3, 2)
        for one in (fsdp, plain):
            one(noise(2, 3)).square().sum().backward()
        assert len(stepped) == len(list(fsdp.parameters()))
        assert not any(parameter.decays for parameter in fsdp.parameters())
        whole = [parameter.grad.flatten() for parameter in plain.parameters()]
        own = torch.cat([parameter.grad.flatten() for parameter in fsdp.parameters()])
        size = sum(map(len, whole)) // backend.world_size
        torch.testing.assert_close(own, 3 * torch.cat(whole)[backend.rank * size :][:size])

    on_ranks(COOPERATIVE, 2, lambda: on_meta(lambda: nn.Linear(3, 2)), body)
