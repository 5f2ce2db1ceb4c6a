"""`load_checkpoint`: what was saved, into a model on any number of ranks, split in any way."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from phalanx.checkpoint import training_state as rng
from phalanx.checkpoint.fit import Loading, Reader, StateToLoad, fit, refuse_unused
from phalanx.checkpoint.manifest import (
    Manifest,
    decode_commit,
    decode_manifest,
    from_json,
    tensors_in,
)
from phalanx.checkpoint.model_parts import backend_of, check_parts_are_apart, parts_of
from phalanx.checkpoint.pending import Background
from phalanx.checkpoint.ranks import Ranks
from phalanx.checkpoint.storage import (
    COMMIT,
    MANIFEST,
    Numbered,
    committed,
    numbered,
    parse,
    read_file,
    size_of,
)
from phalanx.core.backend import Backend
from phalanx.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointIOError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    DistributedError,
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
    check_parts_are_apart(model, backend, os.path.abspath(folder), "load_checkpoint")
    ranks = Ranks(backend, "load_checkpoint", timeout)
    load = _Load(ranks, os.path.abspath(folder), model, optimizer)
    load.find(step)
    load.read()
    return load.apply(random_state)


class _Load:
    """One rank's part in one load."""

    def __init__(
        self,
        ranks: Ranks,
        folder: str,
        model: nn.Module | None,
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        self._ranks = ranks
        self._folder = folder
        self._model = model
        self._optimizer = optimizer
        self._path = folder

    def find(self, step: int | None) -> None:
        """Rank 0 finds the checkpoint and tells the others what is in it."""

        def look() -> tuple[str, bytes, bytes]:
            Background(self._ranks.backend).wait()
            self._path = find(self._folder, step)
            return os.path.relpath(self._path, self._folder), *read_manifest(self._path)

        name, commit, manifest = self._offering_another(lambda: self._ranks.on_first(look))
        self._path = os.path.normpath(os.path.join(self._folder, name))
        self._manifest: Manifest = decoded(self._path, commit, manifest)

    def read(self) -> None:
        """See that it fits, and read what this rank needs; agree with the others that it is so."""
        unused = self._offering_another(lambda: self._ranks.together(self._read))
        nobodys = set(unused[0]).intersection(*unused[1:])
        if nobodys:
            names = [name for name in unused[0] if name in nobodys]
            raise self._ranks.error(
                CheckpointMismatchError.__name__, self._about(refuse_unused(names))
            )

    def _about(self, problem: str) -> str:
        return f"{self._path} does not fit: {problem}"

    def _read(self) -> list[str]:
        if self._optimizer is not None and self._model is None:
            raise MisuseError("an optimizer is loaded with its model: give model=, too")
        self._parts = parts_of(self._model) if self._model is not None else None
        self._reader = Reader(self._path, self._manifest)
        try:
            loading = fit(self._manifest, self._reader, self._parts, self._optimizer)
        except CheckpointMismatchError as error:
            raise CheckpointMismatchError(self._about(error.message)) from error
        for name in (self._rng_name(), *tensors_in(self._manifest.extra)):
            self._reader.whole(name)
        own = self._own_names()
        for names in own:
            for name in names.values():
                self._reader.whole(name)
        self._reader.read()
        self._own = [
            {key: self._reader.whole(name) for key, name in names.items()} for names in own
        ]
        self._loading: Loading = loading
        self._rng = self._reader.whole(self._rng_name())
        try:
            self._states = rng.check(self._rng)
            self._extra = from_json(self._manifest.extra, self._reader.whole)
        except (ValueError, TypeError, KeyError) as error:
            raise CheckpointDamagedError(f"{self._path} cannot be read: {error}") from error
        return loading.unused

    def _own_names(self) -> list[dict[str, str]]:
        """For each wrapper of the model, what ranks have had of their own and this one needs."""
        found = []
        for number, wrapper in enumerate(self._parts.wrappers if self._parts is not None else []):
            prefix = f"own/{number}/"
            keys = [n[len(prefix) :] for n in self._manifest.state if n.startswith(prefix)]
            found.append({key: prefix + key for key in wrapper.needs(keys)})
        return found

    def _rng_name(self) -> str:
        names = self._manifest.rng
        return names[self._ranks.rank if len(names) == self._ranks.size else 0]

    def apply(self, random_state: bool) -> Checkpoint:
        """Put everything where it belongs."""
        wrappers = self._parts.wrappers if self._parts is not None else []
        with ExitStack() as writing, torch.no_grad():
            for wrapper in wrappers:
                writing.enter_context(wrapper.writing())
            for tensor, flat in self._loading.tensors:
                copy_bits(tensor.detach(), flat.view(tensor.shape))
        for wrapper, own in zip(wrappers, self._own, strict=True):
            wrapper.load_own_state(own)
        for module, value in self._loading.values:
            module.set_extra_state(from_json(value, self._reader.whole))
        if self._optimizer is not None:
            self._apply_optimizer(self._optimizer)
        random_state = random_state and self._model is not None
        if random_state and len(self._manifest.rng) == self._ranks.size:
            rng.bring_back(self._states)
        elif random_state:
            rng.reseed(self._rng, self._ranks.rank, self._ranks.size)
        return Checkpoint(
            self._manifest.step, self._extra, Path(self._path), self._manifest.world_size
        )

    def _apply_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        options = zip(optimizer.param_groups, self._loading.options, strict=True)
        for group, plain in options:
            for key, value in from_json(plain or {}, self._copy).items():
                if isinstance(group.get(key), Tensor) and isinstance(value, Tensor):
                    group[key].copy_(value)  # a captured graph knows this one
                else:
                    group[key] = value
        optimizer.state.clear()
        group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        for parameter, state in self._loading.state:
            if state:
                group = group_of[id(parameter)]
                optimizer.state[parameter] = {
                    key: self._placed(key, to_load, parameter, group)
                    for key, to_load in state.items()
                }
        for key, value in from_json(self._loading.shared or {}, self._copy).items():
            optimizer.state[key] = value

    def _placed(
        self, key: str, to_load: StateToLoad, parameter: Tensor, group: dict[str, Any]
    ) -> Any:
        """State where the optimizer wants it: by the parameter; but the number of steps is on the
        CPU, unless the options say otherwise.
        """
        if to_load.flat is not None:
            flat = to_load.flat.view(parameter.shape)
            if parameter.is_contiguous() and parameter.device == flat.device:
                return flat
            like = torch.empty_like(parameter, dtype=flat.dtype, requires_grad=False)
            copy_bits(like, flat)
            return like
        stays = key == "step" and not (group.get("capturable") or group.get("fused"))

        def tensor(name: str) -> Tensor:
            copy = self._copy(name)
            return copy if stays else copy.to(parameter.device)

        return from_json(to_load.value, tensor)

    def _copy(self, name: str) -> Tensor:
        """A tensor of a value: what the checkpoint has once may be kept in several places here."""
        return self._reader.whole(name).clone()

    def _offering_another(self, attempt: Any) -> Any:
        """Do what all ranks do; of a damaged checkpoint say which one could be loaded instead."""
        try:
            return attempt()
        except (CheckpointDamagedError, CheckpointIOError) as error:
            self._offer(error)
            raise

    def _offer(self, error: DistributedError) -> None:
        error.message += self._ranks.on_first(lambda: instead_of(self._path))


# ------------------------------------------------------------------------------
# Which checkpoint to load, and which one instead if that is damaged.


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
    """The commit record and the manifest of a checkpoint, as they are.

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
    """What these two say."""
    record = decode_commit(commit, os.path.join(path, COMMIT))
    return decode_manifest(manifest, record, os.path.join(path, MANIFEST))


def instead_of(path: str) -> str:
    """A sentence that offers the checkpoint before a damaged one, if its files are all there.

    Or says that this one is none any more: whoever saves in the folder keeps only so many.
    """
    folder, bad = os.path.dirname(os.path.abspath(path)), parse(os.path.abspath(path))
    try:
        others = [each for each in committed(folder) if bad is None or each.number != bad.number]
    except OSError:
        others = []
    if not os.path.lexists(os.path.join(path, COMMIT)):
        return ". It was removed while it was being read: load the one that is the newest now"
    before = [each for each in others if bad is not None and each.number < bad.number]
    after = [each for each in others if each not in before]
    for other in (*reversed(before), *after):
        if _looks_whole(other):
            which = "previous" if other in before else "next"
            return (
                f". The {which} checkpoint, of step {other.step}, is all there: load it with "
                f'load_checkpoint("{other.path}", ...)'
            )
    return f". No other checkpoint in {folder} is all there"


def _looks_whole(folder: Numbered) -> bool:
    try:
        manifest = decoded(folder.path, *read_manifest(folder.path))
        return all(
            size_of(os.path.join(folder.path, file.name)) == file.bytes for file in manifest.files
        )
    except (OSError, CheckpointError):
        return False
