"""What a disagreement between ranks means, in the words of who wraps the module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from phalanx.errors import (
    CollectiveTimeoutError,
    DeadlockError,
    DesyncError,
    DistributedError,
    PeerLostError,
)


@contextmanager
def hint(text: str, *, who: str = "DDP") -> Iterator[None]:
    """Add a sentence to the error that says that ranks do different things, or one does nothing."""
    try:
        yield
    except DistributedError as error:
        if isinstance(error, _APART) or _has_left(error):
            error.message = f"{error.message.rstrip('.')}. {who}: {text}"
        raise


_APART = (DesyncError, CollectiveTimeoutError)


def _has_left(error: DistributedError) -> bool:
    """Whether somebody has ended in peace: one who died does not mean anything by it."""
    if isinstance(error, PeerLostError):
        return " left" in error.message
    return isinstance(error, DeadlockError) and "(which has returned)" in error.message


_ANOTHER = (
    "another one does something else: its batches ran out (see DDP.join), a backward pass of it "
    "failed or was left out, or its loss does not depend on the model's outputs"
)
AVERAGING = f"this rank averages gradients, and {_ANOTHER}"
BEGINNING = f"this rank begins a forward pass, and {_ANOTHER}"
UNANSWERED = (
    "on this rank a forward pass was followed by no averaging backward pass through its outputs: "
    "the loss does not depend on them, or backward was left out, or failed"
)
