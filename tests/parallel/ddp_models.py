"""Small models that DDP is tested with. Each is built from a seed, the same each time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ConvNet(nn.Module):
    """Convolutions and a batch norm with fixed statistics, so that samples are independent."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4 * 4, 3)
        self.train()

    def train(self, mode: bool = True) -> ConvNet:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x.view(-1, 1, 6, 6))))
        return self.head(F.avg_pool2d(x, 2).flatten(1))


class TiedTransformer(nn.Module):
    """One causal block; the embedding is the output layer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)
        self.mix = nn.Linear(8, 8)
        self.mlp = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.out = nn.Linear(8, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        q, k, v = (
            part.unflatten(-1, (2, 4)).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(heads.transpose(1, 2).flatten(2))
        x = x + self.mlp(x)
        return self.out(x).flatten(0, 1)


class DefinedBackwards(nn.Module):
    """Layers that are used in another order than they are defined in."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(5, 3)
        self.first = nn.Linear(6, 4)
        self.middle = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


class Branches(nn.Module):
    """A trunk, and branches of which each call names the ones to use."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 4)
        self.left = nn.Linear(4, 3)
        self.right = nn.Linear(4, 3)

    def forward(self, x: Tensor, *names: str) -> Tensor:
        hidden = torch.tanh(self.trunk(x))
        outputs = [getattr(self, name)(hidden) for name in names]
        return torch.stack(outputs).sum(0) if outputs else hidden


class Fails(torch.autograd.Function):
    """Nothing in forward, an error in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError("a bad batch")


def mlp(seed: int = 0) -> nn.Module:
    return seeded(
        lambda: nn.Sequential(
            nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 7), nn.GELU(), nn.Linear(7, 3)
        ),
        seed,
    )


_DRAWING = threading.RLock()  # the global random state is that of all ranks


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    with _DRAWING, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` takes a millisecond or two
        return build()


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def vectors(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    return noise(rows, 6, seed=seed), noise(rows, 3, seed=seed + 1000)


def images(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    return noise(rows, 36, seed=seed), noise(rows, 3, seed=seed + 1000)


def sentences(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    text = torch.randint(11, (rows, 6), generator=draw)
    return text[:, :-1], text[:, 1:]


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    if targets.dtype is torch.int64:
        return F.cross_entropy(outputs, targets.flatten())
    return F.mse_loss(outputs, targets)


TASKS = {
    "mlp": (mlp, vectors),
    "convnet": (lambda seed=0: seeded(ConvNet, seed), images),
    "tied transformer": (lambda seed=0: seeded(TiedTransformer, seed), sentences),
    "defined backwards": (lambda seed=0: seeded(DefinedBackwards, seed), vectors),
}
