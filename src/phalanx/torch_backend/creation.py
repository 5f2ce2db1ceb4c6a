"""How a process group comes to be: some ranks of a Phalanx group, or a meeting of its own."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed
from torch.distributed import distributed_c10d as c10d

from phalanx.core.backend import Backend, SubBackend
from phalanx.errors import BackendUnavailableError, DistributedError
from phalanx.torch_backend.errors import as_torch
from phalanx.torch_backend.process_group import VERSION, PhalanxProcessGroup
from phalanx.torch_backend.rendezvous import meet

OLDEST = (2, 9)


def create_group(options: Any) -> PhalanxProcessGroup:
    """Make this rank's process group, of the options that torch gives to a backend.

    A group of some ranks of a default group that is ours has its connections, and nothing is sent.
    Any other one meets through the store that it is given, and blocks until all ranks have come.
    """
    try:
        check_version()
        timeout = options.timeout.total_seconds()
        backend = _of_default_group(list(options.global_ranks_in_group), timeout)
        if backend is None:
            backend = meet(options.store, options.group_rank, options.group_size, timeout)
    except DistributedError as error:
        raise as_torch(error) from None
    return PhalanxProcessGroup(backend, options.store)


def _of_default_group(ranks: list[int], timeout: float) -> Backend | None:
    """Some ranks of the default group, in that order, if that is ours."""
    if not ranks or not torch.distributed.is_initialized():
        return None
    default = c10d._get_default_group()
    if not isinstance(default, PhalanxProcessGroup):
        return None
    return SubBackend(default.backend, ranks, in_order=True, timeout=timeout)


def check_version() -> None:
    """Raise `BackendUnavailableError` for a version of torch that is too old."""
    if VERSION < OLDEST:
        raise BackendUnavailableError(
            f"the backend 'phalanx' of torch.distributed needs torch 2.9 or newer, and this is "
            f"{torch.__version__}; phalanx.init() runs with it, and needs no process group"
        )
