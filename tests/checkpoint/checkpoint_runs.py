"""Small models, and whether two trainings are in the same state."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from flat_shards import FlatShards, shard_of, step_with
from torch import Tensor, nn

from phalanx import Backend, load_checkpoint, save_checkpoint
from phalanx.parallel.wrapper import Wrapper

Make = Callable[..., nn.Module]
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Where files cost nothing to fsync, if the system has such a place."""
ONE_AT_A_TIME = threading.Lock()
"""Ranks that are threads share torch's generator."""
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


class Mixed(nn.Module):
    """Sizes that do not divide, many dtypes, no elements, no dimensions, two names for one."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with ONE_AT_A_TIME:
            self._fill(seed)

    def _fill(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.embed = nn.Embedding(7, 3)
        self.body = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 3, bias=False))
        self.head = nn.Linear(3, 7)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.rand(()))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.brief = nn.Parameter(torch.randn(11).to(torch.bfloat16))
        self.long = nn.Parameter(torch.randn(2, 2, 3, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("mask", torch.rand(9) > 0.5)
        self.register_buffer("count", torch.randint(99, ()))
        self.register_buffer("bytes", torch.arange(5, dtype=torch.uint8))
        self.register_buffer("waves", torch.randn(3, dtype=torch.complex64))
        self.register_buffer("scratch", torch.rand(2), persistent=False)


def small(seed: int = 0) -> nn.Module:
    with ONE_AT_A_TIME:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def trained(
    model: nn.Module, make_optimizer: MakeOptimizer = adamw, steps: int = 2
) -> torch.optim.Optimizer:
    """An optimizer for the model, after so many steps."""
    optimizer = make_optimizer(model)
    for seed in range(steps):
        step_with(model, optimizer, seed)
    return optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Everything that a checkpoint brings back, by name, cut as the model is."""
    state: dict[str, Any] = {
        f"model.{name}": parameter.detach().clone() for name, parameter in model.named_parameters()
    }
    plain = model.module if isinstance(model, Wrapper) else model
    buffers = dict(plain.named_buffers())
    state |= {
        f"model.{name}": buffers[name].clone() for name in plain.state_dict() if name in buffers
    }
    if optimizer is None:
        return state
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for parameter, kept in optimizer.state.items():
        for key, value in kept.items():
            copied = value.clone() if isinstance(value, Tensor) else value
            state[f"optimizer.{names[id(parameter)]}.{key}"] = copied
    for number, group in enumerate(optimizer.param_groups):
        state[f"group{number}"] = {
            **{key: value for key, value in group.items() if key not in ("params", "param_names")},
            "params": [names[id(parameter)] for parameter in group["params"]],
        }
    return state


def cut_like(model: Wrapper, whole: dict[str, Any]) -> dict[str, Any]:
    """The state of a plain model as this rank of `model` has it."""
    slices = model.slices()
    cut = dict(whole)
    for key, value in whole.items():
        for name, part in slices.items():
            mine = key == f"model.{name}" or key.startswith(f"optimizer.{name}.")
            if mine and isinstance(value, Tensor) and tuple(value.shape) == part.shape:
                if part.shape == () and key.endswith((".step", ".mu_product")):
                    continue
                cut[key] = shard_of(value, part)
    return cut


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Bit for bit; tensors of the same dtype, and of the same elements in whatever shape."""
    assert one.keys() == other.keys()
    for key, value in one.items():
        if isinstance(value, Tensor):
            assert other[key].dtype == value.dtype, key
            assert torch.equal(other[key].reshape(-1), value.reshape(-1)), key
        else:
            assert other[key] == value, key


def save_sharded(
    folder: Path, steps: int, shards: int | None = None, *, make: Make = Mixed, **options: Any
) -> Callable[[Backend], None]:
    """What a rank does that trains a model, split, and saves it."""

    def run(backend: Backend) -> None:
        model = FlatShards(make(), backend, shards)
        optimizer = trained(model, steps=steps)
        save_checkpoint(folder, model=model, optimizer=optimizer, step=steps, **options)

    return run


def load_plain(folder: Path, *, make: Make = Mixed, **options: Any) -> dict[str, Any]:
    """The state of a fresh model on one rank after loading."""
    model = make(seed=99)
    optimizer = adamw(model)
    load_checkpoint(folder, model=model, optimizer=optimizer, **options)
    return state_of(model, optimizer)


def plain_after(steps: int, *, make: Make = Mixed) -> dict[str, Any]:
    """The state that training has after so many steps."""
    model = make()
    return state_of(model, trained(model, steps=steps))
