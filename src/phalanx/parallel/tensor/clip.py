"""The norm of all gradients, of which each rank has a part of some, and the whole of the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from phalanx.backends.base import Backend
from phalanx.collectives import ReduceOp
from phalanx.errors import MisuseError
from phalanx.parallel.clip import clip_, norm_here
from phalanx.parallel.slices import Slice
from phalanx.parallel.tensor.layer import owners
from phalanx.parallel.tensor.moves import Ranks, all_reduce


@torch.no_grad()
def clip_grad_norm_(
    module: nn.Module, max_norm: float, *, norm_type: float = 2.0, shards: Backend | None = None
) -> Tensor:
    """Scale the gradients of a model with parallel layers, in place, so that their norm is bounded.

    max_norm    of all gradients together, as the plain model has them
    norm_type   a number above 0, or `inf` for the largest
    shards      for a model in FSDP, the ranks that it shards over, such as `mesh["data"]`

    Returns the norm before, float64, the same on every rank. What is cut counts on each rank for
    its part, what is whole counts once. (torch's function of this name would find another norm on
    each rank, and what is whole would drift apart.) Call it when gradients are final: after
    `backward()`, with DDP too. Blocks for a message of one number to those with the other parts
    (with `shards`, for two).
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type is a number above 0, or inf, not {norm_type}")
    if shards is None and not all(piece.is_whole for piece in _slices(module)):
        raise MisuseError(
            "clip_grad_norm_: this model's parameters are shards: say over which ranks, such as "
            'shards=mesh["data"]'
        )
    largest = norm_type == math.inf
    op = ReduceOp.MAX if largest else ReduceOp.SUM
    trained = [parameter for parameter in module.parameters() if parameter.grad is not None]
    owned = owners(module)
    groups = [None, *dict.fromkeys(owned.values())]  # None: what is whole
    powers = torch.zeros(len(groups), dtype=torch.float64)
    for parameter in trained:
        assert parameter.grad is not None
        norm = norm_here(parameter.grad, norm_type)
        place = groups.index(owned.get(parameter))
        powers[place] = max(powers[place], norm) if largest else powers[place] + norm**norm_type
    if shards is not None:
        powers = all_reduce(powers, Ranks(shards, "clip_grad_norm_"), op)
    for place, backend in enumerate(groups):
        if backend is not None:  # the other ranks wait for it, whether it has gradients or not
            powers[place] = all_reduce(powers[place], Ranks(backend, "clip_grad_norm_"), op)
    total = powers.max() if largest else powers.sum() ** (1 / norm_type)
    clip_(trained, total, max_norm)
    return total


def _slices(module: nn.Module) -> Iterable[Slice]:
    """What part of each parameter there is here, if the model is in FSDP."""
    slices: Callable[[], dict[str, Slice]] | None = getattr(module, "slices", None)
    return () if slices is None else slices().values()
