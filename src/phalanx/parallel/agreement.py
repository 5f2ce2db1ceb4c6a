"""Whether the ranks are about to do the same, and what they say differently if they are not."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from xxhash import xxh3_64_hexdigest

from phalanx.backends.base import Backend
from phalanx.backends.memory import readable_bytes
from phalanx.collectives.alike import difference
from phalanx.errors import DesyncError
from phalanx.parallel.replicas import describe


def check_agreement(lines: Sequence[str], backend: Backend, *, op: str, remedy: str) -> None:
    """Raise `DesyncError` on every rank unless all of them say the same, line by line.

    lines    what this rank is about to do, in words
    op       who asks, for the message
    remedy   what to do about it, a sentence without its full stop

    Blocks for one message of 16 bytes; the lines themselves are exchanged only when they differ.
    The error names the first line that does, and the ranks in the minority (if there is none, those
    that do not say what rank 0 says).
    """
    differ = difference(lines, backend, end="nothing more")
    if differ is None:
        return
    raise DesyncError(
        f"rank {backend.rank}: {op}: the ranks differ: {differ.text}. {remedy}",
        rank=backend.rank,
        peer=differ.odd[0],
        op=op,
    )


def describe_with_values(name: str, tensor: Tensor) -> str:
    """A parameter or buffer for `check_agreement`, with a hash of its values.

    On the meta device there are none. Costs reading it once.
    """
    if tensor.is_meta:
        return f"{describe(name, tensor)} without values"
    digest = xxh3_64_hexdigest(readable_bytes(tensor.detach().cpu()))
    return f"{describe(name, tensor)} with values of hash {digest}"
