"""The ways to train that are compared. Each is a row; a new one needs nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

import phalanx as px
from phalanx import ErrorFeedback, PowerSGD, Quantized, TopK
from phalanx.compression import Compressor, Half, RandomK

DENSE = "dense"


@dataclass(frozen=True)
class Row:
    """One way to train.

    wrap     from a plain model and a backend to what trains it on all ranks: a module that has
             `bytes_sent`
    rate     the learning rate, as a multiple of the example's
    clip     the norm that gradients are clipped to, as in the example; None: they are not
    betas    AdamW's; None: the example's
    target   whether it is one that has to come close to dense with few bytes
    syncs    whether ranks have parameters of their own between averages: `sync()` ends that, and is
             called when training is over
    """

    wrap: Callable[[nn.Module, px.Backend], Any]
    rate: float = 1.0
    clip: float | None = 1.0
    betas: tuple[float, float] | None = None
    target: bool = False
    syncs: bool = False

    def __str__(self) -> str:
        """All of it, so that a run that was made in another way is not taken for one of this."""
        return f"{_shown(self.wrap)} rate={self.rate} clip={self.clip} betas={self.betas}"


def ddp(compression: Compressor | None = None, **options: Any) -> Callable[..., Any]:
    """DDP with these options."""
    return partial(px.DDP, compression=compression, **options)


def local(every: int = 1, **options: Any) -> Callable[..., Any]:
    """LocalSGD with these options."""
    return partial(px.LocalSGD, every=every, **options)


def outer_sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """DiLoCo's outer optimizer, for as few outer steps as there are here."""
    return torch.optim.SGD(parameters, lr=1.0)


def rows() -> dict[str, Row]:
    """All of them, by name.

    `ef`     error feedback of averaged gradients
    `kept`   parameters are averaged, and what is left out of that stays in those of its rank
    """
    feed, power = ErrorFeedback, PowerSGD(4, dtype=torch.bfloat16)
    return {
        DENSE: Row(ddp()),
        "half": Row(ddp(Half())),
        "half + ef": Row(ddp(feed(Half()))),
        "8 bits": Row(ddp(Quantized(8))),
        "8 bits + ef": Row(ddp(feed(Quantized(8)))),
        "4 bits + ef": Row(ddp(feed(Quantized(4)))),
        "1 bit + ef": Row(ddp(feed(Quantized(1)))),
        "top 1 %": Row(ddp(TopK(0.01))),
        "top 1 % + ef": Row(ddp(feed(TopK(0.01)))),
        "top 1 % kept": Row(
            local(compression=TopK(0.01), start_after=5),
            rate=0.8,
            betas=(0.8, 0.99),  # of a rank that goes by its own gradients: a smaller batch's
            target=True,
            syncs=True,
        ),
        "random 1 % + ef": Row(ddp(feed(RandomK(0.01)))),
        "power 4 + ef": Row(ddp(feed(PowerSGD(4)))),
        "power 4 bf16 + ef": Row(ddp(feed(power))),
        "power 4 bf16 kept": Row(
            local(compression=power), betas=(0.8, 0.98), target=True, syncs=True
        ),
        "local sgd 8": Row(local(8), syncs=True),
        "diloco 50": Row(
            partial(px.DiLoCo, every=50, outer=outer_sgd, compression=feed(Quantized(4))),
            syncs=True,
        ),
    }


def chosen(only: Iterable[str]) -> dict[str, Row]:
    """Dense and those of these names; all, if there are none. ValueError for a name of no row."""
    table, wanted = rows(), list(only)
    unknown = [name for name in wanted if name not in table]
    if unknown:
        raise ValueError(f"no row is called {unknown[0]!r}; there are: {'; '.join(table)}")
    return {n: row for n, row in table.items() if not wanted or n in wanted or n == DENSE}


def _shown(wrap: Callable[..., Any]) -> str:
    if not isinstance(wrap, partial):
        return wrap.__qualname__
    options = ", ".join(
        f"{name}={getattr(value, '__qualname__', repr(value))}"
        for name, value in wrap.keywords.items()
    )
    return f"{wrap.func.__qualname__}({options})"
