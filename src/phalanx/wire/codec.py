"""Python objects as bytes, and back: plain data and tensors, no code. No pickle.

    object  =  tag, then
    N  T  F    None, True, False     nothing
    i          int of any size       length, two's complement, the lowest byte first
    f          float                 8 bytes, IEEE 754, the lowest byte first
    s          str                   length, UTF-8
    b          bytes                 length, the bytes
    l  t       list, tuple           how many, the objects
    d          dict                  how many, key, value, key, value, ...
    x          tensor                dtype as s, number of dimensions, their lengths, the elements

Lengths are unsigned LEB128: seven bits a byte, the lowest first, the high bit set on all but the
last byte. The encoder refuses objects of other types, subclasses too, so that types survive. The
decoder allocates no memory for a length beyond the bytes at hand, goes at most `DEPTH` levels deep,
and runs no code. Neither does I/O or knows of ranks.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.errors import MalformedObjectError, UnsupportedObjectError
from phalanx.wire.memory import plain, tensor_bytes

DEPTH = 100  # levels of lists, tuples and dicts inside each other
DIMENSIONS = 64  # of a tensor
FLOAT = struct.Struct("<d")

_QUANTIZED = ("torch.q", "torch.quint")
DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        str(dtype).removeprefix("torch."): dtype
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype) and not str(dtype).startswith(_QUANTIZED)
    }
)
"""The dtypes that a tensor may have, by name: those whose elements have a meaning of their own."""

CONTAINERS: Mapping[type, bytes] = MappingProxyType({list: b"l", tuple: b"t", dict: b"d"})
CONSTANTS: Mapping[object, bytes] = MappingProxyType({None: b"N", True: b"T", False: b"F"})
_LEAVES = frozenset({str, bytes, int, float, bool})
_SHOWN = 40  # characters of a key in a message


def shown(key: object) -> str:
    """Return the key of a dict for a message."""
    if type(key) not in _LEAVES or (type(key) is int and key.bit_length() > 4 * _SHOWN):
        return f"<{type(key).__name__}>"
    text = repr(key[:_SHOWN] if isinstance(key, (str, bytes)) else key)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


# ------------------------------------------------------------------------------
# Encoding: objects to bytes, in the format above.


def encode(obj: object) -> bytearray:
    """Return the bytes of an object. Raise `UnsupportedObjectError`, naming the refused part."""
    out = bytearray()
    _put(out, obj, ["obj"], set())
    return out


def _put(out: bytearray, obj: Any, path: list[str], around: set[int]) -> None:
    """Append an object; `path` leads to it, and `around` are the containers around it, by id."""
    kind = type(obj)
    if kind in CONTAINERS:
        _put_container(out, obj, path, around)
    elif isinstance(obj, Tensor):
        _put_tensor(out, obj, path)
    elif kind is int:
        _put_bytes(out, b"i", obj.to_bytes(obj.bit_length() // 8 + 1, "little", signed=True))
    elif kind is bytes:
        _put_bytes(out, b"b", obj)
    elif kind is float:
        out += b"f" + FLOAT.pack(obj)
    elif obj is None or kind is bool:
        out += CONSTANTS[obj]
    elif kind is str:
        try:
            _put_bytes(out, b"s", obj.encode())
        except UnicodeEncodeError as error:
            raise _refused(
                path,
                f"is a str that is no text, and cannot be sent: its character {error.start} is "
                f"half of a pair ({obj[error.start]!a}), which has no UTF-8; send bytes",
            ) from None
    else:
        raise _refused(
            path,
            f"is a {kind.__name__}, which cannot be sent; what can is None, bool, int, float, str, "
            "bytes, list, tuple, dict and tensors",
        )


def _put_container(out: bytearray, obj: Any, path: list[str], around: set[int]) -> None:
    if id(obj) in around:
        raise _refused(path, "contains itself, and cannot be sent")
    if len(around) >= DEPTH:
        raise _refused(path, f"is inside of {DEPTH} others, and cannot be sent")
    around.add(id(obj))
    path.append("")
    out += CONTAINERS[type(obj)]
    _put_length(out, len(obj))
    if type(obj) is dict:
        for key, value in obj.items():
            path[-1] = f".keys(): {shown(key)}" if isinstance(key, str) else ".keys()"
            _put(out, key, path, around)
            path[-1] = f"[{shown(key)}]"
            _put(out, value, path, around)
    else:
        for place, item in enumerate(obj):
            path[-1] = f"[{place}]"
            _put(out, item, path, around)
    path.pop()
    around.remove(id(obj))


def _put_tensor(out: bytearray, tensor: Tensor, path: list[str]) -> None:
    if type(tensor) not in (Tensor, nn.Parameter):
        problem = f"is a {type(tensor).__name__}"
    elif tensor.device.type != "cpu":
        problem = f"is on {tensor.device}: move it with .cpu()"
    elif tensor.layout is not torch.strided or tensor.is_nested:
        problem = f"is {tensor.layout}: convert it with .to_dense()"
    elif tensor.is_quantized:
        problem = "is quantized"
    elif tensor.dim() > DIMENSIONS:
        problem = f"has {tensor.dim()} dimensions, and {DIMENSIONS} is the most"
    else:
        _put_bytes(out, b"x", str(tensor.dtype).removeprefix("torch.").encode())
        for length in (tensor.dim(), *tensor.shape):
            _put_length(out, length)
        out += tensor_bytes(plain(tensor))
        return
    raise _refused(path, f"is a tensor that cannot be sent: it {problem}")


def _put_bytes(out: bytearray, tag: bytes, content: bytes) -> None:
    out += tag
    _put_length(out, len(content))
    out += content


def _put_length(out: bytearray, length: int) -> None:
    while length > 0x7F:
        out.append(length & 0x7F | 0x80)
        length >>= 7
    out.append(length)


def _refused(path: list[str], problem: str) -> UnsupportedObjectError:
    return UnsupportedObjectError(f"{''.join(path)} {problem}")


# ------------------------------------------------------------------------------
# Decoding: bytes to objects, in the format above, or `MalformedObjectError`.


def decode(content: memoryview) -> object:
    """Return the object that these bytes encode. Raise `MalformedObjectError` if they encode none.

    Tensors are new, contiguous, on the CPU, without a gradient; they need not stay with `content`.
    """
    decoder = _Decoder(content)
    obj = decoder.next_object(DEPTH)
    if decoder.left:
        raise MalformedObjectError(f"{decoder.left} bytes are left over behind an object")
    return obj


class _Decoder:
    """Takes objects from `content`, the next of `left` bytes on; each of `depth` levels at most."""

    def __init__(self, content: memoryview) -> None:
        self._content = content
        self.left = len(content)

    def next_object(self, depth: int) -> object:
        tag = self.take(1)[0]
        if tag not in _TAKE:
            raise MalformedObjectError(f"no object begins with byte {tag}")
        return _TAKE[tag](self, depth)

    def take(self, count: int) -> memoryview:
        if count > self.left:
            raise MalformedObjectError(f"{count} bytes are announced, and {self.left} came")
        at = len(self._content) - self.left
        self.left -= count
        return self._content[at : at + count]

    def length(self) -> int:
        length = 0
        for place in range(0, 63, 7):
            byte = self.take(1)[0]
            length |= (byte & 0x7F) << place
            if byte < 0x80:
                return length
        raise MalformedObjectError("a length of more than 63 bits")

    def sized(self) -> memoryview:
        return self.take(self.length())

    def text(self, depth: int = 0) -> str:
        try:
            return bytes(self.sized()).decode()
        except UnicodeDecodeError as error:
            raise MalformedObjectError(f"a str that is not UTF-8: {error}") from None

    def _count(self, depth: int, least: int = 1) -> int:
        """Return how many objects follow, of at least so many bytes each."""
        if depth == 0:
            raise MalformedObjectError(f"an object of more than {DEPTH} levels")
        count = self.length()
        if count * least > self.left:
            raise MalformedObjectError(f"{count} objects are announced in {self.left} bytes")
        return count

    def items(self, depth: int) -> list[object]:
        return [self.next_object(depth - 1) for _ in range(self._count(depth))]

    def pairs(self, depth: int) -> dict[object, object]:
        taken: dict[object, object] = {}
        for _ in range(self._count(depth, least=2)):
            key = self.next_object(depth - 1)
            try:
                again = key in taken
            except TypeError:
                raise MalformedObjectError(f"a {type(key).__name__} as the key of a dict") from None
            if again:
                raise MalformedObjectError(f"a dict with the key {shown(key)} twice")
            taken[key] = self.next_object(depth - 1)
        return taken

    def tensor(self, depth: int) -> Tensor:
        name = self.text()
        dtype = DTYPES.get(name)
        if dtype is None:
            raise MalformedObjectError(f"a tensor of dtype {shown(name)}, which torch has not")
        dimensions = self.length()
        if dimensions > DIMENSIONS:
            raise MalformedObjectError(f"a tensor of {dimensions} dimensions")
        shape = [self.length() for _ in range(dimensions)]
        count = prod(shape)
        data = self.take(count * dtype.itemsize)
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
        ord("i"): lambda decoder, depth: int.from_bytes(decoder.sized(), "little", signed=True),
        ord("f"): lambda decoder, depth: FLOAT.unpack(decoder.take(8))[0],
        ord("s"): _Decoder.text,
        ord("b"): lambda decoder, depth: bytes(decoder.sized()),
        ord("l"): _Decoder.items,
        ord("t"): lambda decoder, depth: tuple(decoder.items(depth)),
        ord("d"): _Decoder.pairs,
        ord("x"): _Decoder.tensor,
    }
)
"""What follows each tag."""
