"""A batch becomes micro-batches: whatever it consists of is cut along dim 0."""

from __future__ import annotations

from torch import Tensor

from phalanx.errors import MisuseError, SizeMismatchError

from .trees import Tree, map_tensors

__all__ = ["cut", "samples_in"]


def samples_in(tree: Tree, name: str) -> int:
    """How many samples a batch has: the length of its tensors' first dim.

    Raises `SizeMismatchError` if they differ, and for a batch without tensors;
    `UnsupportedObjectError` for what is no tensor; `MisuseError` for the result of a computation
    that autograd has recorded, through which each micro-batch would go back once more.
    """
    lengths: dict[str, int] = {}

    def note(path: str, tensor: Tensor) -> None:
        if tensor.grad_fn is not None:
            raise MisuseError(
                f"{path} comes from a computation that autograd has recorded: detach() it, or put "
                "what computes it into the pipeline"
            )
        if tensor.ndim == 0:
            raise SizeMismatchError(f"{path} has no dim 0 to cut into micro-batches")
        lengths[path] = len(tensor)

    map_tensors(note, tree, name)
    if not lengths:
        raise SizeMismatchError(f"{name} has no tensor in it")
    if len(set(lengths.values())) > 1:
        each = ", ".join(f"{path} has {length}" for path, length in lengths.items())
        raise SizeMismatchError(f"the tensors of a batch have one number of samples, but {each}")
    return next(iter(lengths.values()))


def cut(tree: Tree, ranges: list[tuple[int, int]], name: str) -> list[Tree]:
    """The micro-batches: for each range these rows of every tensor, as views."""

    def rows(start: int, end: int) -> Tree:
        return map_tensors(lambda _, tensor: tensor[start:end], tree, name)

    return [rows(start, end) for start, end in ranges]
