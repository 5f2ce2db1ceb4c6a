"""Creation of a process group: from some ranks of a Phalanx group, or by its own rendezvous."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from xxhash import xxh3_64_hexdigest

from phalanx.core.backend import Backend, SubBackend
from phalanx.errors import BackendUnavailableError, DistributedError
from phalanx.hooks import begin_observers, check_observers
from phalanx.launch.init import announce
from phalanx.torch_backend.errors import as_torch
from phalanx.torch_backend.other_devices import OtherDevices, named_for_devices
from phalanx.torch_backend.process_group import CONTAINS_BACKENDS, VERSION, PhalanxProcessGroup
from phalanx.torch_backend.rendezvous import meet
from phalanx.torch_internals import default_group

OLDEST = (2, 9)
native: Any = torch._C._distributed_c10d
make_library: Any = torch.library.Library


def create_group(options: Any, backend_options: object) -> PhalanxProcessGroup:
    """Make this rank's process group, with the options that torch gives to a backend.

    If the default group is Phalanx's, a group of some of its ranks uses its connections; nothing is
    sent. Every other group meets through the given store, and blocks until all ranks have come.
    """
    try:
        check_version()
        if VERSION < CONTAINS_BACKENDS:
            replace_all_gather_out()
        check_observers(os.environ)
        named = named_for_devices(options.group_rank)
        timeout = options.timeout.total_seconds()
        default = _default_group() if options.global_ranks_in_group else None
        if default is not None:
            ranks = options.global_ranks_in_group
            parent, store, world_rank = default.backend, default.get_group_store(), default.rank()
            backend: Backend = SubBackend(parent, ranks, in_order=True, timeout=timeout)
        else:
            store, world_rank = options.store, options.group_rank
            ranks = options.global_ranks_in_group
            group = f"{options.group_id} {xxh3_64_hexdigest(repr(ranks).encode())}" if ranks else ""
            backend = meet(store, world_rank, options.group_size, timeout, group=group)
            if not options.global_ranks_in_group:  # it is the default group
                begin_observers(backend, None, os.environ)
                announce(backend)
        others = OtherDevices(backend, named, options, backend_options, store, world_rank)
    except DistributedError as error:
        raise as_torch(error) from None
    return PhalanxProcessGroup(backend, options.store, others)


def _default_group() -> PhalanxProcessGroup | None:
    """Return the default group, if it is ours."""
    default = default_group()
    return default if isinstance(default, PhalanxProcessGroup) else None


@cache
def replace_all_gather_out() -> Any:
    """Let `torch.ops._c10d_functional.all_gather_into_tensor_out` call the group's method.

    The programs that Inductor compiles call this operator. torch's own one looks for a backend in
    the group; a group that is written in Python has none there.
    """

    def gather(tensor: Tensor, group_size: int, group: Any, *, out: Tensor) -> Tensor:
        found = native._resolve_process_group(group) if isinstance(group, str) else group
        native._register_work(out, found._allgather_base(out, tensor.contiguous()))
        return out

    library: Any = make_library("_c10d_functional", "IMPL")
    for devices in ("CPU", "CUDA", "XPU", "PrivateUse1"):
        library.impl("all_gather_into_tensor_out", gather, devices)
    return library


def check_version() -> None:
    """Raise `BackendUnavailableError` for a version of torch that is too old."""
    if VERSION < OLDEST:
        raise BackendUnavailableError(
            f"the backend 'phalanx' of torch.distributed needs torch 2.9 or newer, and this is "
            f"{torch.__version__}; phalanx.init() runs with it, and needs no process group"
        )
