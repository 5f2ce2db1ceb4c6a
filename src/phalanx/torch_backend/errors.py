"""Phalanx's errors as torch's: each is also a `torch.distributed.DistBackendError`, a RuntimeError.

Programs for torch.distributed catch `RuntimeError`. What the error says, and its attributes, stay.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch.distributed

from phalanx.errors import CollectiveTimeoutError, DistributedError

if TYPE_CHECKING:
    DistBackendError: Any
else:
    DistBackendError = torch.distributed.DistBackendError


def as_torch(error: DistributedError) -> DistributedError:
    """The same error, which is one of torch's, too."""
    if isinstance(error, DistBackendError):
        return error.again()
    message = error.message
    if isinstance(error, CollectiveTimeoutError) and " timeout " not in message:
        message += "; the timeout of this call has passed"  # the word that scripts look for
    attributes = {**error.__dict__, "message": message}
    return _rebuild(type(error), message, attributes).with_traceback(error.__traceback__)


def _rebuild(
    kind: type[DistributedError], message: str, attributes: dict[str, Any]
) -> DistributedError:
    error = _both(kind)(message)
    error.__dict__.update(attributes)
    if "__notes__" in attributes:  # a list of its own, to which the user may add
        error.__dict__["__notes__"] = list(attributes["__notes__"])
    return error


@cache
def _both(kind: type[DistributedError]) -> type[DistributedError]:
    """The class that is `kind` and torch's. Its name is that of `kind`."""

    def reduce(error: DistributedError) -> tuple[object, ...]:  # such a class has no module
        return _rebuild, (kind, error.message, error.__dict__.copy())

    def again(error: DistributedError) -> DistributedError:
        return _rebuild(kind, error.message, error.__dict__)

    return type(
        kind.__name__,
        (kind, DistBackendError),
        {"__module__": __name__, "__doc__": kind.__doc__, "__reduce__": reduce, "again": again},
    )
