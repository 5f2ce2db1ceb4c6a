"""The ranks that save or load together: an error on one of them is an error on all."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from phalanx import errors
from phalanx.checkpoint.state import wrappers_of
from phalanx.collectives import all_gather_object
from phalanx.core.backend import Backend, SubBackend
from phalanx.tensor.layer import ParallelLayer

T = TypeVar("T")
_LONGEST = 4000  # characters of an error, which may quote a file
_TIMEOUT = 600.0  # seconds: disks are slow, and not all are equally slow
_SHARED = (errors.CheckpointError, errors.MisuseError, errors.UnsupportedOperationError)


class CheckpointGroup:
    """This rank and the others; without a backend it is alone.

    op        their operation, for errors
    folder    of the checkpoint, for errors that do not name it
    timeout   seconds that a rank waits for the others at a time; by default ten minutes, or the
              backend's if that is more
    """

    def __init__(
        self, backend: Backend | None, op: str, timeout: float | None, folder: str = "a checkpoint"
    ) -> None:
        self.backend = backend
        self.op = op
        self._folder = folder
        self.rank = backend.rank if backend is not None else 0
        self.size = backend.world_size if backend is not None else 1
        default = max(_TIMEOUT, backend.timeout) if backend is not None else _TIMEOUT
        self.timeout = timeout if timeout is not None else default

    def on_all(self, attempt: Callable[[], T]) -> list[T]:
        """Call `attempt` on every rank; return all results, in rank order. Block until all have
        theirs.

        Results are of the types that `all_gather_object` takes. If an Exception is raised on any
        rank, every rank raises an error of that kind, which names the first such rank. If another
        rank is lost meanwhile, this rank's exception is the cause of the error.
        """
        failure: Exception | None = None
        outcome: tuple[Any, str, str, int | None]  # result, or kind of error, problem and errno
        try:
            outcome = (attempt(), "", "", None)
        except Exception as error:
            failure = error
            kind, problem, number = _described(error, self._folder)
            outcome = (None, kind, errors.plain(problem, _LONGEST), number)
        outcomes: list[Any] = [outcome]
        if self.backend is not None:
            try:
                outcomes = all_gather_object(outcome, self.backend, timeout=self.timeout)
            except errors.DistributedError as error:
                error.__cause__ = error.__cause__ or failure
                raise
        for rank, (_, kind, problem, number) in enumerate(outcomes):
            if kind:
                where = f"rank {rank}: " if self.size > 1 else ""
                told: errors.DistributedError = getattr(errors, kind, errors.CheckpointError)(
                    f"{self.op}: {where}{problem}", rank=self.rank, peer=rank, op=self.op
                )
                if isinstance(told, errors.CheckpointIOError):
                    told.errno = number
                raise told from failure
        return [result for result, *_ in outcomes]

    def on_rank0(self, attempt: Callable[[], T]) -> T:
        """Call `attempt` on rank 0; return its result on every rank. Raise as `on_all` does."""
        return self.on_all(attempt if self.rank == 0 else lambda: None)[0]  # type: ignore[return-value]


def _described(error: Exception, folder: str) -> tuple[str, str, int | None]:
    """Return the kind of an error to raise on all ranks, its text, and its errno."""
    if isinstance(error, errors.DistributedError):
        kind = type(error).__name__ if isinstance(error, _SHARED) else "CheckpointError"
        return kind, error.message, getattr(error, "errno", None)
    if isinstance(error, OSError):
        name = errno.errorcode.get(error.errno or 0, "?")
        path = error.filename if error.filename is not None else "a file"
        why = f"{error.strerror or error} ({name}, errno {error.errno or 0})"
        return "CheckpointIOError", f"{path}: {why}", error.errno
    return "CheckpointError", f"{folder}: {type(error).__name__}: {error}", None


# ------------------------------------------------------------------------------
# Which ranks these are


def group_for(
    model: nn.Module | None,
    backend: Backend | None,
    folder: str,
    op: str,
    timeout: float | None,
    *,
    of_parts: bool = False,
) -> CheckpointGroup:
    """Return the ranks of `backend`, by default the model's, or this one by itself.

    of_parts   whether the group may have ranks with different parts of one layer

    Raises `MisuseError` for a model that has several backends, and as `_check_layer_parts_apart`.
    """
    if backend is None and model is not None:
        backends = {id(wrapper.backend): wrapper.backend for wrapper in wrappers_of(model).values()}
        if len(backends) > 1:
            raise errors.MisuseError(
                "the model has parts on different backends: say with backend= which ranks save or "
                "load it together"
            )
        backend = next(iter(backends.values()), None)
    if model is not None and not of_parts:
        _check_layer_parts_apart(model, backend, folder, op)
    return CheckpointGroup(backend, op, timeout, folder)


# ------------------------------------------------------------------------------
# Tensor-parallel layers: ranks hold different parts under the same names
#
#   rank 0   tensor 0   data 0  --\
#   rank 2   tensor 0   data 1  --/  folder/tensor0        saved together: replicas, or FSDP shards
#   rank 1   tensor 1   data 0  --\
#   rank 3   tensor 1   data 1  --/  folder/tensor1
#
# Saved together, parts of equal shapes would count as replicas, of which only one is written.


def _check_layer_parts_apart(
    model: nn.Module, backend: Backend | None, folder: str, op: str
) -> None:
    """Raise `CheckpointMismatchError`, on every rank, if parts of one layer meet in one checkpoint.

    That is, if ranks that share a parallel layer save or load together, or in one folder. For a
    model with such layers, blocks until the ranks that share one have exchanged folders.
    """
    for name, layer in model.named_modules():
        if not isinstance(layer, ParallelLayer) or layer.backend.world_size == 1:
            continue
        sharing = layer.backend
        together = _members(backend) & _members(sharing) if backend is not None else set()
        folders = [] if len(together) > 1 else all_gather_object(folder, sharing)
        if len(together) > 1 or len(set(map(str, folders))) < len(folders):
            raise errors.CheckpointMismatchError(
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
    """Return the ranks of a group, numbered alike in all groups that were made of one backend."""
    whole = backend
    while isinstance(whole, SubBackend):
        whole = whole.parent
    return {(id(whole), rank) for rank in backend.ranks}
