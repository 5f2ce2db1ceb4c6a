"""Layouts: of what shape and dtype the tensors of a message are, told once and then known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phalanx.collectives.object_decoder import decode
from phalanx.collectives.object_encoder import encode
from phalanx.collectives.objects import DTYPES
from phalanx.errors import MalformedObjectError

from .trees import Tree, flatten

__all__ = ["Layout", "Spec"]

MOST_BYTES = 1 << 20  # of a layout: what announces more is none


class Spec(NamedTuple):
    """One tensor: its dtype by name, its shape, and whether a gradient goes back for it."""

    dtype: str
    shape: tuple[int, ...]
    needs_grad: bool

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}" + (" with a gradient" if self.needs_grad else "")


class Layout(NamedTuple):
    """A message: how its tensors are nested, and what each is."""

    structure: Tree
    specs: tuple[Spec, ...]

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.specs))})"

    @classmethod
    def of(cls, tree: Tree, name: str) -> tuple[Layout, list[Tensor]]:
        """The layout of what is to be sent, and its tensors. Raises as `map_tensors` does."""
        structure, leaves = flatten(tree, name)
        specs = tuple(
            Spec(str(t.dtype).removeprefix("torch."), tuple(t.shape), t.requires_grad)
            for t in leaves
        )
        return cls(structure, specs), leaves

    def encode(self) -> bytearray:
        """As bytes. Raises `UnsupportedObjectError` for keys of a dict that have none."""
        specs = [(spec.dtype, list(spec.shape), spec.needs_grad) for spec in self.specs]
        return encode((self.structure, specs))

    @classmethod
    def decode(cls, content: bytearray) -> Layout:
        """From bytes. Raises `MalformedObjectError` for what is no layout."""
        found: Any = decode(memoryview(content))
        try:
            structure, rows = found
            specs = tuple(
                Spec(str(dtype), tuple(map(int, shape)), bool(grad)) for dtype, shape, grad in rows
            )
        except (TypeError, ValueError):
            raise MalformedObjectError("what came is no layout of tensors") from None
        if not all(spec.dtype in DTYPES for spec in specs):
            raise MalformedObjectError("what came is a layout of dtypes that are not known here")
        return cls(structure, specs)

    def empty(self) -> list[Tensor]:
        """Memory for the tensors, uninitialized."""
        return [torch.empty(spec.shape, dtype=DTYPES[spec.dtype]) for spec in self.specs]

    def fits(self, found: Layout) -> bool:
        """Whether a message of the layout `found` may go to somebody who expects this one.

        A gradient that comes back for a tensor that needs none is dropped; one that is needed and
        does not come would be lost.
        """
        return self.structure == found.structure and all(
            ours[:2] == theirs[:2] and ours.needs_grad >= theirs.needs_grad
            for ours, theirs in zip(self.specs, found.specs, strict=True)
        )


def needing_grad(specs: Sequence[Spec]) -> list[int]:
    """The numbers of those tensors for which a gradient goes back."""
    return [number for number, spec in enumerate(specs) if spec.needs_grad]
