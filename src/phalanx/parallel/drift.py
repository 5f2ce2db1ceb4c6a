"""Whether the ranks' parameters are still the same bits, and whose are not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NoReturn

import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from phalanx.backends.base import Backend
from phalanx.backends.memory import readable_bytes
from phalanx.collectives import all_gather
from phalanx.collectives.alike import minority
from phalanx.errors import DesyncError


class DriftCheck:
    """Compares a hash of all parameters over the ranks, every so many backward passes.

    parameters   gives them, with their names, in the order of the model
    every        backward passes

    Parameters only: buffers are rank 0's again at each forward pass, or else each rank's own.
    """

    def __init__(
        self, parameters: Callable[[], Iterable[tuple[str, Tensor]]], backend: Backend, every: int
    ) -> None:
        self._parameters = parameters
        self._backend = backend
        self._every = every
        self._passes = 0

    def pass_is_over(self, active: list[int]) -> None:
        """Compare, if it is time: one message of 8 bytes, and a second one only on a difference.

        active   the ranks that train; the others take part and need not be equal

        Raises `DesyncError`, on every rank, that names the first parameter that differs, and the
        ranks that are in the minority with theirs (all of them if there is no majority).
        """
        self._passes += 1
        if self._passes % self._every:
            return
        named = list(self._parameters())
        digests = [_digest(value) for _, value in named]
        whole = xxh3_64_intdigest(b"".join(d.to_bytes(8, "little") for d in digests)) >> 1
        everyone = all_gather(torch.tensor([whole], dtype=torch.int64), self._backend).tolist()
        if len({everyone[rank] for rank in active}) <= 1:
            return
        table = all_gather(torch.tensor([digests], dtype=torch.int64), self._backend).tolist()
        self._raise([name for name, _ in named], {rank: table[rank] for rank in active})

    def _raise(self, names: list[str], digests: dict[int, list[int]]) -> NoReturn:
        different = [
            place for place in range(len(names)) if len({d[place] for d in digests.values()}) > 1
        ]
        place = different[0]
        odd = minority({rank: own[place] for rank, own in digests.items()})
        several = len(odd) > 1
        whose = f"{'ranks' if several else 'rank'} {', '.join(map(str, odd))}"
        verdict = (
            f"{names[place]} of {whose} {'are' if several else 'is'} not that of the majority"
            if len(odd) < len(digests)
            else f"{names[place]} is not the same on {whose}, and no majority says whose is right"
        )
        more = f" (and {len(different) - 1} parameters more)" if len(different) > 1 else ""
        rank = self._backend.rank
        raise DesyncError(
            f"rank {rank}: DDP: after {self._passes} backward passes the ranks' parameters differ: "
            f"{verdict}{more}. Something changed it on that rank only: code that runs on some "
            "ranks, an optimizer with other settings, faulty memory. Go back to a checkpoint, or "
            "call broadcast_parameters(root) with a rank that is right",
            rank=rank,
            peer=next((other for other in odd if other != rank), odd[0]),
            op="DDP",
        )


def _digest(value: Tensor) -> int:
    return xxh3_64_intdigest(readable_bytes(value.detach().cpu())) >> 1  # torch has no full uint64
