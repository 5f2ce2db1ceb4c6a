"""What layers pass on: a tensor, or tuples, lists and dicts of tensors; and None among them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from phalanx.errors import UnsupportedObjectError

__all__ = ["flatten", "map_tensors", "rebuild"]

Tree = Any  # Tensor | None | tuple[Tree, ...] | list[Tree] | dict[str, Tree]
_DENSE = (torch.strided,)


def map_tensors(fn: Callable[[str, Tensor], object], tree: Tree, name: str) -> Tree:
    """The same tree with `fn(path, tensor)` in the place of each tensor.

    name    what the whole is called: paths are such as `outputs['mask'][1]`

    Raises `UnsupportedObjectError` (a TypeError), naming the path, for what is neither a dense
    tensor, None, nor a tuple, list or dict: a subclass of these would not arrive as one.
    """
    if tree is None:
        return None
    if isinstance(tree, Tensor):
        if tree.is_nested or tree.layout not in _DENSE:
            raise UnsupportedObjectError(f"{name} is not a dense tensor ({tree.layout})")
        return fn(name, tree)
    if type(tree) in (tuple, list):
        return type(tree)(
            map_tensors(fn, part, f"{name}[{place}]") for place, part in enumerate(tree)
        )
    if type(tree) is dict:
        return {key: map_tensors(fn, part, f"{name}[{key!r}]") for key, part in tree.items()}
    kind = type(tree).__qualname__
    raise UnsupportedObjectError(
        f"{name} is a {kind}; layers of a pipeline pass on tensors, None, and tuples, lists and "
        "dicts of these"
    )


def flatten(tree: Tree, name: str) -> tuple[Tree, list[Tensor]]:
    """The tree with numbers in the place of tensors, and the tensors by these numbers."""
    leaves: list[Tensor] = []

    def number(_: str, tensor: Tensor) -> int:
        leaves.append(tensor)
        return len(leaves) - 1

    return map_tensors(number, tree, name), leaves


def rebuild(structure: Tree, leaves: list[Tensor]) -> Tree:
    """The tree that `flatten` has taken apart."""
    if structure is None:
        return None
    if type(structure) is int:
        return leaves[structure]
    if type(structure) is dict:
        return {key: rebuild(part, leaves) for key, part in structure.items()}
    return type(structure)(rebuild(part, leaves) for part in structure)
