"""Whether all ranks give lists of gradients alike."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from phalanx.backends.base import Backend
from phalanx.collectives.alike import difference
from phalanx.errors import DesyncError


def check_same_list(
    gradients: Sequence[Tensor], backend: Backend, who: str, *, timeout: float | None = None
) -> None:
    """Raise `DesyncError` on every rank, naming the first gradient that differs, unless all have as
    many, of the same shapes and dtypes. Blocks for one message of 16 bytes, before any sum, and at
    most `timeout` seconds, by default the backend's.
    """
    mine = [
        f"gradient {number} ({str(gradient.dtype).removeprefix('torch.')} {list(gradient.shape)})"
        for number, gradient in enumerate(gradients)
    ]
    differ = difference([f"called {who}", *mine], backend, end="no more gradients", timeout=timeout)
    if differ is None:
        return
    if differ.place == 0:
        problem = f"the ranks do different things: {differ.text}"
    else:
        problem = (
            f"the ranks' lists of gradients differ: {differ.text}. Give the gradients of the same "
            "parameters on every rank, in the same order, and zeros for one that a rank does not "
            "have"
        )
    raise DesyncError(
        f"rank {backend.rank}: {who}: {problem}",
        rank=backend.rank,
        peer=differ.odd[0],
        op="aggregate",
    )
