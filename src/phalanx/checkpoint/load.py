"""`load_checkpoint`: what was saved, into a model on any number of ranks, with any strategy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from phalanx.checkpoint import state, storage
from phalanx.checkpoint.async_saves import AsyncSaves
from phalanx.checkpoint.group import CheckpointGroup
from phalanx.checkpoint.load_plan import LoadPlan, shown
from phalanx.checkpoint.manifest import Manifest, decode_manifest, from_json
from phalanx.checkpoint.storage import CheckpointFolder
from phalanx.checkpoint.tensor_files import Reader
from phalanx.core.backend import Backend
from phalanx.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointIOError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    MisuseError,
)


class Checkpoint(NamedTuple):
    """What was loaded.

    step         that it was saved with
    extra        what was saved beside the model
    folder       of the checkpoint, in the folder that was given
    world_size   how many ranks saved it
    """

    step: int
    extra: Any
    folder: Path
    world_size: int


def load_checkpoint(
    folder: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    backend: Backend | None = None,
    step: int | None = None,
    random_state: bool = True,
    timeout: float | None = None,
) -> Checkpoint:
    """Bring back what `save_checkpoint` has saved, in place; every rank calls it.

    folder        where checkpoints were saved; the newest one is loaded, after waiting for one that
                  is being written in the background. Or one checkpoint's own
    model         to load into; any way to split it over any number of ranks will do, whatever it
                  was when it was saved. None: only the step and `extra` are wanted; no
                  random state is brought back then
    optimizer     made from this model's parameters, fresh or not. Its groups get the options that
                  their parameters had (learning rates, too), and it the state
    backend       the ranks that load together; by default the model's, or this one by itself
    step          load the newest checkpoint of this step
    random_state  bring back torch's, Python's and NumPy's (if it is imported) random states. With
                  another number of ranks than was saved there is none for each: then every rank is
                  seeded with a hash of rank 0's, the number of ranks and its own
    timeout       seconds that a rank waits for the others at a time; by default 600, or the
                  backend's if that is more

    Blocks until every rank has read what it holds, checked it against the checksums, and found that
    it fits; only then is anything changed. Reads the blocks (4 MiB) that this rank has something
    in, and takes as much memory as it holds. Messages: the manifest, from rank 0.

    Raises, on every rank and with nothing changed, `CheckpointNotFoundError` (a FileNotFoundError);
    `CheckpointDamagedError` (a ValueError) for a file that is missing, truncated or altered, which
    it names, with the checkpoint that could be loaded instead; `CheckpointMismatchError` (a
    ValueError) for a model or optimizer that it does not fit, naming what is missing, not expected,
    or of another shape or dtype, and for state that cannot be cut for this many ranks;
    `CheckpointIOError`; `MisuseError` for an optimizer without its model. `CollectiveTimeoutError`,
    `PeerLostError`, `DesyncError`.
    """
    backend = backend if backend is not None else state.backend_of(model)
    state.check_layer_parts_apart(model, backend, os.path.abspath(folder), "load_checkpoint")
    group = CheckpointGroup(backend, "load_checkpoint", timeout)
    load = _Load(group, os.path.abspath(folder))
    load.find(step)
    load.read(model, optimizer)
    return load.apply(random_state)


class _Load:
    """One rank's part in one load: find, read, and, when all ranks have read, apply."""

    _path: str
    _manifest: Manifest
    _plan: LoadPlan | None = None
    _extra: Any
    _rng: Tensor
    _random_states: dict[str, Any]

    def __init__(self, group: CheckpointGroup, folder: str) -> None:
        self._group = group
        self._path = self._folder = folder

    def find(self, step: int | None) -> None:
        """Rank 0 finds the checkpoint and sends the others its manifest."""

        def look() -> tuple[str, bytes, bytes]:
            AsyncSaves.on(self._group.backend).wait()
            self._path = find(self._folder, step)
            return os.path.relpath(self._path, self._folder), *read_manifest(self._path)

        with self._offering_another():
            name, commit, manifest = self._group.on_rank0(look)
        self._path = os.path.normpath(os.path.join(self._folder, name))
        self._manifest = decode_manifest(self._path, commit, manifest)

    def read(self, model: nn.Module | None, optimizer: torch.optim.Optimizer | None) -> None:
        """Check that it fits, and read what this rank needs, on all ranks."""
        with self._offering_another():
            unused = self._group.on_all(lambda: self._read(model, optimizer))
        nobodys = set(unused[0]).intersection(*unused[1:])
        if nobodys:
            names = shown([name for name in unused[0] if name in nobodys])
            problem = f"the model has no place for {names}, which the checkpoint has"
            raise self._group.error(
                CheckpointMismatchError.__name__, f"{self._path} does not fit: {problem}"
            )

    def _read(self, model: nn.Module | None, optimizer: torch.optim.Optimizer | None) -> list[str]:
        """Read, and return what the checkpoint has and the model of this rank does not."""
        manifest, reader = self._manifest, Reader(self._path, self._manifest)
        if model is not None:
            try:
                self._plan = LoadPlan(manifest, reader, state.model_state(model), optimizer)
            except CheckpointMismatchError as error:
                raise CheckpointMismatchError(
                    f"{self._path} does not fit: {error.message}"
                ) from error
        elif optimizer is not None:
            raise MisuseError("an optimizer is loaded with its model: give model=, too")
        self._rng = reader.whole(manifest.rng[self._group.rank if self._same_size else 0])
        reader.value(manifest.extra)
        reader.read()
        try:
            self._random_states = state.check_random_state(self._rng)
            self._extra = from_json(manifest.extra, reader.whole)
        except (ValueError, TypeError, KeyError) as error:
            raise CheckpointDamagedError(f"{self._path} cannot be read: {error}") from error
        return self._plan.unused if self._plan is not None else []

    @property
    def _same_size(self) -> bool:
        """Whether there is a random state for each rank."""
        return len(self._manifest.rng) == self._group.size

    def apply(self, random_state: bool) -> Checkpoint:
        """Change the model, the optimizer and the random states."""
        if self._plan is not None:
            self._plan.apply()
            if random_state and self._same_size:
                state.restore_random_state(self._random_states)
            elif random_state:
                state.reseed(self._rng, self._group.rank, self._group.size)
        manifest = self._manifest
        return Checkpoint(manifest.step, self._extra, Path(self._path), manifest.world_size)

    @contextmanager
    def _offering_another(self) -> Iterator[None]:
        """Around what all ranks do: a damaged checkpoint's error names one to load instead."""
        try:
            yield
        except (CheckpointDamagedError, CheckpointIOError) as error:
            error.message += self._group.on_rank0(lambda: instead_of(self._path))
            raise


# ------------------------------------------------------------------------------
# Finding a checkpoint, and another one if it is damaged


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """The folder of the newest checkpoint in `folder`; None if there is none, or no such folder.

    Its files are not looked at. Nothing is sent: the answer is this rank's.
    """
    try:
        found = storage.committed(os.fspath(folder))
    except FileNotFoundError:
        return None
    return Path(found[-1].path) if found else None


def find(folder: str, step: int | None) -> str:
    """The folder of a checkpoint: `folder` itself, or the newest one in it, or that of a step.

    Raises `CheckpointNotFoundError`.
    """
    if os.path.lexists(os.path.join(folder, storage.COMMIT)):
        own = storage.parse(folder)
        if step is None or own is None or own.step == step:
            return folder
    try:
        found = storage.committed(folder)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointNotFoundError(f"there is no folder {folder}") from None
    if step is not None:
        steps = sorted({each.step for each in found})
        found = [each for each in found if each.step == step]
        if not found:
            have = f"those of steps {', '.join(map(str, steps))}" if steps else "none"
            raise CheckpointNotFoundError(
                f"there is no checkpoint of step {step} in {folder}, which has {have}"
            )
    if not found:
        left = storage.numbered(folder)
        hint = f": {left[-1].path} was never committed" if left else ""
        raise CheckpointNotFoundError(f"there is no checkpoint in {folder}{hint}")
    return found[-1].path


def read_manifest(path: str) -> tuple[bytes, bytes]:
    """The commit record and the manifest of a checkpoint, as bytes.

    Raises `CheckpointDamagedError` if one is missing, or not as it was written.
    """
    contents = []
    for name in (storage.COMMIT, storage.MANIFEST):
        file = os.path.join(path, name)
        try:
            contents.append(storage.read_file(file))
        except FileNotFoundError:
            raise CheckpointDamagedError(f"{file} is missing") from None
    commit, manifest = contents
    decode_manifest(path, commit, manifest)
    return commit, manifest


def instead_of(path: str) -> str:
    """A sentence that offers a checkpoint instead of a damaged one: the newest before it whose
    files are all there, else one after it.

    Or says that this one has been removed meanwhile: a save in the folder keeps only so many.
    """
    path = os.path.abspath(path)
    folder, this = os.path.dirname(path), storage.parse(path)
    number = this.number if this is not None else -1
    try:
        others = [each for each in storage.committed(folder) if each.number != number]
    except OSError:
        others = []
    if not os.path.lexists(os.path.join(path, storage.COMMIT)):
        return ". It was removed while it was being read: load the one that is the newest now"
    for other in sorted(others, key=lambda each: (each.number > number, abs(each.number - number))):
        if _looks_whole(other):
            which = "previous" if other.number < number else "next"
            return (
                f". The {which} checkpoint, of step {other.step}, is all there: load it with "
                f'load_checkpoint("{other.path}", ...)'
            )
    return f". No other checkpoint in {folder} is all there"


def _looks_whole(folder: CheckpointFolder) -> bool:
    """Whether its manifest is as it was written, and its files have their sizes."""
    try:
        manifest = decode_manifest(folder.path, *read_manifest(folder.path))
        return all(
            storage.size_of(os.path.join(folder.path, file.name)) == file.bytes
            for file in manifest.files
        )
    except (OSError, CheckpointError):
        return False
