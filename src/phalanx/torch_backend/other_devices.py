"""Tensors on other devices than the CPU: handed to the backend that the program names for them.

    init_process_group("cpu:phalanx,cuda:nccl")     and `new_group` of that world

torch makes one backend for each device of such a name, but stops at one that is a `ProcessGroup`,
as ours is up to torch 2.13. So ours makes the backends that torch has not made, each at the first
tensor of its device, with torch's own function.

    a tensor on                             goes to
    the CPU                                 ours
    a device that is named with phalanx     ours, by way of host memory
    another device that is named            the backend of that name
    a device that is not named              nobody: the error names the fix
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import ProcessGroup

from phalanx.core.backend import Backend
from phalanx.core.device import device_kinds
from phalanx.errors import (
    BackendUnavailableError,
    CollectiveTimeoutError,
    DistributedError,
    MisuseError,
    UnsupportedOperationError,
    name_ranks,
)
from phalanx.torch_backend.errors import as_torch
from phalanx.torch_backend.rendezvous import count_rendezvous
from phalanx.torch_internals import (
    backend_of,
    devices_of,
    make_part_of_group,
    variables_of_batch,
    variables_of_group_being_made,
)

NAME = "phalanx"
ALMOST = 0.9  # of a timeout: backends round
c10d: Any = torch.distributed.distributed_c10d


class NamedDevices(NamedTuple):
    """The backends that a program has named for the devices of one group.

    backends  kind of device -> name of its backend
    made      torch's group of those backends that it has made before ours; None if there are none
    """

    backends: Mapping[str, str]
    made: ProcessGroup | None = None


def named_for_devices(rank: int) -> NamedDevices:
    """Return the backends that are named for the group that torch is making by calling us.

    torch does not tell a creator: they are local variables of its function that calls the creator.
    Raises `UnsupportedOperationError` if another backend is named for the CPU.
    """
    torchs = variables_of_group_being_made()
    if torchs is None:
        return NamedDevices({"cpu": NAME})
    config, group = torchs["backend_config"], torchs["pg"]
    backends = {kind: str(name) for kind, name in config.get_device_backend_map().items()}
    if backends.get("cpu", NAME) != NAME:
        raise UnsupportedOperationError(
            f"rank {rank}: init_process_group({_written(backends)!r}): a group of {NAME} takes the "
            f"tensors of the CPU: write cpu:{NAME}",
            rank=rank,
            op="init_process_group",
        )
    return NamedDevices(backends, group if devices_of(group) else None)


def _written(backends: Mapping[str, str]) -> str:
    """Return the backends as `init_process_group` takes them."""
    return ",".join(f"{kind}:{name}" for kind, name in backends.items())


def tensors_in(arguments: Any) -> Iterator[Tensor]:
    """Yield the tensors among the arguments of a call, which may be lists of lists."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from tensors_in(argument)


class DeviceGroup(NamedTuple):
    """Torch's group for the tensors of one kind of device, and its backend."""

    group: ProcessGroup
    backend: Any

    @classmethod
    def of(cls, group: ProcessGroup, kind: str) -> DeviceGroup:
        """Return the group for a kind of device."""
        return cls(group, backend_of(group, kind))


class OtherDevices:
    """One rank's part of a group for tensors that are not on the CPU.

    backend  ours; from now on it takes tensors only of the devices that are named with it
    options  torch's options for the group; `backend_options` for other backends, too
    store    of the world that the group belongs to, in which this is rank `world_rank`

    Every rank makes a backend at its own first tensor of the device. Then it waits for the others
    as that backend does, for at most the group's timeout: Gloo for all ranks, at its creation; NCCL
    for those that take part, in its first collective.
    """

    def __init__(
        self,
        backend: Backend,
        named: NamedDevices,
        options: Any,
        backend_options: object,
        store: Any,
        world_rank: int,
    ) -> None:
        self.named = named.backends
        self.ours = {"cpu"} | {kind for kind, name in self.named.items() if name == NAME}
        backend.devices = frozenset(self.ours) & device_kinds()
        self.timeout: timedelta = options.timeout
        self._rank: int = options.group_rank
        self._size: int = options.group_size
        self._ranks = list(options.global_ranks_in_group)
        self._backend_options = backend_options
        self._store, self._world_rank = store, world_rank
        self._group = backend.group
        self._lock = threading.RLock()
        self._making: set[str] = set()
        self._together = False  # torch has begun to put messages together
        made = named.made
        kinds = [] if made is None else [device.type for device in devices_of(made)]
        self._made = {kind: DeviceGroup.of(made, kind) for kind in kinds if made is not None}
        self._failed: dict[str, DistributedError] = {}

    @property
    def device_types(self) -> list[torch.device]:
        """All devices whose tensors the group takes, the CPU first."""
        return [torch.device(kind) for kind in dict.fromkeys(("cpu", *self.named))]

    def device(self, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> torch.device | None:
        """Return the device of a call's first tensor; None if the call is ours.

        A barrier has no tensor: it is for another backend if `device_ids` name one that exists.
        """
        tensor = next(tensors_in(arguments), None)
        device: torch.device | None = tensor.device if tensor is not None else None
        if device is None:
            device = getattr(arguments[-1] if arguments else named.get("opts"), "device", None)
            if device is None or device.type not in self.named:
                return None
        return None if device.type in self.ours else device

    # Calls ----------------------------------------------------------------------------------

    def call(self, name: str, op: str, device: torch.device, *arguments: Any, **named: Any) -> Any:
        """Call torch's method `name` on the group of the device, and return its result.

        op   its name in errors
        """
        other = self.backend_for(device, op)
        began = time.monotonic()
        try:
            return getattr(other.group, name)(*arguments, **named)
        except RuntimeError as error:
            missing = self._missing(device.type, began)
            if not missing:
                raise
            raise as_torch(self._not_come(device.type, op, missing, error)) from error

    def coalesce(self, name: str, device: torch.device) -> Any:
        """Call `_start_coalescing` or `_end_coalescing` on the group of the device."""
        self._together = name == "_start_coalescing"
        return self.call(name, "coalescing", device, device)

    def message(self, name: str, tensors: Sequence[Tensor], *arguments: int) -> Any:
        """Call `send`, `recv` or `recv_anysource` on the group of the device.

        NCCL needs the messages of one `batch_isend_irecv` together: else two ranks that send to
        each other would deadlock. torch up to 2.13 groups them only for its own process groups, so
        this does it: the last of them gives a work for all, the others None.
        """
        device = tensors[0].device
        backend = self.backend_for(device, name).backend
        torchs = None
        if getattr(backend, "supports_coalescing", False) and not self._together:
            torchs = variables_of_batch()
        if torchs is None:
            return self.call(name, name, device, tensors, *arguments)
        batch, now = torchs["p2p_op_list"], torchs["p2p_op"]
        if now is batch[0]:
            self.call("_start_coalescing", name, device, device)
        self.call(name, name, device, tensors, *arguments)
        return self.call("_end_coalescing", name, device, device) if now is batch[-1] else None

    # Making them ----------------------------------------------------------------------------

    def backend_for(self, device: torch.device, op: str) -> DeviceGroup:
        """Return the backend of the device. The first call makes it, and may block for other ranks.

        Raises `UnsupportedOperationError` if none is named, `BackendUnavailableError` if it cannot
        be made, and `CollectiveTimeoutError`, which names the absent ranks, ever after.
        """
        kind = device.type
        if kind not in self._made:
            if kind not in self.named:
                raise as_torch(self._not_named(device, op))
            with self._lock:
                if kind not in self._made and kind not in self._failed:
                    self._try_to_make(kind, op)
            if kind in self._failed:
                raise as_torch(self._failed[kind])
        return self._made[kind]

    def _try_to_make(self, kind: str, op: str) -> None:
        problem = "that is closed" if self._group.closed else ""
        if kind in self._making:
            problem = f"whose backend for {kind} is just being made: that one asks for itself"
        if problem:
            raise as_torch(
                MisuseError(f"rank {self._rank}: {op} on a group {problem}", rank=self._rank, op=op)
            )
        began = time.monotonic()
        self._making.add(kind)
        try:
            self._made[kind] = self._make(kind)
        except Exception as error:
            missing = self._missing(kind, began)
            if missing:
                failed: DistributedError = self._not_come(kind, op, missing, error)
            else:
                failed = self._not_made(kind, op, error)
            self._failed[kind] = failed
        finally:
            self._making.remove(kind)

    def _make(self, kind: str) -> DeviceGroup:
        """Return torch's group for the device, under a name and keys that all members know."""
        store = self._keys()
        store.set(f"{kind}/{self._rank}", "")
        group = make_part_of_group(
            self._size,
            self._rank,
            self._ranks,
            c10d.Backend(f"{kind}:{self.named[kind]}"),
            store,
            f"{NAME}/{self._group.id:x}/{kind}",
            backend_options=self._backend_options,
            timeout=self.timeout,
        )
        return DeviceGroup.of(group, kind)

    def _keys(self) -> Any:
        """Return the store's part for this group's backends. A store may outlive the group."""
        times = count_rendezvous(self._store, self._world_rank)
        return c10d.PrefixStore(f"{NAME}/devices/{times}/{self._group.id:x}", self._store)

    # Errors ---------------------------------------------------------------------------------

    def _missing(self, kind: str, began: float) -> list[int]:
        """Return the ranks that have not begun to make the backend; a call since `began` waits for
        them.

        Nobody, if it failed before the timeout, or torch has made the backend before ours.
        """
        missing = []
        if time.monotonic() - began >= ALMOST * self.timeout.total_seconds():
            with suppress(RuntimeError):  # of a store that is gone
                store = self._keys()
                ranks = range(self._size)
                missing = [rank for rank in ranks if not store.check([f"{kind}/{rank}"])]
        return [] if self._rank in missing else missing

    def _not_come(
        self, kind: str, op: str, missing: list[int], error: Exception
    ) -> CollectiveTimeoutError:
        seconds = self.timeout.total_seconds()
        return CollectiveTimeoutError(
            f"rank {self._rank}: {op}: {name_ranks(missing)} of {self._size} gave the group no "
            f"tensor on {kind}, and the backend {self.named[kind]!r} is made for all: every rank "
            f"makes it at its first one. {self.named[kind]} says: {error}",
            rank=self._rank,
            peer=missing[0],
            op=op,
            seconds=seconds,
        )

    def _not_made(self, kind: str, op: str, error: Exception) -> BackendUnavailableError:
        name = self.named[kind]
        return BackendUnavailableError(
            f"rank {self._rank}: {op}: the backend {name!r}, which init_process_group was told for "
            f"{kind}, cannot be made: {error}",
            rank=self._rank,
            op=op,
        )

    def _not_named(self, device: torch.device, op: str) -> UnsupportedOperationError:
        name = c10d.Backend.default_device_backend_map.get(
            device.type, NAME if device.type in device_kinds() else None
        )
        write = ""
        if name is not None:
            names = _written({"cpu": NAME, **self.named, device.type: name})
            write = f" write init_process_group({names!r}), or"
        takes = " and ".join(str(each) for each in self.device_types)
        return UnsupportedOperationError(
            f"rank {self._rank}: {op}: this group takes tensors on {takes}, not on {device}:"
            f"{write} move it with .cpu()",
            rank=self._rank,
            op=op,
        )

    # The end --------------------------------------------------------------------------------

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long a call on another device waits at most, for those made and to be made."""
        self.timeout = timeout
        for other in self._made.values():
            other.backend.set_timeout(timeout)

    def end(self) -> list[ProcessGroup]:
        """Return torch's groups that were made, each once; the caller ends them. Make no more."""
        groups = dict.fromkeys(other.group for other in self._made.values())
        self._made.clear()
        return list(groups)
