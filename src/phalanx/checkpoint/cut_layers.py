"""Models of which ranks hold different parts under the same names: a checkpoint for each part.

    rank 0   tensor 0   data 0  --\\
    rank 2   tensor 0   data 1  --/  folder/tensor0        saved together: what they hold is equal,
    rank 1   tensor 1   data 0  --\\                        or shards of one
    rank 3   tensor 1   data 1  --/  folder/tensor1

Parts of equal shapes would pass for copies of one another, of which one is kept.
"""

from __future__ import annotations

from torch import nn

from phalanx.backends.base import Backend
from phalanx.collectives import all_gather_object
from phalanx.errors import CheckpointMismatchError
from phalanx.parallel.tensor.layer import ParallelLayer


def check_parts_are_apart(
    model: nn.Module | None, backend: Backend | None, folder: str, op: str
) -> None:
    """Raise `CheckpointMismatchError`, on every rank, if parts of one layer meet in one checkpoint.

    That is, if ranks that share a parallel layer save or load together, or in the same folder.
    Blocks, for a model with such layers, until the ranks that share one have told their folders.
    """
    if model is None:
        return
    for name, layer in model.named_modules():
        if not isinstance(layer, ParallelLayer) or layer.backend.world_size == 1:
            continue
        sharing = layer.backend
        together = _members(backend) & _members(sharing) if backend is not None else set()
        folders = [] if len(together) > 1 else all_gather_object(folder, sharing)
        if len(together) > 1 or len(set(map(str, folders))) < len(folders):
            raise CheckpointMismatchError(
                f"{op}: rank {sharing.rank} of {sharing.world_size} that share {name} has its own "
                "part of it, and so has each of the others, under the same names: let ranks with "
                'the same part save and load together, in a folder for each part: mesh["data"] as '
                "the backend, or the wrapper's, and folder / f\"tensor{mesh['tensor'].rank}\". Or "
                "keep full_state_dict(model)",
                rank=sharing.rank,
                op=op,
            )
        return


def _members(backend: Backend) -> set[tuple[int, int]]:
    """The ranks of a group, as those of all groups that have the same connections."""
    return {(id(backend.engine), rank) for rank in backend.group.ranks}
