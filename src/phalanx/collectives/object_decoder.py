"""Bytes become objects again, in the format of objects.py, or are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from types import MappingProxyType

import torch
from torch import Tensor

from phalanx.backends.memory import tensor_bytes
from phalanx.collectives.objects import (
    DEPTH,
    DIMENSIONS,
    DTYPES,
    FLOAT,
    shown,
)
from phalanx.errors import MalformedObjectError


def decode(content: memoryview) -> object:
    """The object that these bytes are. Raises `MalformedObjectError` if they are none.

    Tensors are new, contiguous, on the CPU, without a gradient; they need not stay with `content`.
    """
    decoder = _Decoder(content)
    obj = decoder.take(DEPTH)
    if decoder.left:
        raise MalformedObjectError(f"{decoder.left} bytes are left over behind an object")
    return obj


class _Decoder:
    def __init__(self, content: memoryview) -> None:
        self._content = content
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._content) - self._at

    def take(self, depth: int) -> object:
        """The next object, which may contain `depth` levels."""
        tag = self._take(1)[0]
        if tag not in _TAKE:
            raise MalformedObjectError(f"no object begins with byte {tag}")
        return _TAKE[tag](self, depth)

    def _take(self, count: int) -> memoryview:
        if count > self.left:
            raise MalformedObjectError(f"{count} bytes are announced, and {self.left} came")
        self._at += count
        return self._content[self._at - count : self._at]

    def _length(self) -> int:
        length = 0
        for place in range(0, 63, 7):
            byte = self._take(1)[0]
            length |= (byte & 0x7F) << place
            if byte < 0x80:
                return length
        raise MalformedObjectError("a length of more than 63 bits")

    def _count(self, depth: int, least: int = 1) -> int:
        """How many objects follow, of at least so many bytes each."""
        if depth == 0:
            raise MalformedObjectError(f"an object of more than {DEPTH} levels")
        count = self._length()
        if count * least > self.left:
            raise MalformedObjectError(f"{count} objects are announced in {self.left} bytes")
        return count

    def _int(self, depth: int) -> int:
        return int.from_bytes(self._take(self._length()), "little", signed=True)

    def _float(self, depth: int) -> float:
        value: float = FLOAT.unpack(self._take(8))[0]
        return value

    def _bytes(self, depth: int) -> bytes:
        return bytes(self._take(self._length()))

    def _str(self, depth: int) -> str:
        try:
            return self._bytes(depth).decode()
        except UnicodeDecodeError as error:
            raise MalformedObjectError(f"a str that is not UTF-8: {error}") from None

    def _list(self, depth: int) -> list[object]:
        return [self.take(depth - 1) for _ in range(self._count(depth))]

    def _tuple(self, depth: int) -> tuple[object, ...]:
        return tuple(self._list(depth))

    def _dict(self, depth: int) -> dict[object, object]:
        count = self._count(depth, least=2)
        taken: dict[object, object] = {}
        for _ in range(count):
            key = self.take(depth - 1)
            try:
                again = key in taken
            except TypeError:
                raise MalformedObjectError(f"a {type(key).__name__} as the key of a dict") from None
            if again:
                raise MalformedObjectError(f"a dict with the key {shown(key)} twice")
            taken[key] = self.take(depth - 1)
        return taken

    def _tensor(self, depth: int) -> Tensor:
        name = self._str(depth)
        dtype = DTYPES.get(name)
        if dtype is None:
            raise MalformedObjectError(f"a tensor of dtype {shown(name)}, which torch has not")
        dimensions = self._length()
        if dimensions > DIMENSIONS:
            raise MalformedObjectError(f"a tensor of {dimensions} dimensions")
        shape = [self._length() for _ in range(dimensions)]
        count = prod(shape)
        data = self._take(count * dtype.itemsize)
        try:
            tensor = torch.empty(shape, dtype=dtype)
        except (RuntimeError, TypeError, OverflowError) as error:
            raise MalformedObjectError(f"a tensor that torch cannot make: {error}") from None
        if count:
            tensor_bytes(tensor)[:] = data
        return tensor


_TAKE: Mapping[int, Callable[[_Decoder, int], object]] = MappingProxyType(
    {
        ord("N"): lambda decoder, depth: None,
        ord("T"): lambda decoder, depth: True,
        ord("F"): lambda decoder, depth: False,
        ord("i"): _Decoder._int,
        ord("f"): _Decoder._float,
        ord("s"): _Decoder._str,
        ord("b"): _Decoder._bytes,
        ord("l"): _Decoder._list,
        ord("t"): _Decoder._tuple,
        ord("d"): _Decoder._dict,
        ord("x"): _Decoder._tensor,
    }
)
"""What follows each tag."""
