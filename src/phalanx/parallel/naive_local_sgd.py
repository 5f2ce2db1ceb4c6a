"""Local SGD and DiLoCo in their shortest form: read this first, then `local_sgd/`.

Each rank takes H steps by itself, and sends nothing. Then the ranks synchronize. With t for the
parameters after the last sync, which all ranks share, and t_i for rank i's own:

    Local SGD   t_i  <-  mean of all t_j
    DiLoCo      d    <-  mean of all (t - t_j)      the outer gradient, or pseudo-gradient
                t    <-  a step of the outer optimizer by d;  t_i  <-  t

(Stich 2019, "Local SGD Converges Fast and Communicates Little"; Douillard et al. 2023, "DiLoCo".)
`LocalSGD` and `DiLoCo` compute the same, and add

    hooks that count steps, with several optimizers or steps that are skipped    steps.py
    `sync()` at any time, buffers, a look at the mean, likely causes of errors   periodic.py
    compressed messages, outer gradients that are not finite                     outer.py
    checkpoints between two syncs                                                state.py
    few large messages in place of many small ones                               averaging.py
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Optimizer

from phalanx.collectives import ReduceOp, all_reduce_
from phalanx.core.backend import Backend

Step = Callable[[int], object]  # takes the n-th step: forward, backward, optimizer.step()
MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]


def naive_local_sgd(
    module: nn.Module, backend: Backend, step: Step, *, steps: int, every: int
) -> None:
    """Train a module that is the same on every rank at the beginning, and after each sync."""
    for number in range(1, steps + 1):
        step(number)
        if number % every == 0:
            for t_i in module.parameters():
                all_reduce_(t_i.detach(), backend, ReduceOp.MEAN)


def naive_diloco(
    module: nn.Module, backend: Backend, step: Step, *, steps: int, every: int, outer: MakeOptimizer
) -> None:
    """Train as above, with another optimizer for the parameters that all ranks share."""
    shared = [nn.Parameter(t_i.detach().clone()) for t_i in module.parameters()]
    optimizer = outer(shared)
    for number in range(1, steps + 1):
        step(number)
        if number % every == 0:
            with torch.no_grad():
                for t, t_i in zip(shared, module.parameters(), strict=True):
                    t.grad = all_reduce_(t - t_i, backend, ReduceOp.MEAN)
                optimizer.step()
                for t, t_i in zip(shared, module.parameters(), strict=True):
                    t_i.copy_(t)
