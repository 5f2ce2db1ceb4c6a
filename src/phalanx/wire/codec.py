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
last byte. The encoder (object_encoder.py) refuses what has another type than these, a subclass too,
so that types survive. The decoder (object_decoder.py) takes no memory for a length that the bytes
at hand do not bear out, goes at most `DEPTH` levels deep, and runs nothing. Neither does I/O, and
neither knows of ranks.
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
    """The key of a dict for a message."""
    if type(key) not in _LEAVES or (type(key) is int and key.bit_length() > 4 * _SHOWN):
        return f"<{type(key).__name__}>"
    text = repr(key[:_SHOWN] if isinstance(key, (str, bytes)) else key)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


# ------------------------------------------------------------------------------
# Encoding: objects to bytes, in the format above.


def encode(obj: object) -> bytearray:
    """The bytes of an object. Raises `UnsupportedObjectError`, naming the part that is refused."""
    encoder = _Encoder()
    try:
        encoder.put(obj)
    except _RefusedError as refused:
        path = "obj" + "".join(reversed(refused.steps))
        raise UnsupportedObjectError(f"{path} {refused.problem}") from None
    return encoder.out


class _RefusedError(Exception):
    """An object that cannot be encoded; `steps` leads to it, the last one first."""

    def __init__(self, problem: str) -> None:
        self.problem = problem
        self.steps: list[str] = []


class _Encoder:
    def __init__(self) -> None:
        self.out = bytearray()
        self._around: set[int] = set()  # the containers around the object at hand, by id

    def put(self, obj: Any) -> None:
        kind = type(obj)
        if kind in CONTAINERS:
            self._put_container(obj)
        elif isinstance(obj, Tensor):
            self._put_tensor(obj)
        elif kind is int:
            self._put_bytes(b"i", obj.to_bytes(obj.bit_length() // 8 + 1, "little", signed=True))
        elif kind is str:
            self._put_bytes(b"s", _utf8(obj))
        elif kind is bytes:
            self._put_bytes(b"b", obj)
        elif kind is float:
            self.out += b"f" + FLOAT.pack(obj)
        elif obj is None or kind is bool:
            self.out += CONSTANTS[obj]
        else:
            raise _RefusedError(f"is a {kind.__name__}, which cannot be sent; {_WHAT_CAN}")

    def _put_container(self, obj: Any) -> None:
        if id(obj) in self._around:
            raise _RefusedError("contains itself, and cannot be sent")
        if len(self._around) >= DEPTH:
            raise _RefusedError(f"is inside of {DEPTH} others, and cannot be sent")
        self._around.add(id(obj))
        self.out += CONTAINERS[type(obj)]
        self._put_length(len(obj))
        step = ""
        try:
            if type(obj) is dict:
                for key, value in obj.items():
                    step = f".keys(): {shown(key)}" if isinstance(key, str) else ".keys()"
                    self.put(key)
                    step = f"[{shown(key)}]"
                    self.put(value)
            else:
                for place, item in enumerate(obj):
                    step = f"[{place}]"
                    self.put(item)
        except _RefusedError as refused:
            refused.steps.append(step)
            raise
        self._around.remove(id(obj))

    def _put_tensor(self, tensor: Tensor) -> None:
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
            self._put_bytes(b"x", str(tensor.dtype).removeprefix("torch.").encode())
            self._put_length(tensor.dim())
            for length in tensor.shape:
                self._put_length(length)
            self.out += tensor_bytes(plain(tensor))
            return
        raise _RefusedError(f"is a tensor that cannot be sent: it {problem}")

    def _put_bytes(self, tag: bytes, content: bytes) -> None:
        self.out += tag
        self._put_length(len(content))
        self.out += content

    def _put_length(self, length: int) -> None:
        while length > 0x7F:
            self.out.append(length & 0x7F | 0x80)
            length >>= 7
        self.out.append(length)


_WHAT_CAN = "what can is None, bool, int, float, str, bytes, list, tuple, dict and tensors"


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise _RefusedError(
            f"is a str that is no text, and cannot be sent: its character {error.start} is half of "
            f"a pair ({text[error.start]!a}), which has no UTF-8; send bytes"
        ) from None


# ------------------------------------------------------------------------------
# Decoding: bytes to objects, in the format above, or `MalformedObjectError`.


def decode(content: memoryview) -> object:
    """The object that these bytes encode. Raises `MalformedObjectError` if they encode none.

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
