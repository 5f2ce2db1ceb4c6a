"""`TorchBackend`: a process group of `torch.distributed`, and forms of it that make their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from phalanx.core.backend import DEFAULT_TIMEOUT
from phalanx.core.call import check_timeout
from phalanx.errors import BackendUnavailableError, MisuseError
from phalanx.native.base import LibraryBackend
from phalanx.native.store_rendezvous import (
    Entries,
    StoreRendezvous,
    route_by,
    trust_in_torchs_store,
)
from phalanx.transport.backends import check_rank
from phalanx.wire.control import parse_address

if TYPE_CHECKING:
    import socket

    from phalanx.native.base import Library


class TorchBackend(LibraryBackend):
    """One rank of a process group of `torch.distributed`, with its collectives.

    process_group   of any backend; also one that was made without `init_process_group`. By
                    default that of `init_process_group`. It stays open when this is closed
    timeout         seconds that a call waits at most

    Every rank of the group makes one, which blocks until all have. It is a mesh as that of
    `HybridBackend`, which the ranks form by way of the group, with the group's own collectives. All
    else (see docs/backends.md) is done over the mesh. Only collectives share the process group with
    the program, so all ranks must issue those in one order.

    The group's own collectives cannot be compared before they run. Ranks that call different ones
    learn it when they wait for each other, and at every tenth collective. Some libraries end the
    process, or give wrong numbers, before. PHALANX_STRICT=1 does without them. Raises `MisuseError`
    if there is no group, `BackendUnavailableError`, `CollectiveTimeoutError` if not all ranks come.
    """

    def __init__(self, process_group: Any = None, *, timeout: float = DEFAULT_TIMEOUT) -> None:
        check_timeout(timeout)
        check_available()
        from phalanx.native import torch_formation, torch_library  # noqa: PLC0415 - see check_available

        dist: Any = torch.distributed
        group = process_group
        if group is None:
            if not dist.is_initialized():
                raise MisuseError(
                    "TorchBackend() is over the group of init_process_group(), which was not "
                    "called; call it, give a process group, or use GlooBackend or NcclBackend"
                )
            group = dist.group.WORLD
        elif group is dist.GroupMember.NON_GROUP_MEMBER:
            raise MisuseError("this process is not a member of that process group")
        kinds, place = torch_library.kinds_of(group), torch_formation.store_of(group)
        super().__init__(
            group.rank(),
            group.size(),
            torch_formation.meet_over(group, place, next(iter(kinds)), timeout),
            lambda topology: torch_library.library_over(group, kinds, place, topology),
            name="the process group",
            timeout=timeout,
            all_came=True,
        )


class _NamedBackend(LibraryBackend):
    """A process group of one of torch's kinds, which is made here."""

    kind: ClassVar[str]

    def __init__(
        self,
        rank: int,
        world_size: int,
        master_addr: str,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        job: str = "",
        generation: int = 0,
        listener: socket.socket | None = None,
    ) -> None:
        try:
            check_rank(rank, world_size)
            check_timeout(timeout)
            check_available(self.kind)
            from phalanx.native import torch_formation, torch_library  # noqa: PLC0415 - as above

            store = torch_formation.store_at(rank, world_size, master_addr, timeout, listener)
            prefix = f"phalanx/{job}/{generation}"
            entries = Entries(store, (prefix,), trust_in_torchs_store())
            toward = route_by(parse_address(master_addr).host if world_size > 1 else "")
            met = StoreRendezvous(entries, rank, world_size, timeout, "init").run(toward)
        except BaseException:
            if listener is not None:
                listener.close()
            raise

        def join(topology: tuple[int, ...]) -> Library:
            former = torch_formation.GroupFormer(self.kind, rank, store, prefix, topology)
            try:
                group = former.form(range(world_size), 0, timeout)
            except RuntimeError as error:
                raise torch_formation.nobody_came(rank, timeout, error) from error
            kinds = torch_library.KINDS[self.kind]
            return torch_library.ProcessGroupLibrary(group, kinds, owned=True, former=former)

        super().__init__(
            rank,
            world_size,
            met,
            join,
            name=self.kind,
            timeout=timeout,
            job=job,
            generation=generation,
        )


class GlooBackend(_NamedBackend):
    """One rank of a Gloo group of its own. CPU tensors.

    rank, world_size  this rank's number, and how many there are
    master_addr       `"host:port"` where rank 0 holds the store through which they meet
    timeout           seconds that a call waits at most, the rendezvous of the ranks included
    job, generation   ranks of another job, or of an earlier start of it, are not met
    listener          for rank 0: a socket that listens at `master_addr` already

    Blocks until all ranks have met. Torch's store knows no token: any process that reaches it can
    take part. Otherwise as `TorchBackend`. Raises `InvalidWorldSizeError`, `InvalidRankError`,
    `BackendUnavailableError` (this build of torch lacks it, or the port is in use),
    `CollectiveTimeoutError` if not all ranks come.
    """

    kind = "gloo"


class NcclBackend(_NamedBackend):
    """One rank of an NCCL group of its own.

    As `GlooBackend`. CUDA tensors, on the device that is current (`torch.cuda.set_device`). Its
    collectives run on torch's streams: a call returns when the result is ordered before the next
    work of this thread's stream. CPU tensors go over the mesh.
    """

    kind = "nccl"


class UccBackend(_NamedBackend):
    """One rank of a UCC group of its own.

    As `GlooBackend`.
    """

    kind = "ucc"


_INSTALL = {
    "gloo": "install a build of torch with Gloo: the wheels from pytorch.org have it",
    "nccl": "install a build of torch for CUDA, from pytorch.org (choose a CUDA platform there)",
    "ucc": "build torch from source with USE_UCC=1: its wheels come without",
}


def check_available(*kinds: str) -> None:
    """Raise `BackendUnavailableError` if this build of torch has no such process groups."""
    if not torch.distributed.is_available():
        raise BackendUnavailableError(
            "this build of torch has no torch.distributed: install one that has it, such as those "
            "from pytorch.org; or use the backend 'tcp' or 'shm', which do not need it"
        )
    for name in dict.fromkeys(kinds):
        if not getattr(torch.distributed, f"is_{name}_available")():
            raise BackendUnavailableError(
                f"this build of torch has no {name.upper() if name != 'gloo' else 'Gloo'}: "
                f"{_INSTALL[name]}; or use the backend 'tcp' or 'shm', which need neither"
            )
