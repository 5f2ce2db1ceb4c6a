"""Objects become bytes, in the format of objects.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from phalanx.backends.memory import plain, tensor_bytes
from phalanx.collectives.objects import (
    CONSTANTS,
    CONTAINERS,
    DEPTH,
    DIMENSIONS,
    FLOAT,
    shown,
)
from phalanx.errors import UnsupportedObjectError


def encode(obj: object) -> bytearray:
    """The bytes of an object. Raises `UnsupportedObjectError`, naming the part that has none."""
    encoder = _Encoder()
    try:
        encoder.put(obj)
    except _RefusedError as refused:
        path = "obj" + "".join(reversed(refused.steps))
        raise UnsupportedObjectError(f"{path} {refused.problem}") from None
    return encoder.out


class _RefusedError(Exception):
    """An object that has no bytes; `steps` leads to it, the last one first."""

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
