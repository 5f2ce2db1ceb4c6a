"""`load_checkpoint`: load a checkpoint into a model on any number of ranks, with any strategy."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from phalanx import files
from phalanx.checkpoint import state, storage
from phalanx.checkpoint.async_saves import wait_for_latest
from phalanx.checkpoint.group import CheckpointGroup, group_for
from phalanx.checkpoint.manifest import (
    MOST_BYTES,
    Json,
    Manifest,
    OptimizerRecord,
    StateRecord,
    decode_manifest,
    from_json,
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
    plain,
)
from phalanx.optim.sharded import options_of
from phalanx.wire.memory import copy_bits

_SHOWN = 8  # names in a message


class Checkpoint(NamedTuple):
    """The loaded checkpoint, beside model and optimizer.

    step         of the save
    extra        the value saved beside the model
    folder       of the checkpoint, in the folder that was given
    world_size   number of ranks that saved it
    own          the ranks' own values. If `world_size` ranks load it, the one that this rank
    saved; else the list of those of all ranks, in their order: the caller
    decides what becomes of them. None if no rank saved any
    """

    step: int
    extra: Any
    folder: Path
    world_size: int
    own: Any = None


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
                  was when it was saved. None: only the step, `extra` and `own` are wanted; no
                  random state is brought back then
    optimizer     made from this model's parameters, fresh or not. Its groups get the options that
                  their parameters had (learning rates, too), and it gets the state
    backend       the ranks that load together; by default the model's, or this one by itself
    step          load the newest checkpoint of this step
    random_state  bring back torch's, Python's and NumPy's (if it is imported) random states. With
                  another number of ranks than was saved there is none for each: then every rank is
                  seeded with a hash of rank 0's, the number of ranks and its own
    timeout       seconds that a rank waits for the others at a time; by default 600, or the
                  backend's if that is more

    Blocks until every rank has read its part, checked it against the checksums, and found that it
    fits; only then is anything changed. Reads the blocks (4 MiB) that this rank has something in,
    and takes as much memory as it holds. Messages: the manifest, from rank 0.

    Raises, on every rank and with nothing changed, `CheckpointNotFoundError` (a FileNotFoundError);
    `CheckpointDamagedError` (a ValueError) for a file that is missing, truncated or altered, which
    it names, with the checkpoint that could be loaded instead; `CheckpointMismatchError` (a
    ValueError) for a model or optimizer that it does not fit, naming the missing, unexpected or
    different tensor; also for state that cannot be cut for this many ranks; `CheckpointIOError`;
    `MisuseError` for an optimizer without its model. `CollectiveTimeoutError`, `PeerLostError`,
    `DesyncError`.
    """
    folder = os.path.abspath(folder)
    load = _Load(group_for(model, backend, folder, "load_checkpoint", timeout), folder)
    return load.run(step, model, optimizer, random_state)


class _Load:
    """One rank's part in one load: find, read, and, when all ranks have read, apply."""

    _loaded: Checkpoint
    _restore_random_state: Callable[[], None]

    def __init__(self, group: CheckpointGroup, folder: str) -> None:
        self._group = group
        self._path = self._folder = folder
        self._changes: list[Iterator[list[str]]] = []

    def run(
        self,
        step: int | None,
        model: nn.Module | None,
        optimizer: torch.optim.Optimizer | None,
        random_state: bool,
    ) -> Checkpoint:
        try:
            name, records = self._group.on_rank0(lambda: self._find(step))
            self._path = os.path.normpath(os.path.join(self._folder, name))
            unused = self._group.on_all(lambda: self._read(records, model, optimizer))
        except (CheckpointDamagedError, CheckpointIOError) as error:
            error.message += self._group.on_rank0(lambda: instead_of(self._path))
            raise
        nobodys = set(unused[0]).intersection(*unused[1:])
        if nobodys:
            names = shown([name for name in unused[0] if name in nobodys])
            raise CheckpointMismatchError(
                f"{self._group.op}: {self._path} does not fit: the model has no place for {names}, "
                "which the checkpoint has",
                rank=self._group.rank,
                op=self._group.op,
            )
        for change in self._changes:
            next(change, None)
        if self._changes and random_state:
            self._restore_random_state()
        return self._loaded

    def _find(self, step: int | None) -> tuple[str, list[bytes]]:
        """Return the checkpoint's place in the folder, and its commit record and manifest as
        bytes.
        """
        wait_for_latest(self._group.backend)
        self._path = find(self._folder, step)
        return os.path.relpath(self._path, self._folder), read_records(self._path)

    def _read(
        self,
        records: list[bytes],
        model: nn.Module | None,
        optimizer: torch.optim.Optimizer | None,
    ) -> list[str]:
        """Read; return the names in the checkpoint that the model of this rank lacks."""
        manifest = decode_manifest(self._path, *records)
        reader = Reader(self._path, manifest)
        unused: list[str] = []
        if model is not None:
            held = state.model_state(model)
            self._changes.append(into_model(held, manifest, reader))
            if optimizer is not None:
                self._changes.append(into_optimizer(optimizer, held, manifest, reader))
        elif optimizer is not None:
            raise MisuseError("an optimizer is loaded with its model: give model=, too")
        try:
            for change in self._changes:
                unused += next(change)
        except CheckpointMismatchError as error:
            raise CheckpointMismatchError(f"{self._path} does not fit: {error.message}") from error
        rank, size = self._group.rank, self._group.size
        as_many = len(manifest.rng) == size  # there is a random state for each rank
        rng = reader.whole(manifest.rng[rank if as_many else 0])
        own = manifest.own[rank] if as_many and manifest.own else manifest.own or None
        for value in (manifest.extra, own):
            reader.request(value)
        reader.read()
        try:
            random_states = state.check_random_state(rng)
        except ValueError as error:
            raise CheckpointDamagedError(f"{self._path} cannot be read: {error}") from error
        self._restore_random_state = (
            partial(state.restore_random_state, random_states)
            if as_many
            else partial(state.reseed, rng, rank, size)
        )
        extra, own = (from_json(value, reader.whole) for value in (manifest.extra, own))
        path, world_size = Path(self._path), manifest.world_size
        self._loaded = Checkpoint(manifest.step, extra, path, world_size, own)
        return unused


# ------------------------------------------------------------------------------
# The fit of a checkpoint, and this rank's part of it
#
# A generator for each thing to load into. It raises `CheckpointMismatchError`, or requests tensors
# from the reader and yields the names in the checkpoint that are not here. When all ranks have read
# their tensors it is resumed, and changes what it was made for, in place.


def into_model(model: state.ModelState, manifest: Manifest, reader: Reader) -> Iterator[list[str]]:
    """Load parameters, buffers and wrappers' own state."""
    here = {**model.parameters, **model.buffers}
    there = {name: manifest.aliases.get(name, name) for name in here}
    _check_model(model, there, manifest)
    records = {name: manifest.model[stored] for name, stored in there.items()}
    loaded = [(has.tensor, reader.part(records[name], has.slice)) for name, has in here.items()]
    for key in model.stateful:
        reader.request(manifest.values[key])
    own_states = []
    for name, wrapper in model.wrappers.items():
        prefix = f"own/{name}/"
        keys = [name.removeprefix(prefix) for name in manifest.state if name.startswith(prefix)]
        own_states.append({key: reader.whole(prefix + key) for key in wrapper.needs(keys)})
    used = {*there.values(), *model.stateful}
    yield [name for name in (*manifest.model, *manifest.values) if name not in used]

    with ExitStack() as writing, torch.no_grad():
        for wrapper in model.wrappers.values():
            writing.enter_context(wrapper.writing())
        for tensor, flat in loaded:
            if tensor.data_ptr() != flat.data_ptr():  # it is not in place already
                copy_bits(tensor.detach(), flat.view(tensor.shape))
    for wrapper, own in zip(model.wrappers.values(), own_states, strict=True):
        wrapper.load_own_state(own)
    for key, module in model.stateful.items():
        module.set_extra_state(from_json(manifest.values[key], reader.whole))


def _check_model(model: state.ModelState, there: Mapping[str, str], manifest: Manifest) -> None:
    """Raise `CheckpointMismatchError` unless all of the model is there, in the same shapes."""
    missing = [name for name, stored in there.items() if stored not in manifest.model]
    missing += [key for key in model.stateful if key not in manifest.values]
    if missing:
        raise CheckpointMismatchError(
            f"it has no {shown(missing)}, which the model has: load it into the model that was "
            "saved"
        )
    wrong = []
    for name, shard in (*model.parameters.items(), *model.buffers.items()):
        record = manifest.model[there[name]]
        dtype = str(shard.tensor.dtype).removeprefix("torch.")
        if (record.dtype, record.shape) != (dtype, shard.slice.shape):
            wrong.append(
                f"{name} is {record.dtype} {list(record.shape)} there and {dtype} "
                f"{list(shard.slice.shape)} here"
            )
    if wrong:
        raise CheckpointMismatchError(f"it is of another model: {shown(wrong)}")


StateToLoad = Tensor | Json
"""State for a parameter under one key: a flat tensor of the parameter's shape, or a value."""


def into_optimizer(
    optimizer: torch.optim.Optimizer,
    model: state.ModelState,
    manifest: Manifest,
    reader: Reader,
    *,
    exact: bool = False,
) -> Iterator[list[str]]:
    """Load the options of its groups, and its state.

    exact   remove options that were not saved; else they stay, as those of a later torch
    """
    saved = manifest.optimizer
    if saved is None:
        raise CheckpointMismatchError("it was saved without an optimizer: load it without one")
    groups = state.named_groups(optimizer, model.parameters)
    kind, kept = state.kept_by(optimizer, model.parameters)
    if kind != saved.kind:
        raise CheckpointMismatchError(
            f"its optimizer is {saved.kind}, and the one here {kind}: load it without the optimizer"
        )
    group_of = {name: at for at, group in enumerate(saved.groups) for name in group.parameters}
    names = chain.from_iterable(groups)
    there = {name: name if name in group_of else manifest.aliases.get(name, name) for name in names}
    missing = [name for name, stored in there.items() if stored not in group_of]
    if missing:
        raise CheckpointMismatchError(
            f"its optimizer has no {shown(missing)}, which the optimizer here has"
        )
    options: list[Json] = []
    states: list[dict[Tensor, dict[str, StateToLoad]]] = []
    for number, group in enumerate(groups):
        places = {name: group_of[there[name]] for name in group}
        options.append(reader.request(_options_of(number, places, saved), dict))
        states.append({parameter: {} for parameter in group.values()})
        for name, parameter in group.items():
            for key, record in saved.state.get(there[name], {}).items() if name in kept else ():
                what, path = f"the optimizer's {key} of {name}", f"optimizer/{there[name]}/{key}"
                requested = _request_state(what, path, record, kept[name], reader)
                states[-1][parameter][key] = requested
    reader.request(saved.shared, dict)
    used = set(there.values())
    yield [f"the optimizer's {name}" for name in group_of if name not in used]

    optimizer.state.clear()
    shapes = {model.parameters[name].tensor: shard.tensor for name, shard in kept.items()}
    for group, given, of_group in zip(optimizer.param_groups, options, states, strict=True):
        named = from_json(given, reader.copy)
        for key in options_of(group).keys() - named.keys() if exact else ():
            del group[key]
        _fill_group(optimizer, group, named, of_group, shapes, reader)
    optimizer.state.update(from_json(saved.shared, reader.copy))


def _fill_group(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    options: Mapping[str, object],
    states: Mapping[Tensor, Mapping[str, StateToLoad]],
    shapes: Mapping[Tensor, Tensor],
    reader: Reader,
) -> None:
    for key, value in options.items():
        if isinstance(group.get(key), Tensor) and isinstance(value, Tensor):
            group[key].copy_(value)  # a captured graph refers to this tensor
        else:
            group[key] = value
    steps_on_cpu = not any(group.get(flag) is True for flag in ("capturable", "fused"))
    for parameter, found in states.items():
        if found:
            optimizer.state[parameter] = {
                key: _placed(value, shapes[parameter], reader, key == "step" and steps_on_cpu)
                for key, value in found.items()
            }


def _options_of(number: int, group_of: Mapping[str, int], saved: OptimizerRecord) -> Json:
    """Return the options of a group's parameters, each from its saved group."""
    had = [(name, saved.groups[at].options) for name, at in group_of.items()]
    for name, options in had:
        if options != had[0][1]:
            raise CheckpointMismatchError(
                f"group {number} of the optimizer has {had[0][0]} and {name}, which had other "
                f"options when they were saved ({plain(str(had[0][1]))} and {plain(str(options))}):"
                " put them into groups of their own"
            )
    return had[0][1] if had else {}


def _request_state(
    what: str, path: str, record: StateRecord, shard: state.ParameterShard, reader: Reader
) -> StateToLoad:
    """Request the state of an optimizer for a parameter under one key, in a tensor named `path`."""
    if record.tensor:
        of_rank = shard.name_of(path)
        tensor = reader.record(of_rank if of_rank in reader.manifest.state else record.tensor)
        if tensor.shape != shard.slice.shape:
            raise CheckpointMismatchError(
                f"{what} has shape {list(tensor.shape)} there, and the parameter "
                f"{list(shard.slice.shape)} here"
            )
        return reader.part(tensor, shard.slice)
    if not record.own:
        return reader.request(record.value)
    start, stop = shard.slice.start, shard.slice.stop
    for own in record.own:
        if (own.start, own.stop) == (start, stop):
            return reader.request(own.value)
    parts = shown([f"{each.start}:{each.stop}" for each in record.own])
    raise CheckpointMismatchError(
        f"{what} cannot be cut otherwise than it was: it was saved for elements {parts}, and this "
        f"rank has {start}:{stop}. Load it with the number of ranks and the strategy that it was "
        "saved with, or without the optimizer"
    )


def _placed(value: StateToLoad, parameter: Tensor, reader: Reader, on_cpu: bool) -> object:
    """Return state laid out as the parameter; tensors of values on its device, or on the CPU."""
    if not isinstance(value, Tensor):
        device = torch.device("cpu") if on_cpu else parameter.device
        return from_json(value, lambda name: reader.copy(name).to(device))
    flat = value.view(parameter.shape)
    if parameter.is_contiguous() and parameter.device == flat.device:
        return flat
    like = torch.empty_like(parameter, dtype=flat.dtype, requires_grad=False)
    copy_bits(like, flat)
    return like


def shown(names: list[str]) -> str:
    """Return the first few of many names."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(plain(name) for name in names[:_SHOWN]) + more


# ------------------------------------------------------------------------------
# Finding a checkpoint, and another one if it is damaged


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """Return the folder of the newest checkpoint in `folder`; None without one or the folder.

    Its files are not looked at. Nothing is sent: the answer is this rank's.
    """
    try:
        found = storage.committed(os.fspath(folder), links=True)
    except FileNotFoundError:
        return None
    return Path(found[-1].path) if found else None


def find(folder: str, step: int | None) -> str:
    """Return the folder of a checkpoint: `folder` itself, the newest one in it, or a step's."""
    if os.path.lexists(os.path.join(folder, storage.COMMIT)):
        own = storage.parse(folder)
        if step is None or own is None or own.step == step:
            return folder
    try:
        found = storage.committed(folder, links=True)
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
        own = storage.parse(folder)
        left = storage.numbered(folder) or ([own] if own is not None else [])
        hint = f": {left[-1].path} was never committed" if left else ""
        raise CheckpointNotFoundError(f"there is no checkpoint in {folder}{hint}")
    if os.path.islink(found[-1].path):
        raise CheckpointError(
            f"{found[-1].path} is a link, and in {folder} none is followed: remove it, or give the "
            "folder that it leads to"
        )
    return found[-1].path


def read_records(path: str) -> list[bytes]:
    """Return the commit record and the manifest of a checkpoint as bytes of its files."""
    records = []
    for name in (storage.COMMIT, storage.MANIFEST):
        file = os.path.join(path, name)
        try:
            records.append(files.read(file, MOST_BYTES))
        except FileNotFoundError:
            raise CheckpointDamagedError(f"{file} is missing") from None
    return records


def instead_of(path: str) -> str:
    """Return a sentence that offers another checkpoint instead of a damaged one.

    That is the newest before it whose files are all there, else one after it. If this one has been
    removed meanwhile, the sentence says so: a save in the folder keeps only `keep` checkpoints.
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
        with suppress(OSError, CheckpointError):
            manifest = decode_manifest(other.path, *read_records(other.path))
            files = {os.path.join(other.path, file.name): file.bytes for file in manifest.files}
            if all(storage.size_of(file) == size for file, size in files.items()):
                which = "previous" if other.number < number else "next"
                return (
                    f". The {which} checkpoint, of step {other.step}, is all there: load it with "
                    f'load_checkpoint("{other.path}", ...)'
                )
    return f". No other checkpoint in {folder} is all there"
