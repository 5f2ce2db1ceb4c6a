"""Whether a checkpoint fits a model and an optimizer, and what of it goes where on this rank."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from xxhash import xxh3_64_hexdigest

from phalanx.checkpoint.manifest import (
    FileRecord,
    Manifest,
    OptimizerRecord,
    Piece,
    StateRecord,
    TensorRecord,
    tensors_in,
)
from phalanx.checkpoint.model_parts import ModelParts, Part
from phalanx.checkpoint.storage import opened
from phalanx.checkpoint.training_state import named_groups, path_of
from phalanx.errors import CheckpointDamagedError, CheckpointMismatchError
from phalanx.parallel.wrapper import Slice
from phalanx.wire.codec import DTYPES
from phalanx.wire.memory import tensor_bytes

_SHOWN = 8


class StateToLoad(NamedTuple):
    """What to keep for a parameter under a key: `flat` in its shape, or a value as JSON."""

    flat: Tensor | None
    value: Any


class Loading(NamedTuple):
    """What goes where.

    tensors   of the model, with their new values in one dimension
    values    of modules, as JSON
    options   of each parameter group, as JSON; None: nothing is known of it
    state     for each parameter
    shared    state for no parameter, as JSON
    unused    names in the checkpoint that nothing here has
    """

    tensors: list[tuple[Tensor, Tensor]]
    values: list[tuple[nn.Module, Any]]
    options: list[Any]
    state: list[tuple[Tensor, dict[str, StateToLoad]]]
    shared: Any
    unused: list[str]


def fit(
    manifest: Manifest,
    reader: Reader,
    parts: ModelParts | None,
    optimizer: torch.optim.Optimizer | None,
) -> Loading:
    """Ask `reader` for what this rank needs; nothing is read or changed yet.

    Raises `CheckpointMismatchError`, naming what is missing or has another shape or dtype.
    """
    loading = Loading([], [], [], [], None, [])
    if parts is None:
        return loading
    _fit_model(manifest, reader, parts, loading)
    if optimizer is None:
        return loading
    if manifest.optimizer is None:
        raise CheckpointMismatchError("it was saved without an optimizer: load it without one")
    return _fit_optimizer(manifest, manifest.optimizer, reader, parts, optimizer, loading)


def refuse_unused(names: list[str]) -> str:
    """What to say of names that no rank has a place for."""
    return f"the model has no place for {shown(names)}, which the checkpoint has"


def shown(names: list[str]) -> str:
    """The first few of many names."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _fit_model(manifest: Manifest, reader: Reader, parts: ModelParts, loading: Loading) -> None:
    here = dict(parts.parameters)
    for name, buffer in parts.buffers.items():
        here[name] = Part(buffer, Slice.whole(tuple(buffer.shape)))
    there = {name: manifest.aliases.get(name, name) for name in here}
    missing = [name for name in here if there[name] not in manifest.model]
    missing += [key for key in parts.stateful if key not in manifest.values]
    if missing:
        raise CheckpointMismatchError(
            f"it has no {shown(missing)}, which the model has: load it into the model that was "
            "saved"
        )
    wrong = [
        f"{name} is {record.dtype} {list(record.shape)} there and {_dtype(part.tensor)} "
        f"{list(part.slice.shape)} here"
        for name, part in here.items()
        for record in [manifest.model[there[name]]]
        if (record.dtype, record.shape) != (_dtype(part.tensor), part.slice.shape)
    ]
    if wrong:
        raise CheckpointMismatchError(f"it is of another model: {shown(wrong)}")
    for name, part in here.items():
        flat = reader.part(manifest.model[there[name]], part.slice.start, part.slice.stop)
        loading.tensors.append((part.tensor, flat))
    for key, module in parts.stateful.items():
        _ask(reader, manifest.values[key])
        loading.values.append((module, manifest.values[key]))
    used = set(there.values())
    loading.unused.extend(name for name in manifest.model if name not in used)
    loading.unused.extend(key for key in manifest.values if key not in parts.stateful)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _fit_optimizer(
    manifest: Manifest,
    saved: OptimizerRecord,
    reader: Reader,
    parts: ModelParts,
    optimizer: torch.optim.Optimizer,
    loading: Loading,
) -> Loading:
    groups = named_groups(optimizer, parts.parameters)
    if type(optimizer).__name__ != saved.kind:
        raise CheckpointMismatchError(
            f"its optimizer is {saved.kind}, and the one here {type(optimizer).__name__}: load it "
            "without the optimizer"
        )
    group_of = {name: at for at, group in enumerate(saved.groups) for name in group.parameters}
    there = _names_there(manifest, group_of)
    missing = [name for group in groups for name in group if there(name) not in group_of]
    if missing:
        raise CheckpointMismatchError(
            f"its optimizer has no {shown(missing)}, which the optimizer here has"
        )
    options: list[Any] = []
    for number, group in enumerate(groups):
        options.append(_options_of(number, [(n, group_of[there(n)]) for n in group], saved))
        for name, parameter in group.items():
            records = saved.state.get(there(name), {})
            part = parts.parameters[name]
            state = {}
            for key, record in records.items():
                own = part.name_of(path_of(there(name), key))
                has_own = bool(record.tensor) and own in manifest.state
                mine = StateRecord(tensor=own) if has_own else record
                state[key] = _fit_state(name, key, mine, part, reader)
            loading.state.append((parameter, state))
    for plain in (*options, saved.shared):
        _ask(reader, plain)
    used = {there(name) for group in groups for name in group}
    unused = [f"the optimizer's {name}" for name in group_of if name not in used]
    return loading._replace(options=options, shared=saved.shared, unused=[*loading.unused, *unused])


def _names_there(manifest: Manifest, known: Mapping[str, int]) -> Any:
    return lambda name: name if name in known else manifest.aliases.get(name, name)


def _options_of(number: int, places: list[tuple[str, int]], saved: OptimizerRecord) -> Any:
    """The options that the group's parameters had; the groups may have been others."""
    if not places:
        return None
    first, at = places[0]
    for name, other in places:
        if saved.groups[other].options != saved.groups[at].options:
            raise CheckpointMismatchError(
                f"group {number} of the optimizer has {first} and {name}, which had other options "
                f"when they were saved ({saved.groups[at].options} and "
                f"{saved.groups[other].options}): put them into groups of their own"
            )
    return saved.groups[at].options


def _fit_state(name: str, key: str, record: StateRecord, part: Part, reader: Reader) -> StateToLoad:
    if record.tensor:
        tensor: TensorRecord = reader.record(record.tensor)
        if tensor.shape != part.slice.shape:
            raise CheckpointMismatchError(
                f"the optimizer's {key} of {name} has shape {list(tensor.shape)} there, and the "
                f"parameter {list(part.slice.shape)} here"
            )
        return StateToLoad(reader.part(tensor, part.slice.start, part.slice.stop), None)
    value = record.value
    if record.own:
        here = (part.slice.start, part.slice.stop)
        own = [own.value for own in record.own if (own.start, own.stop) == here]
        if not own:
            parts = shown([f"{each.start}:{each.stop}" for each in record.own])
            raise CheckpointMismatchError(
                f"the optimizer's {key} of {name} cannot be cut otherwise than it was: it was "
                f"saved for elements {parts}, and this rank has {here[0]}:{here[1]}. Load it with "
                "the number of ranks and the strategy that it was saved with, or without the "
                "optimizer"
            )
        value = own[0]
    _ask(reader, value)
    return StateToLoad(None, value)


def _ask(reader: Reader, plain: Any) -> None:
    """Have the tensors of a value read, too."""
    for name in tensors_in(plain):
        reader.whole(name)


# ------------------------------------------------------------------------------
# Reading parts of files, checked: of each file only the blocks that have something wanted in them.
#
# file     |--block 0--|--block 1--|--block 2--|-
# wanted                    ####      ##
# read                 |-----------|-----------|        and their checksums compared


class Stretch(NamedTuple):
    """Elements start:stop of a tensor, out of one piece of it."""

    piece: Piece
    start: int
    stop: int


def stretches(pieces: Sequence[Piece], start: int, stop: int) -> Iterator[Stretch]:
    """Where elements start:stop are, each once, in order; the pieces are ordered by `start`."""
    for piece in pieces:
        until = min(stop, piece.stop)
        if piece.start <= start < until:
            yield Stretch(piece, start, until)
            start = until


class _Want(NamedTuple):
    """Bytes of a file from `at` on, and where they go."""

    at: int
    into: memoryview

    @property
    def end(self) -> int:
        return self.at + len(self.into)


class Reader:
    """Tensors of a checkpoint, asked for first and read later, together.

    bytes_read   how many `read` has read
    """

    def __init__(self, path: str, manifest: Manifest) -> None:
        self._path = path
        self._manifest = manifest
        self._wants: dict[int, list[_Want]] = defaultdict(list)
        self._whole: dict[str, Tensor] = {}
        self.bytes_read = 0

    def part(self, record: TensorRecord, start: int, stop: int) -> Tensor:
        """Elements start:stop of a tensor, in one dimension; their values come with `read`."""
        flat = torch.empty(stop - start, dtype=DTYPES[record.dtype])
        memory, size = tensor_bytes(flat), flat.element_size()
        for piece, begin, end in stretches(record.pieces, start, stop):
            into = memory[size * (begin - start) : size * (end - start)]
            self._wants[piece.file].append(_Want(piece.at + size * (begin - piece.start), into))
        return flat

    def whole(self, name: str) -> Tensor:
        """A tensor that is kept for itself; its values come with `read`. Again: the same."""
        if name not in self._whole:
            record = self.record(name)
            self._whole[name] = self.part(record, 0, record.numel).view(record.shape)
        return self._whole[name]

    def record(self, name: str) -> TensorRecord:
        """Where a tensor is that is kept beside the model's."""
        if name not in self._manifest.state:
            raise CheckpointDamagedError(f"{self._path} does not say where {name} is")
        return self._manifest.state[name]

    def read(self) -> None:
        """Read what was asked for.

        Raises `CheckpointDamagedError` for a file that is missing or not as it was written.
        """
        for number, wants in sorted(self._wants.items()):
            file = self._manifest.files[number]
            path = os.path.join(self._path, file.name)
            try:
                with opened(path, os.O_RDONLY) as descriptor:
                    self._read_file(descriptor, path, file, sorted(wants, key=lambda w: w.at))
            except FileNotFoundError:
                raise CheckpointDamagedError(f"{path} is missing") from None
        self._wants.clear()

    def _read_file(
        self, descriptor: int, path: str, file: FileRecord, wants: Sequence[_Want]
    ) -> None:
        size = os.fstat(descriptor).st_size
        if size != file.bytes:
            how = "truncated" if size < file.bytes else "longer"
            raise CheckpointDamagedError(
                f"{path} is {how}: it has {size} bytes, and had {file.bytes} when it was written"
            )
        buffer = memoryview(bytearray(min(file.block, file.bytes)))
        done = -1  # the last block that was read
        first = 0  # of those that may want something of the next one
        for want in wants:
            for number in range(want.at // file.block, -(-want.end // file.block)):
                if number <= done:
                    continue
                begin = number * file.block
                end = min(begin + file.block, file.bytes)
                whole = want.at <= begin and end <= want.end
                into = (
                    want.into[begin - want.at : end - want.at] if whole else buffer[: end - begin]
                )
                self._read_block(descriptor, path, begin, into)
                if xxh3_64_hexdigest(into) != file.checksum(number):
                    raise CheckpointDamagedError(
                        f"{path} is not as it was written: the checksum of its bytes "
                        f"{begin}:{end} differs"
                    )
                while wants[first].end <= begin and wants[first] is not want:
                    first += 1
                if not whole:
                    _hand_out(wants, first, begin, end, into)
                done = number

    def _read_block(self, descriptor: int, path: str, begin: int, into: memoryview) -> None:
        while into:
            count = os.preadv(descriptor, [into], begin)
            if count == 0:
                raise CheckpointDamagedError(f"{path} ends at byte {begin}: it was truncated")
            self.bytes_read += count
            begin, into = begin + count, into[count:]


def _hand_out(wants: Sequence[_Want], first: int, begin: int, end: int, block: memoryview) -> None:
    """Copy what is wanted of a block, bytes begin:end of the file, to where it goes."""
    for at in range(first, len(wants)):
        want = wants[at]
        if want.at >= end:
            break
        low, high = max(begin, want.at), min(end, want.end)
        if low < high:
            want.into[low - want.at : high - want.at] = block[low - begin : high - begin]
