"""A checkpoint of torch's (DCP) as one of Phalanx's, which `load_checkpoint` reads.

The contents of a DCP are listed in its `.metadata`, a pickle: reading it runs any code that its
author has put there, so it is read only if the caller trusts it.

    model        an entry for each tensor, "model.<name>" or "app.model.<name>"; or at the top
    optimizer    the result of `get_optimizer_state_dict`, nested or flattened, under "optimizer",
                 "optim", or these under "app"
    step         an int, if there is one
    the rest     becomes `extra`

Tensors are read when they are written, one at a time.
"""

from __future__ import annotations

import io
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from xxhash import xxh3_128_hexdigest

from phalanx.checkpoint import storage
from phalanx.checkpoint.save import new_checkpoint
from phalanx.checkpoint.save_plan import (
    LocalTensors,
    RankDescription,
    make_manifest,
    optimizer_record,
    plan_files,
)
from phalanx.checkpoint.state import ParameterShard, capture_random_state
from phalanx.checkpoint.stored import Begin
from phalanx.checkpoint.tensor_files import TensorShard, write_tensors
from phalanx.errors import (
    CheckpointDamagedError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    MisuseError,
    UnsupportedObjectError,
)
from phalanx.ops.interop.dcp_export import RegularFiles
from phalanx.parallel.wrapper import Slice
from phalanx.wire.codec import DTYPES
from phalanx.wire.memory import plain, tensor_bytes

METADATA_FILE = ".metadata"
Path = tuple[str | int, ...]
_MODELS: tuple[Path, ...] = (("model",), ("app", "model"))
_OPTIMIZERS: tuple[Path, ...] = (("optimizer",), ("optim",), ("app", "optimizer"), ("app", "optim"))
_ADDED = frozenset({"initial_lr", "param_names"})  # by schedulers, and by names of parameters
_SHOWN = 8  # names in a message
_TIMEOUT = 300.0  # seconds to wait for a save in the folder


class Imported(NamedTuple):
    """The result of an import: the new checkpoint's folder, its step, notes for the user."""

    path: str
    step: int
    tensors: int
    notes: list[str]


def import_dcp(
    source: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    trust_pickle: bool,
    step: int | None = None,
    model: str | None = None,
    optimizer: str | None = None,
    optimizer_class: str | None = None,
    begin: Begin,
) -> Imported:
    """Write a new checkpoint into `folder`, from torch's in `source`.

    trust_pickle      without it nothing is read: `MisuseError`
    step              of the new checkpoint; by default that of the entry "step"
    model, optimizer  their keys, such as "app.model"; by default found
    optimizer_class   such as "AdamW"; by default recognized by its options
    begin             called with the bytes of all; its result is called with those written

    The new checkpoint is committed as by `save_checkpoint`: it is there whole, or not at all.
    Raises `CheckpointNotFoundError`; `CheckpointDamagedError` for a file that cannot be read, or a
    tensor of which a part is missing; `CheckpointMismatchError` naming the misfit;
    `CheckpointIOError` without room.
    """
    if step is not None and step < 0:
        raise MisuseError(f"step must be 0 or more, not {step}")
    stored = _Stored(os.path.abspath(source), trust_pickle)
    entries = _Entries(stored, model, optimizer)
    local = LocalTensors(placeholders=True)
    described = _describe(entries, local, optimizer_class)
    step = step if step is not None else entries.step()
    planned = plan_files([described])
    manifest = make_manifest([described], described.optimizer, planned, step)
    nbytes = sum(shard.nbytes for shard in local.tensors)
    folder = os.path.abspath(folder)
    storage.make_parents(folder)
    storage.check_room(folder, nbytes)
    advance = begin(nbytes)

    def bytes_of(shard: TensorShard) -> memoryview:
        tensor = local.tensors[shard]
        read = stored.tensor(entries.key_of[tensor]) if tensor.is_meta else tensor
        advance(shard.nbytes)
        return tensor_bytes(plain(read))

    new = new_checkpoint(folder, manifest, _TIMEOUT, keep=None)
    try:  # closed before it is committed, it removes its files
        name, _, _ = next(new)
        path = os.path.join(folder, name)
        files = [write_tensors(path, file, bytes_of) for file in planned]
        storage.sync_folder(path)
        new.send(files)
    finally:
        new.close()
    return Imported(path, step, len(local.tensors), entries.notes)


# ------------------------------------------------------------------------------
# Stored tensors and values


class _Stored:
    """A checkpoint of torch's, and its reader."""

    def __init__(self, path: str, trust_pickle: bool) -> None:
        self.path = path
        file = os.path.join(path, METADATA_FILE)
        if not os.path.isfile(file):
            raise CheckpointNotFoundError(
                f"there is no {file}, which torch's dcp.save writes last: is {path} the folder "
                "that it was given, and did it end?"
            )
        if not trust_pickle:
            raise MisuseError(
                f"{file} is a pickle, the only thing that says what is in the other files. "
                "Reading a pickle runs whatever code its author has put there. If you, or somebody "
                "whom you trust, saved it, and nobody else could write there since, say "
                "--trust-pickle"
            )
        self._reader = FileSystemReader(path)
        self._reader.fs = RegularFiles()
        try:
            self.metadata = self._reader.read_metadata()
        except Exception as error:
            raise CheckpointDamagedError(f"{file} cannot be read: {_said(error)}") from error
        if not isinstance(self.metadata, Metadata):
            raise CheckpointDamagedError(f"{file} has a {type(self.metadata).__name__}")
        self._reader.set_up_storage_reader(self.metadata, is_coordinator=True)

    def placeholder(self, key: str, stored: TensorStorageMetadata) -> Tensor:
        """Return a tensor on the meta device. Raise unless the stored chunks are all of it."""
        dtype, size = stored.properties.dtype, tuple(stored.size)
        if str(dtype).removeprefix("torch.") not in DTYPES:
            raise CheckpointMismatchError(f"{key} is {dtype}, which a checkpoint cannot keep")
        inside = all(
            at >= 0 and at + length <= whole
            for chunk in stored.chunks
            for at, length, whole in zip(chunk.offsets, chunk.sizes, size, strict=True)
        )
        if not inside or sum(prod(chunk.sizes) for chunk in stored.chunks) != prod(size):
            raise CheckpointDamagedError(
                f"{self.path}: of {key} {list(size)} a part is missing, or there twice"
            )
        return torch.empty(size, dtype=dtype, device="meta")

    def tensor(self, key: str) -> Tensor:
        """Read a tensor: hold it, and one chunk of it."""
        stored = self.metadata.state_dict_metadata[key]
        assert isinstance(stored, TensorStorageMetadata)
        tensor: Tensor = self.value(key, torch.empty(stored.size, dtype=stored.properties.dtype))
        return tensor

    def value(self, key: str, into: Tensor | None = None) -> Any:
        """Read a value, or into a tensor; raise for a value that `torch.load` takes for code."""
        state = {key: into}
        planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            planner.set_up_planner(state, self.metadata, is_coordinator=True)
            self._reader.read_data(planner.create_local_plan(), planner).wait()
        except FileNotFoundError as error:
            raise CheckpointDamagedError(f"{error.filename} is missing") from None
        except Exception as error:
            raise CheckpointDamagedError(
                f"{self.path}: {key} cannot be read: {_said(error)}"
            ) from error
        return state[key]


class _Planner(DefaultLoadPlanner):
    """Takes values without running code in them."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


class _Entries:
    """The entries of a checkpoint, by purpose; a path is an entry's place in the dict."""

    def __init__(self, stored: _Stored, model: str | None, optimizer: str | None) -> None:
        self.notes: list[str] = []
        self.key_of: dict[Tensor, str] = {}  # of placeholders
        self._stored = stored
        self._all = stored.metadata.state_dict_metadata
        places: Mapping[str, Path] = stored.metadata.planner_data or {}
        paths = {key: tuple(places.get(key, (key,))) for key in self._all}
        of_model = _prefix(stored, paths.values(), model, _MODELS)
        of_optimizer = _prefix(stored, paths.values(), optimizer, _OPTIMIZERS)
        self.model: dict[str, str] = {}
        self.optimizer: dict[str, str] = {}
        self.rest: dict[Path, str] = {}
        for key, path in paths.items():
            if of_optimizer is not None and path[: len(of_optimizer)] == of_optimizer:
                self.optimizer[_joined(path[len(of_optimizer) :])] = key
            elif of_model is not None and path[: len(of_model)] == of_model:
                self.model[_joined(path[len(of_model) :])] = key
            elif of_model is None and len(path) == 1 and self.is_tensor(key):
                self.model[_joined(path)] = key
            else:
                self.rest[path] = key
        if not self.model:
            raise CheckpointMismatchError(
                f"{stored.path} has no model under {' or '.join(map(_joined, _MODELS))}, nor "
                f"tensors at the top: it has {_top(paths.values())}. Say with --model where it is"
            )

    def is_tensor(self, key: str) -> bool:
        return isinstance(self._all[key], TensorStorageMetadata)

    def get(self, key: str) -> Any:
        """Return a placeholder for a tensor, or a value."""
        stored = self._all[key]
        if not isinstance(stored, TensorStorageMetadata):
            return self._stored.value(key)
        placeholder = self._stored.placeholder(key, stored)
        self.key_of[placeholder] = key
        return placeholder

    def step(self) -> int:
        """Return the number in the entry "step"."""
        key = self.rest.get(("step",))
        value = None
        if key is not None:
            value = self._stored.tensor(key).item() if self.is_tensor(key) else self.get(key)
        if type(value) is not int or value < 0:
            raise MisuseError(f"{self._stored.path} does not say of which step it is: give --step")
        return value

    def extra(self) -> Any:
        """Return the entries beside model, optimizer and "step"; note those that cannot be kept."""
        extra: dict[str, Any] = {}
        for path, key in self.rest.items():
            if path == ("step",):
                continue
            try:
                value = self.get(key)
                LocalTensors(placeholders=True).json(value, key)
            except (CheckpointDamagedError, CheckpointMismatchError, UnsupportedObjectError) as why:
                self.notes.append(f"left out: {why.message}")
            else:
                set_element(extra, path, value)
        return extra.get("extra") if extra.keys() <= {"extra"} else extra

    def fingerprint(self, name: str) -> str:
        """Return a hash of a tensor of the model, or "" if all its elements are equal."""
        tensor = plain(self._stored.tensor(self.model[name]))
        elements = tensor.view(-1).view(torch.uint8).view(tensor.numel(), -1)
        equal = bool((elements == elements[0]).all())
        return "" if equal else xxh3_128_hexdigest(tensor_bytes(tensor))


def _joined(path: Path) -> str:
    return ".".join(map(str, path))


def _top(paths: Iterable[Path]) -> str:
    return ", ".join(sorted({str(path[0]) for path in paths})[:_SHOWN]) or "nothing"


def _prefix(
    stored: _Stored, paths: Iterable[Path], asked: str | None, usual: tuple[Path, ...]
) -> Path | None:
    """Return the first of these with which some path begins; raise if none does as `asked`."""
    candidates = usual if asked is None else (tuple(asked.split(".")),)
    longer = [path for path in paths if len(path) > 1]
    for prefix in candidates:
        if any(path[: len(prefix)] == prefix for path in longer):
            return prefix
    if asked is not None:
        raise MisuseError(f"{stored.path} has nothing under {asked}: it has {_top(paths)}")
    return None


# ------------------------------------------------------------------------------
# As Phalanx has it


def _describe(
    entries: _Entries, local: LocalTensors, optimizer_class: str | None
) -> RankDescription:
    """Describe the new checkpoint; add placeholders to `local`."""
    groups, kept = _parse_optimizer(entries)
    trained = {name for names, _ in groups for name in names}
    aliases = _tied(entries, trained)
    described = RankDescription([], aliases=aliases, rng="rng/0")
    parameters: dict[str, ParameterShard] = {}
    for name, key in entries.model.items():
        if name in aliases:
            continue
        value = entries.get(key)
        if entries.is_tensor(key):
            parameters[name] = ParameterShard(value, Slice.whole(tuple(value.shape)))
            local.add("model", name, value, equal=True)
        else:
            described.values[name] = local.json(value, f"model/{name}")
    if optimizer_class and not groups:
        raise MisuseError(
            f"--optimizer-class {optimizer_class}, and no optimizer was found: say with "
            "--optimizer where it is"
        )
    if groups:
        kind = optimizer_class or _class_of(groups[0][1])
        described.optimizer = optimizer_record(kind, groups, kept, {}, parameters, local)
    described.extra = local.json(entries.extra(), "extra")
    local.add("state", described.rng, capture_random_state(), equal=False)
    described.held = list(local.tensors)
    if aliases:
        pairs = ", ".join(f"{other} = {name}" for other, name in aliases.items())
        entries.notes.append(f"tied, since they are equal: {pairs}")
    return described


Groups = list[tuple[list[str], dict[str, Any]]]
"""For each group of an optimizer the names of its parameters, and its options."""


def _parse_optimizer(entries: _Entries) -> tuple[Groups, dict[str, dict[str, Any]]]:
    """Return the optimizer's groups, and its state for each parameter.

    nested      state.<name>.<key>   param_groups.<number>.<option>   param_groups.<number>.params
    flattened   state.<name>.<key>   param_groups.<name>.<option>
    """
    kept: dict[str, dict[str, Any]] = defaultdict(dict)
    numbered: dict[int, dict[str, Any]] = defaultdict(dict)
    flattened: dict[str, dict[str, Any]] = defaultdict(dict)
    for place, key in entries.optimizer.items():
        what, _, rest = place.partition(".")
        of, _, name = rest.rpartition(".")
        if what == "state" and of in entries.model:
            kept[of][name] = entries.get(key)
        elif what == "param_groups" and of in entries.model:
            flattened[of][name] = entries.get(key)
        elif what == "param_groups" and of.isdigit():
            numbered[int(of)][name] = entries.get(key)
        else:
            raise CheckpointMismatchError(
                f"{key} does not fit: an optimizer has to be saved with the names of parameters, "
                "as torch.distributed.checkpoint.state_dict.get_optimizer_state_dict gives it"
            )
    groups: Groups = [
        (list(options.pop("params", [])), options) for _, options in sorted(numbered.items())
    ]
    for name, options in flattened.items():
        for names, others in groups:
            if others == options:
                names.append(name)
                break
        else:
            groups.append(([name], options))
    strangers = [name for names, _ in groups for name in names if name not in entries.model]
    if strangers:
        raise CheckpointMismatchError(
            f"the optimizer has {strangers[0]}, which the model does not have"
            + (f", and {len(strangers) - 1} more such" if len(strangers) > 1 else "")
            + ". Say with --model and --optimizer which belong together"
        )
    return groups, kept


def _tied(entries: _Entries, trained: set[str]) -> dict[str, str]:
    """Return other names of tensors, with the stored one: torch stores one for each name.

    Matrices count as one if they are equal bit for bit, and not constant, unless the optimizer has
    both.
    """
    alike: dict[tuple[torch.dtype, torch.Size], list[str]] = defaultdict(list)
    for name, key in entries.model.items():
        if entries.is_tensor(key):
            found = entries.get(key)
            if found.ndim > 1 and found.numel() > 1:
                alike[found.dtype, found.shape].append(name)
    aliases: dict[str, str] = {}
    for names in alike.values():
        if len(names) == 1 or trained.issuperset(names):
            continue
        first: dict[str, str] = {}
        for name in sorted(names, key=lambda name: name not in trained):
            if mark := entries.fingerprint(name):
                stored = first.setdefault(mark, name)
                if stored != name and name not in trained:
                    aliases[name] = stored
    return aliases


def _class_of(options: Mapping[str, Any]) -> str:
    """Return the torch optimizer that has these options."""
    found = []
    for name in torch.optim.__all__:
        kind = getattr(torch.optim, name)
        if not isinstance(kind, type) or kind is torch.optim.Optimizer:
            continue
        has = kind([nn.Parameter(torch.zeros(1, 1))]).param_groups[0]
        same = has.keys() - {"params"} == options.keys() - _ADDED
        key = "decoupled_weight_decay"  # by which AdamW differs from Adam
        if same and has.get(key) == options.get(key):
            found.append(name)
    if len(found) != 1:
        raise MisuseError(
            f"which optimizer has the options {', '.join(sorted(options))}? Say it with "
            "--optimizer-class, such as --optimizer-class AdamW"
        )
    return found[0]
