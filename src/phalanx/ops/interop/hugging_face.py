"""A checkpoint in Hugging Face's format: safetensors files of whole tensors.

    out/
        model-00001-of-00002.safetensors    no larger than a shard, unless one tensor is
        model-00002-of-00002.safetensors
        model.safetensors.index.json        {"metadata": {"total_size": ...}, "weight_map": {...}}
        config.json, tokenizer.json, ...    copied from another folder

A model that fits into one shard is `model.safetensors`, without an index. Names are those of the
plain model. Tied tensors are there once, as `save_pretrained` writes them; their other names are in
the metadata, as those of huggingface_hub's `save_torch_state_dict`.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from phalanx import files
from phalanx.checkpoint.manifest import TensorRecord
from phalanx.checkpoint.parts import WholeModel
from phalanx.checkpoint.safetensors_format import DTYPE_NAMES, INDEX, SINGLE, header_bytes
from phalanx.checkpoint.storage import new_folder, write_file
from phalanx.checkpoint.stored import (
    Advance,
    Begin,
    Exported,
    StoredCheckpoint,
    natural_order,
    nbytes_of,
)
from phalanx.errors import CheckpointNotFoundError, MisuseError, UnsupportedOperationError
from phalanx.wire.codec import DTYPES

SHARD_SIZE = 5 * 10**9
_CONFIG = "config.json"
_TO_COPY = frozenset({".json", ".jinja", ".model", ".py", ".tiktoken", ".txt"})
_NOT_TO_COPY = frozenset({"trainer_state.json"})
_MOST = 1 << 28  # bytes of a file that is copied
_DTYPE_KEYS = ("dtype", "torch_dtype")  # in config.json; the latter before transformers 5


class _ShardFile(NamedTuple):
    name: str
    header: bytes
    names: list[str]


def export_hugging_face(
    checkpoint: StoredCheckpoint,
    out: str | os.PathLike[str],
    *,
    parts: Sequence[StoredCheckpoint] = (),
    shard_size: int = SHARD_SIZE,
    config: str | os.PathLike[str] | None = None,
    begin: Begin,
) -> Exported:
    """Write a checkpoint's model into the folder `out`, which is there whole afterwards, or not.

    out          new, or empty
    parts        of a tensor-parallel model, the checkpoints of its other parts
    shard_size   the most bytes of tensors in one file; a larger tensor has a file of its own
    config       a config.json, or a folder with one, of which the tokenizer's files are copied, too
    begin        called with the bytes of all tensors; its result is called with those written

    Holds 64 MiB and a block at a time, for tensors of any size; of a tensor-parallel model, one
    tensor. Raises `CheckpointMismatchError` unless all parts are there, and fit together;
    `CheckpointDamagedError` for a file that has changed, `CheckpointIOError` without room,
    `UnsupportedOperationError` for a dtype that the format does not have, `MisuseError`.
    """
    model = WholeModel([checkpoint, *parts])
    records, aliases = model.records, model.first.manifest.aliases
    _check_dtypes(records)
    notes = _notes(model)
    copied = _config_files(config, records, notes) if config is not None else {}
    nbytes = sum(map(nbytes_of, records.values()))
    shards = _plan(records, aliases, shard_size)
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": nbytes, **aliases},
            "weight_map": {name: shard.name for shard in shards for name in shard.names},
        }
        copied[INDEX] = json.dumps(index, indent=2, sort_keys=True).encode() + b"\n"
    needed = nbytes + sum(len(shard.header) for shard in shards) + sum(map(len, copied.values()))
    advance = begin(nbytes)
    with new_folder(os.fspath(out), needed, copied) as folder:
        for shard in shards:
            _write_shard(os.path.join(folder, shard.name), shard, model, advance)
        for name, content in copied.items():
            write_file(os.path.join(folder, name), content)
    names = [shard.name for shard in shards] + sorted(copied)
    return Exported(os.path.abspath(out), names, needed, notes)


def _write_shard(path: str, shard: _ShardFile, model: WholeModel, advance: Advance) -> None:
    with files.new_file(path) as descriptor:

        def write(part: memoryview) -> None:
            files.write_all(descriptor, part)
            advance(len(part))

        files.write_all(descriptor, shard.header)
        model.copy(shard.names, write)
        os.fsync(descriptor)


def _check_dtypes(records: Mapping[str, TensorRecord]) -> None:
    lacking = [f"{name} is {r.dtype}" for name, r in records.items() if r.dtype not in DTYPE_NAMES]
    if lacking:
        raise UnsupportedOperationError(
            f"the safetensors format does not have every dtype of the model: {lacking[0]}"
            + (f", and {len(lacking) - 1} more" if len(lacking) > 1 else "")
        )


def _notes(model: WholeModel) -> list[str]:
    notes = []
    if differing := model.differing():
        notes.append(
            f"taken from {model.first.path}, since other parts have other values: "
            f"{', '.join(differing)}. Buffers may differ; parameters are of another run, or drifted"
        )
    if values := list(model.first.manifest.values):
        notes.append(f"left out, since it is no tensor: {', '.join(values)} (get_extra_state)")
    return notes


# ------------------------------------------------------------------------------
# Files


def _plan(
    records: Mapping[str, TensorRecord], aliases: Mapping[str, str], shard_size: int
) -> list[_ShardFile]:
    """Return the files, with the names of their tensors in their order."""
    shards = _split(records, shard_size)
    planned = []
    for number, names in enumerate(shards, start=1):
        of_shard = f"model-{number:05}-of-{len(shards):05}.safetensors"
        file = of_shard if len(shards) > 1 else SINGLE
        ordered = sorted(names, key=lambda name: (-DTYPES[records[name].dtype].itemsize, name))
        tied = {other: name for other, name in aliases.items() if name in names}
        tensors = [
            (name, DTYPE_NAMES[records[name].dtype], records[name].shape, nbytes_of(records[name]))
            for name in ordered
        ]
        header = header_bytes({"format": "pt", **tied}, tensors)
        planned.append(_ShardFile(file, header, ordered))
    return planned


def _split(records: Mapping[str, TensorRecord], shard_size: int) -> list[list[str]]:
    """Return the names of each shard, in the order of layers: huggingface_hub's rule."""
    if shard_size < 1:
        raise MisuseError(f"a shard has 1 byte or more, not {shard_size}")
    shards: list[list[str]] = []
    current: list[str] = []
    size = 0
    for name in sorted(records, key=natural_order):
        nbytes = nbytes_of(records[name])
        if nbytes > shard_size:
            shards.append([name])
            continue
        if size + nbytes > shard_size:
            shards.append(current)
            current, size = [], 0
        current.append(name)
        size += nbytes
    return [*shards, current] if current or not shards else shards


# ------------------------------------------------------------------------------
# The configuration


def _config_files(
    config: str | os.PathLike[str], records: Mapping[str, TensorRecord], notes: list[str]
) -> dict[str, bytes]:
    """Return the files to copy, by name; `config.json` has the dtype of the tensors."""
    given = Path(config)
    if given.is_dir():
        found = {
            path.name: path
            for path in sorted(given.iterdir())
            if path.suffix in _TO_COPY and path.is_file()
            if path.name not in _NOT_TO_COPY and not path.name.endswith(".index.json")
        }
        main = given / _CONFIG
    else:
        found, main = {}, given
    if not main.is_file():
        raise CheckpointNotFoundError(
            f"there is no {main}: --config takes a config.json, or a folder with one, such as what "
            "save_pretrained has written"
        )
    content = {name: files.read(str(path), _MOST, follow=True) for name, path in found.items()}
    text = files.read(str(main), _MOST, follow=True)
    content[_CONFIG] = _with_dtype(main, text, records, notes)
    return content


def _with_dtype(
    path: Path, content: bytes, records: Mapping[str, TensorRecord], notes: list[str]
) -> bytes:
    """Return the configuration with the tensors' dtype, which `from_pretrained` converts to."""
    try:
        read: Any = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise MisuseError(f"{path} is not JSON: {error}") from None
    if not isinstance(read, dict):
        raise MisuseError(f"{path} is no configuration: it has a {type(read).__name__}")
    sizes: Counter[str] = Counter()
    for record in records.values():
        if DTYPES[record.dtype].is_floating_point:
            sizes[record.dtype] += nbytes_of(record)
    dtype = max(sizes, key=sizes.__getitem__, default=None)  # the floating one of most bytes
    wrong = [key for key in _DTYPE_KEYS if dtype is not None and read.get(key, dtype) != dtype]
    if not wrong:
        return content
    for key in wrong:
        notes.append(f"{_CONFIG} says {key} {dtype}, as the model has it; it was {read[key]}")
        read[key] = dtype
    return json.dumps(read, indent=2).encode() + b"\n"


def parse_size(text: str) -> int:
    """Return the bytes of a size such as 5GB, 500MB or 2GiB; `MisuseError` for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:(?:([kmgt])(i?))?b)?\s*", text.lower())
    if match is None:
        raise MisuseError(f"{text!r} is no size: give a number and a unit, such as 5GB or 500MB")
    power = "kmgt".index(match[2]) + 1 if match[2] else 0
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)
