"""Python objects as bytes, and back: plain data and tensors, nothing that could run. No pickle.

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
from collections.abc import Mapping
from types import MappingProxyType

import torch

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
"""The dtypes that a tensor may have, by name: those whose elements mean something by themselves."""

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
