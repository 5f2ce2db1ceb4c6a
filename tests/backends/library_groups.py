"""Process groups of torch's with several ranks in one process, for tests of what stands on them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed

T = TypeVar("T")
dist: Any = torch.distributed
PATIENCE = 30.0


def gloo(store: Any, rank: int, size: int) -> Any:
    """A Gloo backend as it is, without a process group around it: it does not know its store."""
    return dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=20))


def process_group(store: Any, rank: int, size: int) -> Any:
    """A process group as `init_process_group` makes them."""
    kind = dist.ProcessGroup.BackendType.GLOO
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, gloo(store, rank, size))
    return group


def on_ranks(size: int, fn: Callable[[int], T]) -> list[T]:
    """`fn(rank)` on threads; the results in rank order, or the first error."""
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = fn(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    if errors:
        raise errors[0]
    assert len(results) == size, f"only ranks {sorted(results)} have returned"
    return [results[rank] for rank in range(size)]
