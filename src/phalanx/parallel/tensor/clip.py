"""The norm of all gradients, of which a rank has some, of others a part, and of others the whole.

cut over ranks: parallel layers, FSDP      every rank's part counts
on one of the ranks: a pipeline's stages   every rank's count
whole, and the same on every rank          counts once
"""

from __future__ import annotations

import math
from functools import reduce

import torch
from torch import Tensor, nn

from phalanx.backends.base import Backend
from phalanx.collectives import ReduceOp
from phalanx.errors import MisuseError
from phalanx.parallel.clip import clip_, norm_here
from phalanx.parallel.tensor.layer import owners
from phalanx.parallel.tensor.moves import Ranks, all_reduce
from phalanx.parallel.wrapper import Wrapper

NAME = "clip_grad_norm_"


@torch.no_grad()
def clip_grad_norm_(
    module: nn.Module, max_norm: float, *, norm_type: float = 2.0, shards: Backend | None = None
) -> Tensor:
    """Scale the gradients of a model that ranks share, in place, so that their norm is bounded.

    module      a `Pipeline`, a model with parallel layers, or both; in DDP or FSDP, maybe
    max_norm    of all gradients together, as the plain model has them
    norm_type   a number above 0, or `inf` for the largest
    shards      for a model in FSDP, the ranks that it shards over, such as `mesh["data"]`

    Returns the norm before, float64, the same on every rank. What is cut counts on each rank for
    its part, a stage's layers on their rank, and what is whole counts once. (torch's function of
    this name would find another norm on each rank, and what is whole would drift apart.) Every rank
    calls it when gradients are final: after `backward()` or `train_step()`, with DDP too. Blocks
    for a message of one number to those with the other parts, for one to the other stages, and with
    `shards` for one to these. Raises `MisuseError` for shards if nobody says over which ranks.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type is a number above 0, or inf, not {norm_type}")
    wrappers = [part for part in module.modules() if isinstance(part, Wrapper)]
    if shards is None and not all(map(_is_whole, wrappers)):
        raise MisuseError(
            "clip_grad_norm_: this model's parameters are shards: say over which ranks, such as "
            'shards=mesh["data"]'
        )
    largest = norm_type == math.inf
    op, add = (ReduceOp.MAX, torch.maximum) if largest else (ReduceOp.SUM, torch.add)
    pipelines = [wrapper for wrapper in wrappers if wrapper.spreads]
    cut = owners(module)
    staged = {p: pipeline.backend for pipeline in pipelines for p in pipeline.parameters()}
    nothing = torch.zeros((), dtype=torch.float64)
    # By the ranks with the other parts, and those with the other stages; there are messages for
    # all of these, since others wait for them, whether there are gradients here or not.
    powers = {(cut.get(p), staged.get(p)): nothing for p in module.parameters()}
    trained = [parameter for parameter in module.parameters() if parameter.grad is not None]
    for parameter in trained:
        assert parameter.grad is not None
        norm = norm_here(parameter.grad, norm_type)
        place = cut.get(parameter), staged.get(parameter)
        powers[place] = add(powers[place], norm if largest else norm**norm_type)
    if shards is not None and powers:
        together = all_reduce(torch.stack(list(powers.values())), Ranks(shards, NAME), op)
        powers = dict(zip(powers, together, strict=True))
    totals = dict.fromkeys((None, *(p.backend for p in pipelines)), nothing)
    for (parts, stages), power in powers.items():
        whole = power if parts is None else all_reduce(power, Ranks(parts, NAME), op)
        totals[stages] = add(totals[stages], whole)
    for stages, power in totals.items():
        if stages is not None:
            totals[stages] = all_reduce(power, Ranks(stages, NAME), op)
    total = reduce(add, totals.values())
    total = total if largest else total ** (1 / norm_type)
    clip_(trained, total, max_norm)
    return total


def _is_whole(wrapper: Wrapper) -> bool:
    """Whether this rank has all of each parameter in it, but for what layers in it cut."""
    return wrapper.spreads or all(piece.is_whole for piece in wrapper.slices().values())
