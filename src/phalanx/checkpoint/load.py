"""`load_checkpoint`: what was saved, into a model on any number of ranks, with any strategy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from phalanx.checkpoint.async_saves import AsyncSaves
from phalanx.checkpoint.group import CheckpointGroup
from phalanx.checkpoint.load_plan import LoadedState, LoadPlan, shown
from phalanx.checkpoint.manifest import (
    Manifest,
    decode_commit,
    decode_manifest,
    from_json,
    tensors_in,
)
from phalanx.checkpoint.state import (
    ModelState,
    backend_of,
    check_layer_parts_apart,
    check_random_state,
    model_state,
    reseed,
    restore_random_state,
)
from phalanx.checkpoint.storage import (
    COMMIT,
    MANIFEST,
    CheckpointFolder,
    committed,
    numbered,
    parse,
    read_file,
    size_of,
)
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
from phalanx.wire.memory import copy_bits


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
    backend = backend if backend is not None else backend_of(model)
    check_layer_parts_apart(model, backend, os.path.abspath(folder), "load_checkpoint")
    group = CheckpointGroup(backend, "load_checkpoint", timeout)
    load = _Load(group, os.path.abspath(folder), model, optimizer)
    load.find(step)
    load.read()
    return load.apply(random_state)


class _Load:
    """One rank's part in one load: find, read, and, when all ranks have read, apply."""

    _manifest: Manifest
    _plan: LoadPlan
    _reader: Reader
    _rng: Tensor
    _random_states: dict[str, Any]
    _extra: Any
    _own: list[dict[str, str]]

    def __init__(
        self,
        group: CheckpointGroup,
        folder: str,
        model: nn.Module | None,
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        self._group = group
        self._folder = folder
        self._path = folder
        self._model = model
        self._optimizer = optimizer
        self._state = ModelState({}, {}, {}, {}, [])

    def find(self, step: int | None) -> None:
        """Rank 0 finds the checkpoint and sends the others its manifest."""

        def look() -> tuple[str, bytes, bytes]:
            AsyncSaves.on(self._group.backend).wait()
            self._path = find(self._folder, step)
            return os.path.relpath(self._path, self._folder), *read_manifest(self._path)

        with self._offering_another():
            name, commit, manifest = self._group.on_rank0(look)
        self._path = os.path.normpath(os.path.join(self._folder, name))
        self._manifest = decoded(self._path, commit, manifest)

    def read(self) -> None:
        """Check that it fits, and read what this rank needs, on all ranks."""
        with self._offering_another():
            unused = self._group.on_all(self._read)
        nobodys = set(unused[0]).intersection(*unused[1:])
        if nobodys:
            names = shown([name for name in unused[0] if name in nobodys])
            problem = f"the model has no place for {names}, which the checkpoint has"
            raise self._group.error(
                CheckpointMismatchError.__name__, f"{self._path} does not fit: {problem}"
            )

    def _read(self) -> list[str]:
        if self._optimizer is not None and self._model is None:
            raise MisuseError("an optimizer is loaded with its model: give model=, too")
        manifest = self._manifest
        reader = self._reader = Reader(self._path, manifest)
        model = model_state(self._model) if self._model is not None else None
        try:
            self._plan = LoadPlan(manifest, reader, model, self._optimizer)
        except CheckpointMismatchError as error:
            raise CheckpointMismatchError(f"{self._path} does not fit: {error.message}") from error
        self._state = model or self._state
        self._own = []
        for number, wrapper in enumerate(self._state.wrappers):
            prefix = f"own/{number}/"
            keys = [name[len(prefix) :] for name in manifest.state if name.startswith(prefix)]
            self._own.append({key: prefix + key for key in wrapper.needs(keys)})
        rng = manifest.rng[self._group.rank if self._has_random_states() else 0]
        self._rng = reader.whole(rng)
        for name in (*tensors_in(manifest.extra), *(n for own in self._own for n in own.values())):
            reader.whole(name)
        reader.read()
        try:
            self._random_states = check_random_state(self._rng)
            self._extra = from_json(manifest.extra, reader.whole)
        except (ValueError, TypeError, KeyError) as error:
            raise CheckpointDamagedError(f"{self._path} cannot be read: {error}") from error
        return self._plan.unused

    def _has_random_states(self) -> bool:
        """Whether there is one for each rank."""
        return len(self._manifest.rng) == self._group.size

    def apply(self, random_state: bool) -> Checkpoint:
        """Change the model, the optimizer and the random states."""
        wrappers, whole = self._state.wrappers, self._reader.whole
        with ExitStack() as writing, torch.no_grad():
            for wrapper in wrappers:
                writing.enter_context(wrapper.writing())
            for tensor, flat in self._plan.tensors:
                copy_bits(tensor.detach(), flat.view(tensor.shape))
        for wrapper, own in zip(wrappers, self._own, strict=True):
            wrapper.load_own_state({key: whole(name) for key, name in own.items()})
        for module, value in self._plan.values:
            module.set_extra_state(from_json(value, whole))
        if self._optimizer is not None:
            self._apply_optimizer(self._optimizer)
        if random_state and self._model is not None:
            if self._has_random_states():
                restore_random_state(self._random_states)
            else:
                reseed(self._rng, self._group.rank, self._group.size)
        manifest = self._manifest
        return Checkpoint(manifest.step, self._extra, Path(self._path), manifest.world_size)

    def _apply_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        for group, options in zip(optimizer.param_groups, self._plan.options, strict=True):
            for key, value in from_json(options or {}, self._copy).items():
                if isinstance(group.get(key), Tensor) and isinstance(value, Tensor):
                    group[key].copy_(value)  # a captured graph refers to this tensor
                else:
                    group[key] = value
        optimizer.state.clear()
        group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        for parameter, state in self._plan.state:
            if state:
                group = group_of[id(parameter)]
                optimizer.state[parameter] = {
                    key: self._placed(key, loaded, parameter, group)
                    for key, loaded in state.items()
                }
        optimizer.state.update(from_json(self._plan.shared or {}, self._copy))

    def _placed(
        self, key: str, loaded: LoadedState, parameter: Tensor, group: dict[str, Any]
    ) -> Any:
        """State where the optimizer expects it: on the parameter's device; but the number of steps
        on the CPU, unless the options say otherwise.
        """
        if loaded.flat is not None:
            flat = loaded.flat.view(parameter.shape)
            if parameter.is_contiguous() and parameter.device == flat.device:
                return flat
            like = torch.empty_like(parameter, dtype=flat.dtype, requires_grad=False)
            copy_bits(like, flat)
            return like
        on_cpu = key == "step" and not (group.get("capturable") or group.get("fused"))
        device = torch.device("cpu") if on_cpu else parameter.device
        return from_json(loaded.value, lambda name: self._copy(name).to(device))

    def _copy(self, name: str) -> Tensor:
        """A tensor of a value; several values may refer to one stored tensor."""
        return self._reader.whole(name).clone()

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
        found = committed(os.fspath(folder))
    except FileNotFoundError:
        return None
    return Path(found[-1].path) if found else None


def find(folder: str, step: int | None) -> str:
    """The folder of a checkpoint: `folder` itself, or the newest one in it, or that of a step.

    Raises `CheckpointNotFoundError`.
    """
    if os.path.lexists(os.path.join(folder, COMMIT)):
        own = parse(folder)
        if step is None or own is None or own.step == step:
            return folder
    try:
        found = committed(folder)
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
        left = numbered(folder)
        hint = f": {left[-1].path} was never committed" if left else ""
        raise CheckpointNotFoundError(f"there is no checkpoint in {folder}{hint}")
    return found[-1].path


def read_manifest(path: str) -> tuple[bytes, bytes]:
    """The commit record and the manifest of a checkpoint, as bytes.

    Raises `CheckpointDamagedError` if one is missing, or not as it was written.
    """
    contents = []
    for name in (COMMIT, MANIFEST):
        file = os.path.join(path, name)
        try:
            contents.append(read_file(file))
        except FileNotFoundError:
            raise CheckpointDamagedError(f"{file} is missing") from None
    commit, manifest = contents
    decoded(path, commit, manifest)
    return commit, manifest


def decoded(path: str, commit: bytes, manifest: bytes) -> Manifest:
    """The manifest of these bytes, checked."""
    record = decode_commit(commit, os.path.join(path, COMMIT))
    return decode_manifest(manifest, record, os.path.join(path, MANIFEST))


def instead_of(path: str) -> str:
    """A sentence that offers a checkpoint instead of a damaged one: the newest before it whose
    files are all there, else one after it.

    Or says that this one has been removed meanwhile: a save in the folder keeps only so many.
    """
    path = os.path.abspath(path)
    folder, this = os.path.dirname(path), parse(path)
    number = this.number if this is not None else -1
    try:
        others = [each for each in committed(folder) if each.number != number]
    except OSError:
        others = []
    if not os.path.lexists(os.path.join(path, COMMIT)):
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
        manifest = decoded(folder.path, *read_manifest(folder.path))
        return all(
            size_of(os.path.join(folder.path, file.name)) == file.bytes for file in manifest.files
        )
    except (OSError, CheckpointError):
        return False
