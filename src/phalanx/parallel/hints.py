"""What a disagreement between ranks means, in the words of who wraps the module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from phalanx.errors import CollectiveTimeoutError, DesyncError, DistributedError

APART = (DesyncError, CollectiveTimeoutError)


@contextmanager
def hint(
    text: str, *, who: str = "DDP", kinds: tuple[type[DistributedError], ...] = APART
) -> Iterator[None]:
    """Add a sentence to the error that says that ranks do different things, or one does nothing."""
    try:
        yield
    except kinds as error:
        error.message = f"{error.message.rstrip('.')}. {who}: {text}"
        raise


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
