"""What layers pass on: a tensor, or tuples, lists and dicts of tensors; and how it is described.

A message between stages is a tree of tensors. Its layout (how the tensors are nested, and the shape
and dtype of each) is sent once and known afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from phalanx.errors import MalformedObjectError, UnsupportedObjectError
from phalanx.wire.codec import DTYPES, decode, encode

Tree = Any  # Tensor | None | tuple[Tree, ...] | list[Tree] | dict[str, Tree]


def map_tensors(fn: Callable[[str, Tensor], object], tree: Tree, name: str) -> Tree:
    """The same tree with `fn(path, tensor)` in the place of each tensor.

    name    what the whole is called: paths are such as `outputs['mask'][1]`

    Raises `UnsupportedObjectError` (a TypeError), naming the path, for what is neither a dense
    tensor, None, nor a tuple, list or dict: a subclass of these would not arrive as one.
    """
    if tree is None:
        return None
    if isinstance(tree, Tensor):
        if tree.is_nested or tree.layout is not torch.strided:
            raise UnsupportedObjectError(f"{name} is not a dense tensor ({tree.layout})")
        return fn(name, tree)
    if type(tree) in (tuple, list):
        return type(tree)(map_tensors(fn, part, f"{name}[{i}]") for i, part in enumerate(tree))
    if type(tree) is dict:
        return {key: map_tensors(fn, part, f"{name}[{key!r}]") for key, part in tree.items()}
    raise UnsupportedObjectError(
        f"{name} is a {type(tree).__qualname__}; layers of a pipeline pass on tensors, None, and "
        "tuples, lists and dicts of these"
    )


def flatten(tree: Tree, name: str) -> tuple[Tree, list[Tensor]]:
    """The tree with numbers in the place of tensors, and the tensors by these numbers."""
    leaves: list[Tensor] = []

    def number(_: str, tensor: Tensor) -> int:
        leaves.append(tensor)
        return len(leaves) - 1

    return map_tensors(number, tree, name), leaves


def unflatten(structure: Tree, leaves: list[Tensor]) -> Tree:
    """The tree that `flatten` took apart."""
    if structure is None:
        return None
    if type(structure) is int:
        return leaves[structure]
    if type(structure) is dict:
        return {key: unflatten(part, leaves) for key, part in structure.items()}
    return type(structure)(unflatten(part, leaves) for part in structure)


class TensorSpec(NamedTuple):
    """One tensor: its dtype by name, its shape, and whether a gradient is sent back for it."""

    dtype: str
    shape: tuple[int, ...]
    needs_grad: bool

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}" + (" with a gradient" if self.needs_grad else "")


class MessageLayout(NamedTuple):
    """A message: how its tensors are nested, and what each is."""

    structure: Tree
    specs: tuple[TensorSpec, ...]

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.specs))})"

    @classmethod
    def of(cls, tree: Tree, name: str) -> tuple[MessageLayout, list[Tensor]]:
        """The layout of what is to be sent, and its tensors. Raises as `map_tensors` does."""
        structure, leaves = flatten(tree, name)
        specs = tuple(
            TensorSpec(str(t.dtype).removeprefix("torch."), tuple(t.shape), t.requires_grad)
            for t in leaves
        )
        return cls(structure, specs), leaves

    def encode(self) -> bytearray:
        """As bytes. Raises `UnsupportedObjectError` for keys of a dict that have none."""
        specs = [(spec.dtype, list(spec.shape), spec.needs_grad) for spec in self.specs]
        return encode((self.structure, specs))

    @classmethod
    def decode(cls, content: bytearray) -> MessageLayout:
        """From bytes. Raises `MalformedObjectError` for what is no layout."""
        try:
            layout = msgspec.convert(decode(memoryview(content)), cls)
        except msgspec.ValidationError:
            raise MalformedObjectError("what came is no layout of tensors") from None
        if not all(spec.dtype in DTYPES for spec in layout.specs):
            raise MalformedObjectError("what came is a layout of dtypes that are not known here")
        return layout

    def empty(self) -> list[Tensor]:
        """Memory for the tensors, uninitialized."""
        return [torch.empty(spec.shape, dtype=DTYPES[spec.dtype]) for spec in self.specs]

    def accepts(self, found: MessageLayout) -> bool:
        """Whether a message of the layout `found` may be sent to a rank that expects this one.

        A gradient that comes back for a tensor that needs none is dropped; one that is needed and
        does not come would be lost.
        """
        return self.structure == found.structure and all(
            ours[:2] == theirs[:2] and ours.needs_grad >= theirs.needs_grad
            for ours, theirs in zip(self.specs, found.specs, strict=True)
        )
