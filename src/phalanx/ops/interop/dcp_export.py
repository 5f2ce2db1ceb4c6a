"""A checkpoint as one of torch's own (DCP), as `dcp.save` would have written it.

    {"model": {name: tensor}, "optimizer": {"state": {name: {key: value}}, "param_groups": [...]},
     "step": step, "extra": value}

`model` and `optimizer` are as `torch.distributed.checkpoint.state_dict.get_state_dict` returns
them, so that `dcp.load` and `set_state_dict` load them on any number of ranks, also into models
that `fully_shard` has split. A tied tensor is there under each of its names, as torch needs it.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult

from phalanx import files
from phalanx.checkpoint.manifest import OptimizerRecord, StateRecord, TensorRecord
from phalanx.checkpoint.storage import new_folder
from phalanx.checkpoint.stored import Advance, Begin, Exported, StoredCheckpoint, nbytes_of
from phalanx.checkpoint.tensor_files import HELD, Reader
from phalanx.errors import CheckpointMismatchError, UnsupportedOperationError
from phalanx.parallel.wrapper import Slice
from phalanx.wire.codec import DTYPES

_ROOM_PER_ITEM = 4096  # bytes that torch.save adds to a tensor, and its place in the metadata


def export_dcp(
    checkpoint: StoredCheckpoint,
    out: str | os.PathLike[str],
    *,
    model_only: bool = False,
    begin: Begin,
) -> Exported:
    """Write a checkpoint into the folder `out`, through torch's `FileSystemWriter`.

    out          new, or empty; it is there whole afterwards, or not at all
    model_only   leave out optimizer and `extra`
    begin        called with the bytes of all tensors; its result is called with those written

    Torch's writer takes whole tensors, and holds those of a file until it is written: the largest
    one, or 64 MiB of smaller ones.

    Raises `CheckpointDamagedError` for a file that has changed, `CheckpointIOError` without room,
    `CheckpointMismatchError` for an optimizer with state of shards. `UnsupportedOperationError` for
    a part of a tensor-parallel model.
    """
    if checkpoint.manifest.cuts:
        raise UnsupportedOperationError(
            f"{checkpoint.path} is a part of a tensor-parallel model, of which --format dcp cannot "
            "put optimizers together: --format hf writes the whole model"
        )
    tensors = _Tensors(checkpoint)
    state = _state_dict(checkpoint, tensors, model_only)
    nbytes = sum(map(nbytes_of, tensors.records.values()))
    needed = nbytes + _ROOM_PER_ITEM * (len(tensors.records) + 1)
    planner = _ReadWhenWritten(checkpoint, tensors.records, begin(nbytes))
    with new_folder(os.fspath(out), needed) as folder:
        writer = _ShortFiles(folder, per_thread_copy_ahead=0)
        writer.fs = RegularFiles()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that no ranks are connected
                save(state, storage_writer=writer, planner=planner, no_dist=True)
        except CheckpointException as error:
            raise _first_of(next(iter(error.failures.values()))[0]) from None
        sizes = {entry.name: entry.stat().st_size for entry in os.scandir(folder)}
    return Exported(os.path.abspath(out), sorted(sizes), sum(sizes.values()), [])


def _first_of(error: BaseException) -> BaseException:
    """Return the OSError that caused an error: torch.save hides that a disk is full."""
    earlier: BaseException | None = error
    while earlier is not None and not isinstance(earlier, OSError):
        earlier = earlier.__cause__ or earlier.__context__
    return earlier or error


class _Tensors:
    """Makes placeholders for tensors, and finds these by their keys in the state dict."""

    def __init__(self, checkpoint: StoredCheckpoint) -> None:
        self._checkpoint = checkpoint
        self.records: dict[str, TensorRecord] = {}

    def placeholder(self, key: str, record: TensorRecord) -> Tensor:
        """Return a tensor on the meta device, which has no elements."""
        self.records[key] = record
        return torch.empty(record.shape, dtype=DTYPES[record.dtype], device="meta")


class RegularFiles(FileSystem):
    """Opens files for torch's readers and writers: regular ones, and new ones to write."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Open a file, to read ("rb") or to write."""
        name = os.fspath(path)
        opened = files.reading(name, follow=True) if mode == "rb" else files.new_file(name)
        with opened as descriptor, open(descriptor, mode, closefd=False) as stream:
            yield stream


class _ShortFiles(FileSystemWriter):
    """Writes several files: torch's writer holds all tensors of a file until it is written."""

    def write_data(
        self, plan: SavePlan, planner: SavePlanner
    ) -> torch.futures.Future[list[WriteResult]]:
        """Write files of at most 64 MiB, or one tensor."""
        results: list[WriteResult] = []
        for number, items in enumerate(_batches(plan.items)):
            prefix = f"{plan.storage_data.prefix}{number}_"
            storage_data = dataclasses.replace(plan.storage_data, prefix=prefix)
            file = dataclasses.replace(plan, items=items, storage_data=storage_data)
            results += super().write_data(file, planner).value()
            gc.collect(1)  # torch.save leaves the written values in a circle of references
        written: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        written.set_result(results)
        return written


def _batches(items: Iterable[WriteItem]) -> Iterator[list[WriteItem]]:
    batch: list[WriteItem] = []
    held = 0
    for item in items:
        data = item.tensor_data
        nbytes = prod(data.size) * data.properties.dtype.itemsize if data is not None else 0
        if batch and held + nbytes > HELD:
            yield batch
            batch, held = [], 0
        batch.append(item)
        held += nbytes
    yield batch


class _ReadWhenWritten(DefaultSavePlanner):
    """Reads a tensor when torch's writer reaches it; until then it is a placeholder."""

    def __init__(
        self, checkpoint: StoredCheckpoint, records: Mapping[str, TensorRecord], advance: Advance
    ) -> None:
        super().__init__()
        self._reader = Reader(checkpoint.path, checkpoint.manifest)
        self._records = records
        self._advance = advance

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the tensor, from its file; or a value."""
        record = self._records.get(index.fqn)
        if record is None:
            return super().lookup_object(index)
        tensor = self._reader.part(record, Slice.whole(record.shape)).view(record.shape)
        self._reader.read()
        self._advance(nbytes_of(record))
        return tensor


# ------------------------------------------------------------------------------
# The state dict


def _state_dict(
    checkpoint: StoredCheckpoint, tensors: _Tensors, model_only: bool
) -> dict[str, Any]:
    manifest = checkpoint.manifest
    names = {name: name for name in manifest.model} | manifest.aliases
    model: dict[str, Any] = {
        name: tensors.placeholder(f"model.{name}", manifest.model[stored])
        for name, stored in names.items()
    }
    model |= {key: checkpoint.value(value) for key, value in manifest.values.items()}
    state: dict[str, Any] = {"model": model, "step": manifest.step}
    if model_only:
        return state
    if manifest.optimizer is not None:
        state["optimizer"] = _optimizer_state(manifest.optimizer, checkpoint, tensors)
    if manifest.extra is not None:
        state["extra"] = checkpoint.value(manifest.extra)
    return state


def _optimizer_state(
    saved: OptimizerRecord, checkpoint: StoredCheckpoint, tensors: _Tensors
) -> dict[str, Any]:
    if saved.shared:
        raise CheckpointMismatchError(
            f"{saved.kind} keeps state that belongs to no parameter ({', '.join(saved.shared)}), "
            "for which torch's state dict has no place: export it with --model-only"
        )
    reader = Reader(checkpoint.path, checkpoint.manifest)
    state: dict[str, dict[str, Any]] = {}
    values: dict[str, dict[str, Any]] = {}
    for name, of_parameter in saved.state.items():
        state[name] = {}
        for key, record in of_parameter.items():
            if record.tensor:
                stored = reader.record(record.tensor)
                placeholder = tensors.placeholder(f"optimizer.state.{name}.{key}", stored)
                state[name][key] = placeholder
            else:
                values.setdefault(name, {})[key] = _whole_value(name, key, record, checkpoint)
    for name, of_parameter in checkpoint.value(values).items():  # all of them read at a time
        state[name].update(of_parameter)
    groups = [
        {**checkpoint.value(group.options), "params": group.parameters} for group in saved.groups
    ]
    return {"state": state, "param_groups": groups}


def _whole_value(name: str, key: str, record: StateRecord, checkpoint: StoredCheckpoint) -> Any:
    """Return a parameter's value, as JSON, which must not be one of several shards'."""
    if not record.own:
        return record.value
    whole = Slice.whole(checkpoint.manifest.model[name].shape)
    for own in record.own:
        if (own.start, own.stop) == (whole.start, whole.stop):
            return own.value
    raise CheckpointMismatchError(
        f"the optimizer's {key} of {name} belongs to shards of it "
        f"({', '.join(f'{own.start}:{own.stop}' for own in record.own[:4])}), which cannot be put "
        "together: export it with --model-only"
    )
