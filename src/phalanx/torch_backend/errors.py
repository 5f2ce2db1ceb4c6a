"""Phalanx's errors as torch's: each is also a `torch.distributed.DistBackendError`, a RuntimeError.

Programs for torch.distributed catch `RuntimeError`. The error's text and attributes stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import torch.distributed

from phalanx.errors import CollectiveTimeoutError, DistributedError, PeerLostError, rebuild

dist: Any = torch.distributed

FAMILIAR: Mapping[type[DistributedError], tuple[str, str]] = MappingProxyType(
    {
        CollectiveTimeoutError: (" timeout ", "; the timeout of this call has passed"),
        PeerLostError: ("Connection closed", "; in Gloo's words: Connection closed by peer"),
    }
)
"""What scripts, and torch's own tests, look for in the text of an error; and what adds it."""


def as_torch(error: DistributedError) -> DistributedError:
    """Return the same error, as one of torch's, too."""
    if isinstance(error, dist.DistBackendError):
        return error.again()  # type: ignore[no-any-return]
    message = error.message
    words, addition = FAMILIAR.get(type(error), ("", ""))
    if words not in message:
        message += addition
    attributes = {**error.__dict__, "message": message}
    return _rebuild(type(error), message, attributes).with_traceback(error.__traceback__)


def _rebuild(
    kind: type[DistributedError], message: str, attributes: dict[str, Any]
) -> DistributedError:
    return rebuild(_both(kind), message, attributes)  # type: ignore[arg-type] # a class is hashable


@cache
def _both(kind: type[Any]) -> type[Any]:
    """Return the class that is both `kind` and torch's, with the name of `kind`."""

    def reduce(error: DistributedError) -> tuple[object, ...]:  # such a class has no module
        return _rebuild, (kind, error.message, error.__dict__.copy())

    def again(error: DistributedError) -> DistributedError:
        return _rebuild(kind, error.message, error.__dict__)

    return type(
        kind.__name__,
        (kind, dist.DistBackendError),
        {"__module__": __name__, "__doc__": kind.__doc__, "__reduce__": reduce, "again": again},
    )
