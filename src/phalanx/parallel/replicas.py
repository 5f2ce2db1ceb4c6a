"""Whether the ranks hold the same model, and which parameter differs if they do not."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from phalanx.backends.base import Backend
from phalanx.collectives.alike import difference
from phalanx.errors import DesyncError


def describe(name: str, tensor: Tensor) -> str:
    """A parameter or buffer for a message: its name, dtype, shape, and whether it is frozen."""
    frozen = ", frozen" if isinstance(tensor, nn.Parameter) and not tensor.requires_grad else ""
    return f"{name} ({str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}{frozen})"


def check_same_model(
    module: nn.Module, backend: Backend, options: Mapping[str, object], *, who: str = "DDP"
) -> None:
    """Raise `DesyncError` on every rank unless all have parameters alike, in the same order.

    Names, shapes, dtypes and `requires_grad` are compared, not values; and `options`, which every
    rank has to give alike, too. Costs one message of 16 bytes; the descriptions themselves are
    exchanged only when they differ.
    """
    mine = [f"{name}={value!r}" for name, value in options.items()]
    mine += [describe(name, parameter) for name, parameter in module.named_parameters()]
    mine += [f"buffer {describe(name, buffer)}" for name, buffer in module.named_buffers()]
    differ = difference(mine, backend, end="no more parameters")
    if differ is None:
        return
    what, remedy = (
        (f"options of {who}", "Pass the same ones on every rank")
        if differ.place < len(options)
        else ("models", "Build the same model on every rank, in the same order")
    )
    raise DesyncError(
        f"rank {backend.rank}: the ranks' {what} differ: {differ.text}. {remedy}",
        rank=backend.rank,
        peer=differ.odd[0],
        op=who,
    )
