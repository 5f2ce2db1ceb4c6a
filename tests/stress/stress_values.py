"""The values of a random program: whole numbers that follow from the operation and the rank.

They are worked out in int64 (complex numbers in complex128) and converted; all sums and products
of them are exact in their dtype, so the reference need not know in which order they were made.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from stress_program import Op
from torch import Tensor

SENTINEL = 1  # what lies around a tensor in memory


def numbers(op: Op, rank: int, shape: tuple[int, ...], salt: int = 0) -> Tensor:
    """What rank `rank` of the group brings to an operation, in int64 or complex128."""
    count = torch.Size(shape).numel()
    step, start = 7 * op.number + 3 * rank + 11 * salt + 1, 5 * op.number + rank + salt
    ramp = torch.arange(count, dtype=torch.int64) * step + start + torch.arange(count) // 7
    low, high = _range_of(op)
    values = (ramp % (high - low + 1) + low).view(shape)
    if op.reduce == "PRODUCT":  # powers of two, so that every dtype can hold every product
        values = torch.where(values == 0, 1, values.sign() * values.abs().clamp(max=2))
    if op.dtype is torch.bool:
        values = (ramp // 3 % 2).view(shape)
    return torch.complex(values.double(), -2 * values.double()) if op.dtype.is_complex else values


def _range_of(op: Op) -> tuple[int, int]:
    if op.reduce in ("SUM", "MEAN", "PRODUCT"):
        return (-2, 2) if op.dtype.is_signed else (0, 2)
    return (-100, 100) if op.dtype.is_signed else (0, 200)


def reduced(contributions: list[Tensor], op: Op) -> Tensor:
    """The reduction of all ranks' numbers."""
    stacked = torch.stack(contributions)
    if op.reduce in ("SUM", "MEAN"):
        total = stacked.sum(dim=0)
        if op.dtype is torch.bool:
            return total.clamp(max=1)
        return total if op.reduce == "SUM" else mean(total, len(contributions), op.dtype)
    if op.reduce == "PRODUCT":
        return stacked.prod(dim=0)
    if op.reduce in ("MIN", "MAX"):
        return stacked.amin(dim=0) if op.reduce == "MIN" else stacked.amax(dim=0)
    bitwise = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}
    result = contributions[0]
    for other in contributions[1:]:
        result = bitwise[op.reduce](result, other)
    return result


def mean(total: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """A sum divided; whole numbers are cut off towards zero."""
    if dtype.is_complex:
        return total.to(dtype) / count
    if dtype.is_floating_point:
        return total.to(dtype) / count
    return torch.div(total, count, rounding_mode="trunc")


class WrongResultError(AssertionError):
    """A rank got something else than the program says."""


class Memory(NamedTuple):
    """A tensor as it lies in a piece of memory, and what is around it and must stay as it is."""

    tensor: Tensor
    around: tuple[Tensor, ...]

    def is_intact(self) -> bool:
        """Whether nothing has been written around the tensor."""
        return all(torch.equal(part, torch.full_like(part, SENTINEL)) for part in self.around)

    def check_around(self, op: Op) -> None:
        """Raise if something has been written around the tensor."""
        if not self.is_intact():
            raise WrongResultError(f"{op}: memory around a tensor was written to")


def laid_out(values: Tensor, layout: str) -> Memory:
    """The values in memory of this layout."""
    shape, dtype = values.shape, values.dtype
    if layout == "offset":
        flat = torch.full((values.numel() + 10,), SENTINEL, dtype=dtype)
        memory = Memory(flat[5:-5].view(shape), (flat[:5], flat[-5:]))
    elif layout == "gaps":
        pairs = torch.full((*shape, 2), SENTINEL, dtype=dtype)
        memory = Memory(pairs[..., 0], (pairs[..., 1],))
    elif layout == "transposed":
        backwards = torch.empty(tuple(reversed(shape)), dtype=dtype)
        memory = Memory(backwards.permute(tuple(reversed(range(len(shape))))), ())
    else:
        memory = Memory(torch.empty(shape, dtype=dtype), ())
    memory.tensor.copy_(values)
    return memory


def same(left: Any, right: Any) -> bool:
    """Equal in type, shape, dtype and every value; lists and dicts part by part."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left.shape == right.shape and left.dtype == right.dtype and torch.equal(left, right)
    if type(left) is not type(right):
        return False
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    return bool(left == right)


def shown(value: object) -> str:
    """A value for a message: what it is, and its first few numbers."""
    if not isinstance(value, Tensor):
        return repr(value)[:300]
    return f"{value.dtype} {list(value.shape)} {value.flatten()[:12].tolist()}"


def difference(got: object, expected: object) -> str:
    """Both, and the first place where two tensors differ."""
    text = f"\n  got      {shown(got)}\n  expected {shown(expected)}"
    if isinstance(got, Tensor) and isinstance(expected, Tensor) and got.shape == expected.shape:
        wrong = (got != expected).flatten().nonzero().flatten()
        if len(wrong):
            place = int(wrong[0])
            text += f"\n  {len(wrong)} of {got.numel()} differ, the first at {place}: "
            text += f"{got.flatten()[place].item()} for {expected.flatten()[place].item()}"
    return text
