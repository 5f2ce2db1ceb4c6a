"""Python values as JSON, and back: what people keep beside tensors. No pickle.

    None, bool, str, list    as they are
    int                      as it is; {"$int": "0x..."} from 2^63 on
    float                    as it is; {"$float": "nan" | "inf" | "-inf"}
    dict                     as it is if its keys are text without a $ in front, else
                             {"$dict": [[key, value], ...]}
    tuple                    {"$tuple": [...]}
    bytes                    {"$bytes": base64}
    tensor                   {"$tensor": the name under which it is kept elsewhere}

A value of a subclass of these becomes one of the type itself: a Counter a dict, a numpy.float64 a
float.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from phalanx.errors import UnsupportedObjectError

Json = Any
DEPTH = 100  # levels inside each other
_MOST = 2**63


def to_json(value: object, path: str, keep: Callable[[Tensor, str], str]) -> Json:
    """The value as JSON.

    path   what it is called in errors, and in the names of tensors
    keep   called with each tensor and its path; returns the name under which it is kept

    Raises `UnsupportedObjectError` (a TypeError), naming the part of another type.
    """
    return _to_json(value, path, keep, DEPTH)


def _to_json(  # noqa: PLR0911 - a table of types
    value: Any, path: str, keep: Callable[[Tensor, str], str], depth: int
) -> Json:
    if depth < 0:
        raise UnsupportedObjectError(f"{path} is more than {DEPTH} levels deep, or in itself")

    def inside(part: object, step: object) -> Json:
        return _to_json(part, f"{path}.{step}", keep, depth - 1)

    match value:
        case None | bool():
            return value
        case Tensor():
            return {"$tensor": keep(value, path)}
        case str():
            return str(value)
        case int():
            return int(value) if -_MOST <= value < _MOST else {"$int": hex(value)}
        case float():
            return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
        case bytes():
            return {"$bytes": base64.b64encode(value).decode()}
        case tuple():
            return {"$tuple": [inside(part, at) for at, part in enumerate(value)]}
        case list():
            return [inside(part, at) for at, part in enumerate(value)]
        case dict():
            if all(isinstance(key, str) and not key.startswith("$") for key in value):
                return {str(key): inside(part, key) for key, part in value.items()}
            pairs = value.items()
            return {"$dict": [[inside(key, "key"), inside(part, key)] for key, part in pairs]}
    raise UnsupportedObjectError(
        f"{path} is a {type(value).__qualname__}, which a checkpoint cannot keep: it takes None, "
        "bool, int, float, str, bytes, tensors, and lists, tuples and dicts of them"
    )


def from_json(plain: Json, tensor: Callable[[str], Tensor]) -> Any:
    """The value that `to_json` was given; `tensor` gives the tensor of a name.

    Raises ValueError, KeyError or TypeError for what `to_json` does not make.
    """
    if isinstance(plain, list):
        return [from_json(part, tensor) for part in plain]
    if not isinstance(plain, dict):
        return plain
    if len(plain) == 1:
        ((tag, content),) = plain.items()
        if tag == "$tensor":
            return tensor(content)
        if tag in _FROM_JSON:
            return _FROM_JSON[tag](content, tensor)
    return {key: from_json(part, tensor) for key, part in plain.items()}


def tensors_in(plain: Json) -> list[str]:
    """The names of the tensors that a value refers to."""
    found: list[str] = []

    def note(name: str) -> Any:
        found.append(name)

    from_json(plain, note)
    return found


_FROM_JSON: Mapping[str, Callable[[Any, Callable[[str], Tensor]], object]] = MappingProxyType(
    {
        "$int": lambda content, _: int(content, 16),
        "$float": lambda content, _: float(content),
        "$bytes": lambda content, _: base64.b64decode(content, validate=True),
        "$tuple": lambda content, tensor: tuple(from_json(part, tensor) for part in content),
        "$dict": lambda content, tensor: {
            from_json(key, tensor): from_json(part, tensor) for key, part in content
        },
    }
)
