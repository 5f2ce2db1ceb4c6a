"""`save_checkpoint`: the model and its training, as files that a kill cannot spoil."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn

from phalanx.backends.base import Backend
from phalanx.checkpoint import rng
from phalanx.checkpoint.background import Background
from phalanx.checkpoint.cut_layers import check_parts_are_apart
from phalanx.checkpoint.description import Description, Holdings
from phalanx.checkpoint.model_parts import backend_of, means_of, parts_of
from phalanx.checkpoint.optimizer_state import describe_optimizer
from phalanx.checkpoint.pending import PendingSave
from phalanx.checkpoint.ranks import Ranks
from phalanx.checkpoint.saving import Saving
from phalanx.errors import MisuseError


def save_checkpoint(
    folder: str | os.PathLike[str],
    *,
    model: nn.Module,
    step: int,
    optimizer: torch.optim.Optimizer | None = None,
    extra: object = None,
    backend: Backend | None = None,
    keep: int | None = 3,
    async_save: bool = False,
    timeout: float | None = None,
) -> PendingSave:
    """Write a new checkpoint into `folder`, in a numbered folder of its own; every rank calls it.

    folder      one that all ranks see; made if it is not there
    model       a plain module, DDP, FSDP, or a module with such in it. Each rank writes what it
                holds; what several ranks hold one of them writes, so that all write about as much.
                Parameters, and the buffers and extra state that a state dict has, those as rank 0
                has them; what each rank has of its own (DDP's compression), as it has it. Of
                LocalSGD and DiLoCo, where ranks have different parameters: the means, and each
                rank's own, with its optimizer's state
    step        how far training is, 0 or more
    optimizer   of these parameters
    extra       rank 0's is kept: None, bool, int, float, str, bytes, tensors, and lists, tuples
                and dicts of them, such as the state of a learning rate schedule
    backend     the ranks that save together; by default the model's, or this one by itself. With
                layers that are cut over ranks (`parallelize`), those that have the same part of
                them, in a folder of their own
    keep        afterwards only the last so many checkpoints are left; None: all
    async_save  return when this rank's part is copied, and write in the background. The copy takes
                as much memory as the rank writes. A later save waits for an earlier one; before the
                backend is closed, `wait()` has to be called. Under `phalanx.simulate`, where one
                thread runs at a time, it is written at once
    timeout     seconds that a rank waits for the others at a time; by default 600, or the
                backend's if that is more

    Random states (torch, Python, NumPy if it is imported, the current GPU) are kept for each rank.

    Blocks until the checkpoint is committed: all files and folders are safe on disk (fsync), and
    the commit record with them, which was written last. Killed at any moment, or without room, or
    with a disk that fails, what was committed before stays as it is, and is what `load_checkpoint`
    finds; what is left of the new one is removed, at the latest by the next save. Nothing is ever
    overwritten. Messages: descriptions of the tensors, not their values.

    If it fails, it fails on every rank. Raises `CheckpointIOError` (an OSError) that names the
    rank, the file and the errno; `CheckpointMismatchError` for ranks that do not hold one model
    together; `MisuseError` for an optimizer with a parameter that is not the model's, and for ranks
    that ask for different things; `UnsupportedObjectError` (a TypeError) for an `extra` that cannot
    be kept: all but the first before anything is written. `CollectiveTimeoutError`,
    `PeerLostError`, `DesyncError`.
    """
    backend = backend if backend is not None else backend_of(model)
    check_parts_are_apart(model, backend, os.path.abspath(folder), "save_checkpoint")
    ranks = Ranks(backend, "save_checkpoint", timeout)
    background = Background(backend)
    mine = Holdings()

    means = means_of(model, ranks.timeout)

    def describe() -> bytes:
        background.settle()
        described = _describe(mine, ranks, model, means, step, optimizer, extra)
        described.asked = [f"step={step}", f"keep={keep}", f"async_save={async_save}"]
        described.fresh = async_save and background.needs_group
        _check_options(step, keep)
        return msgspec.json.encode(described)

    described = [msgspec.json.decode(each, type=Description) for each in ranks.together(describe)]
    save = Saving(ranks, os.path.abspath(folder), operator.index(step), keep, mine, described)
    save.open()
    pending = PendingSave(Path(save.path), save.step, save.write_and_commit)
    if not async_save or background.impossible:
        return pending.run()
    save.copy()
    group = background.group(fresh=any(each.fresh for each in described))
    save.ranks = Ranks(group, ranks.op, ranks.timeout)
    return background.start(pending)


def _check_options(step: int, keep: int | None) -> None:
    if operator.index(step) < 0:
        raise MisuseError(f"step must be 0 or more, not {step}")
    if keep is not None and operator.index(keep) < 1:
        raise MisuseError(f"keep must be 1 or more, or None for all, not {keep}")


def _describe(
    mine: Holdings,
    ranks: Ranks,
    model: nn.Module,
    means: Mapping[Tensor, Tensor],
    step: int,
    optimizer: torch.optim.Optimizer | None,
    extra: object,
) -> Description:
    parts = parts_of(model)
    values = mine.add_model(parts, means)
    about = describe_optimizer(optimizer, parts.parameters, mine) if optimizer else None
    for number, wrapper in enumerate(parts.wrappers):
        for key, tensor in wrapper.own_state().items():  # keys say whose they are
            mine.add("state", f"own/{number}/{key}", tensor, equal=False)
    state = f"rng/{ranks.rank}"
    mine.add("state", state, rng.capture(), equal=False)
    kept = mine.json(extra, "extra") if ranks.rank == 0 else None
    return Description([], mine.held, parts.aliases, values, about, state, kept)
