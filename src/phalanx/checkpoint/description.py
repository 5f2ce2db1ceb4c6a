"""What each rank tells the others before a save: what it holds, but not the values.

From all of them every rank works out the same plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

import msgspec
from torch import Tensor

from phalanx.checkpoint.manifest import OptionsRecord, StateRecord
from phalanx.checkpoint.model_parts import ModelParts, check_tensor
from phalanx.checkpoint.plain import to_json
from phalanx.checkpoint.safetensors_file import METADATA, Content
from phalanx.errors import MisuseError
from phalanx.parallel.slices import Slice

File = Literal["model", "state"]
NONE: Mapping[Tensor, Tensor] = MappingProxyType({})


class Held(msgspec.Struct, frozen=True, array_like=True):
    """Elements start:stop of a tensor, which this rank could write.

    file    which of a rank's two files it belongs in
    equal   ranks that hold the same elements have the same values, so anyone may write them; else
            the first of these ranks does
    """

    file: File
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    equal: bool

    def content(self) -> Content:
        """As a tensor of a file."""
        return Content(self.name, self.dtype, self.shape, self.start, self.stop)


class OptimizerDescription(msgspec.Struct):
    """An optimizer: see `OptimizerRecord`."""

    kind: str
    groups: list[OptionsRecord]
    state: dict[str, dict[str, StateRecord]]
    shared: Any


class Description(msgspec.Struct):
    """What a rank holds. `asked` is what every rank has to ask for alike, in words."""

    asked: list[str]
    held: list[Held]
    aliases: dict[str, str]
    values: dict[str, Any]
    optimizer: OptimizerDescription | None
    rng: str
    extra: Any
    fresh: bool = False


class Holdings:
    """The tensors behind a description, by the file that they belong in and their name there."""

    def __init__(self) -> None:
        self.held: list[Held] = []
        self.tensors: dict[tuple[File, str], Tensor] = {}

    def add(
        self, file: File, name: str, tensor: Tensor, part: Slice | None = None, *, equal: bool
    ) -> None:
        """Another one; `part` says what of a whole tensor it is.

        Raises `MisuseError` for a name that is taken already.
        """
        if (file, name) in self.tensors or name == METADATA:
            raise MisuseError(f"two tensors would be named {name}: give one another name")
        check_tensor(name, tensor)
        part = part or Slice.whole(tuple(tensor.shape))
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.held.append(Held(file, name, dtype, part.shape, part.start, part.stop, equal))
        self.tensors[file, name] = tensor.detach()

    def keep(self, tensor: Tensor, path: str) -> str:
        """A tensor inside a value, for `to_json`: written by the first rank that has the value.

        Its name is the path, or, where another one has the same, that and a prime.
        """
        while ("state", path) in self.tensors:
            path += "'"
        self.add("state", path, tensor, equal=False)
        return path

    def json(self, value: object, path: str) -> Any:
        """The value as JSON, its tensors kept under names that begin with `path`."""
        return to_json(value, path, self.keep)

    def add_model(self, parts: ModelParts, means: Mapping[Tensor, Tensor] = NONE) -> dict[str, Any]:
        """Parameters and buffers, or their means over the ranks, where there are any; returns what
        modules keep beside them.
        """
        for name, part in parts.parameters.items():
            tensor = means.get(part.tensor, part.tensor)
            self.add("model", name, tensor, part.slice, equal=True)
        for name, buffer in parts.buffers.items():
            self.add("model", name, means.get(buffer, buffer), equal=False)
        return {
            key: self.json(module.get_extra_state(), f"model/{key}")
            for key, module in parts.stateful.items()
        }
