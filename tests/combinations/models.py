"""Layers that features put into the model, and the data that it is trained on. Only torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

WIDTH = 6
HEAD = 2
Part = Callable[[], int]  # whose part of a batch is computed


@cache
def _drawn(part: int, step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1000 * part + step + 1)
    many = {"generator": draw, "dtype": torch.float64}
    return torch.randn(8, 4, **many), torch.randn(8, HEAD, **many)  # type: ignore[call-overload]


def data_of(part: int, step: int, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one part of a step's batch."""
    x, y = _drawn(part, step)
    return x[:rows].to(dtype, copy=True), y[:rows].to(dtype, copy=True)


class Steps(Dataset[tuple[Tensor, Tensor]]):
    """The batches of one part, for a DataLoader."""

    def __init__(self, part: int, rows: int, count: int, dtype: torch.dtype) -> None:
        self.of = part, rows, count, dtype

    def __len__(self) -> int:
        return self.of[2]

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        if step >= len(self):
            raise IndexError(step)
        part, rows, _, dtype = self.of
        return data_of(part, step, rows, dtype)


class Block(nn.Module):
    """Up, an activation, down, and around it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 8)
        self.down = nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Unused(nn.Module):
    """A linear layer that is used for the parts of a batch that are asked for."""

    def __init__(self, used: Callable[[], bool]) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.used = used

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x) if self.used() else x


class PartlyUnused(Unused):
    """The same beside a layer that is always used."""

    def __init__(self, used: Callable[[], bool]) -> None:
        super().__init__(used)
        self.always = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.always(x))


class _Overflow(torch.autograd.Function):
    """An infinity in the first element of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad[0] = float("inf")
        return grad


class Overflows(nn.Module):
    """A bias, one element of whose gradient overflows when it is asked to: in one shard only."""

    def __init__(self, now: Callable[[], bool]) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.now = now

    def forward(self, x: Tensor) -> Tensor:
        return x + (_Overflow.apply(self.bias) if self.now() else self.bias)


class Words(nn.Module):
    """An embedding of inputs with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 4, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.words((10 * x.detach()).abs().sum(-1).long() % 5)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(WIDTH, WIDTH, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return x + (x.to(self.weight.dtype) @ self.weight).abs().to(x.dtype)


class Narrow(nn.Module):
    """A layer in bfloat16 among wider ones."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x.to(self.inner.weight.dtype)).to(x.dtype)


class Counter(nn.Module):
    """A buffer that grows by `grows()` in each forward pass in training, and is used before."""

    count: Tensor

    def __init__(self, grows: Callable[[], float]) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.grows = grows

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.1 * self.count
        if self.training:
            self.count = self.count + self.grows()
        return x


class Checkpointed(nn.Module):
    """A layer whose activations are computed again in backward."""

    def __init__(self, inner: nn.Module, *, use_reentrant: bool) -> None:
        super().__init__()
        self.inner = inner
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.inner, x, use_reentrant=self.use_reentrant)
        return found


class Functional(nn.Module):
    """A layer that is computed with other weights, made of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        weights = {name: 0.5 * p for name, p in self.inner.named_parameters()}
        found: Tensor = torch.func.functional_call(self.inner, weights, (x,))
        return x + found


class Halved(nn.Module):
    """A parametrization."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x + x.tanh()


def parametrized() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    parametrize.register_parametrization(layer, "weight", Halved())
    return layer


class Doubles(nn.Module):
    """A hook on a tensor doubles its gradient."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        if x.requires_grad:
            x.register_hook(lambda gradient: 2 * gradient)
        return x


class Fails(torch.autograd.Function):
    """Nothing in forward, an error in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError("a bad batch")
