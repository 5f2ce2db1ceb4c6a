"""`PhalanxProcessGroup`: a process group of torch's over a backend of ours.

PhalanxProcessGroup    the group that torch's callers have
PhalanxBackend         the backend in it, from torch 2.14 on
CollectiveMethods      the calls of both
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Backend as TorchBackend
from torch.distributed import ProcessGroup
from torch.distributed import ReduceOp as TorchReduceOp

from phalanx.core.backend import MAX_TAG, Backend
from phalanx.core.reduce_op import ReduceOp
from phalanx.errors import CollectiveTimeoutError, DistributedError, UnsupportedOperationError
from phalanx.torch_backend.errors import as_torch
from phalanx.torch_backend.operations import (
    OLD_NAMES,
    OPERATIONS,
    REDUCE_OPS,
    Operation,
    Settings,
    memory_of,
    only,
)
from phalanx.torch_backend.other_devices import NAME, OtherDevices, tensors_in
from phalanx.torch_backend.work import UNSET, ProcessGroupWork, TogetherWork, seconds_of
from phalanx.torch_internals import (
    at_end_of_backward,
    backward_number,
    dispatch_modes,
    pytree,
    untraced,
)
from phalanx.wire.memory import outside_inference_mode

CPU = torch.device("cpu")
VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
SUM = ReduceOp.SUM, 1.0  # of values that are not multiplied by a factor before
SHORTEST = timedelta.resolution.total_seconds()  # in place of a timeout of 0
CONTAINS_BACKENDS = (2, 14)  # the version from which on a group consists of backends
autograd: Any = torch.autograd
_profiled: Callable[[], bool] = autograd._profiler_enabled


@contextmanager
def recorded(name: str, arguments: Sequence[Any]) -> Iterator[None]:
    """An event `phalanx:name` of the profiler, with the shapes of the tensors."""
    tensors = list(tensors_in(arguments))
    event = autograd._record_function_with_args_enter(f"{NAME}:{name}", *tensors)
    try:
        yield
    finally:
        autograd._record_function_with_args_exit(event)


class CollectiveMethods:
    """All calls of a process group or backend of torch's, those of `OPERATIONS` too.

    backend   ours, which this closes
    others    takes the tensors that are on other devices
    """

    def __init__(self, backend: Backend, others: OtherDevices) -> None:
        self.backend = backend
        self._others = others
        self._backward: tuple[int, list[ProcessGroupWork]] = (-1, [])
        self._backward_failed = False  # whether a backward pass has
        self._together: list[ProcessGroupWork] | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.backend!r})"

    # Torch's queries ------------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the name under which torch knows it."""
        return NAME

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = _supports_time_estimate = False
    supports_shrinking = False
    supports_reconfigure = False
    supports_window = False
    supports_abort_hooks = False
    supports_completion_hooks = False

    @property
    def options(self) -> Any:
        """The group's name, and how long a call waits at most."""
        return TorchBackend.Options(NAME, timedelta(seconds=self.backend.timeout))

    def supports_tensor_alloc(self, device: torch.device | str) -> bool:
        """Return whether `allocate_tensor` gives memory on the device."""
        device = torch.device(device)
        if device.type in self._others.ours:
            return device.type == "cpu"
        backend = self._others.backend_for(device, "allocate_tensor").backend
        return bool(backend.supports_tensor_alloc(device))

    def allocate_tensor(
        self, size: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> Tensor:
        """Return a tensor in memory that the group sends without a copy."""
        device = torch.device(device)
        if device.type in self._others.ours:
            return self.backend.empty(size, dtype=dtype, device=device)
        backend = self._others.backend_for(device, "allocate_tensor").backend
        return backend.allocate_tensor(size, dtype=dtype, device=device)  # type: ignore[no-any-return]

    def _get_sequence_number_for_group(self) -> int:
        return self.backend.finished

    def _set_sequence_number_for_group(self) -> None:
        pass  # collectives are counted from the start

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long a call waits at most."""
        self.backend.timeout = timeout.total_seconds()
        self._others.set_timeout(timeout)

    _set_default_timeout = set_timeout

    # The end --------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Leave in good order: the ranks that wait for this one are told so."""
        with ExitStack() as ends:
            ends.callback(self.backend.close)
            for group in self._others.end():
                ends.callback(group.shutdown)

    def abort(self) -> None:
        """Leave at once: the other ranks see this one as lost."""
        with ExitStack() as ends:
            ends.callback(self.backend.abort)
            for group in self._others.end():
                ends.callback(group.abort)

    # Calls ----------------------------------------------------------------------------------

    def _do(
        self, operation: Operation, tensors: tuple[Any, ...], settings: Settings, blocking: bool
    ) -> ProcessGroupWork:
        if torch.is_inference_mode_enabled():
            return outside_inference_mode(self._do, operation, tensors, settings, blocking)
        try:
            asked = operation.ask(self.backend, settings, *tensors)
            if settings.factor != 1.0:  # now that all has been checked
                tensors = premultiplied(operation, self.backend, settings, tensors)
                asked = operation.ask(self.backend, settings, *tensors)
            if blocking:
                asked.request.run()
                return self._begun(ProcessGroupWork(asked.tensors))
            work = asked.request.issue()
        except DistributedError as error:
            failure = as_torch(error)
            in_backward = backward_number() >= 0
            if blocking or not in_backward or self._backward_failed:
                raise failure from None
            return ProcessGroupWork((), at_end=self._wait_at_end, error=failure)
        return self._begun(ProcessGroupWork(asked.tensors, work, self._wait_at_end))

    def _settings(
        self, operation: Operation, rest: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[Settings, bool]:
        """Return a call's arguments beside its tensors, and whether the caller waits for it."""
        options: Any = rest[0] if rest else named.get("opts")
        if hasattr(options, "asyncOp"):
            short, timeout = operation.short, options.timeout
            op, factor = self._op(options.reduceOp) if "op" in short else SUM
            root = options.rootRank if "root" in short else 0
            return Settings(op, root, seconds_of(timeout), factor), not options.asyncOp
        given = dict(zip((*operation.short, "timeout"), rest, strict=False)) | named
        op, factor = self._op(given["op"]) if "op" in given else SUM
        timeout = seconds_of(given.get("timeout"))
        return Settings(op, given.get("root", 0), timeout, factor), False

    def _op(self, op: Any) -> tuple[ReduceOp, float]:
        if op == TorchReduceOp.SUM:  # a look into the table takes 1 us more
            return SUM
        if not isinstance(op, TorchReduceOp):
            op = TorchReduceOp(op)
        if op != TorchReduceOp.PREMUL_SUM:
            return REDUCE_OPS[op], 1.0
        factor = op.__getstate__()[1]
        return ReduceOp.SUM, factor.item() if isinstance(factor, Tensor) else factor

    def _begun(self, work: ProcessGroupWork) -> ProcessGroupWork:
        if self._together is not None:
            self._together.append(work)
        return work

    def _start_coalescing(self, device: torch.device) -> None:
        if device.type not in self._others.ours:
            self._others.coalesce("_start_coalescing", device)
        else:
            self._together = []

    def _end_coalescing(self, device: torch.device) -> Any:
        if device.type not in self._others.ours:
            return self._others.coalesce("_end_coalescing", device)
        works, self._together = self._together or [], None
        return TogetherWork(works)

    # DDP's reduction ------------------------------------------------------------------------

    def _wait_at_end(self, work: ProcessGroupWork) -> None:
        """Wait for a work at the end of the backward pass in which this is called."""
        task = backward_number()
        if self._backward[0] != task:
            self._backward = (task, [])
            at_end_of_backward(self._end_of_backward)
        self._backward[1].append(work)

    def _end_of_backward(self) -> None:
        (_, works), self._backward = self._backward, (-1, [])
        for work in works:
            work.take_outcome()  # its error stays in the future: DDP has to end this pass,
            self._backward_failed |= not work.is_success()  # and refuse the next one

    # Messages -------------------------------------------------------------------------------

    def _message(self, name: str, tensors: Sequence[Tensor], *where: int) -> Any:
        """Begin to send or receive; `where` is the peer's rank, if there is one, and the tag."""
        if tensors[0].device.type not in self._others.ours:
            return self._others.message(name, tensors, *where)
        if torch.is_inference_mode_enabled():
            return outside_inference_mode(self._message, name, tensors, *where)
        name, (*peer, tag) = name.removesuffix("_anysource"), where
        begin: Any = self.backend.isend if name == "send" else self.backend.irecv
        try:
            tensor = only(tensors, self.backend, name)
            with recorded(name, tensors) if _profiled() else nullcontext():
                work = begin(memory_of(tensor), peer[0] if peer else None, tag=tag)
        except DistributedError as error:
            raise as_torch(error) from None
        return self._begun(ProcessGroupWork((tensor,), work))

    def send(self, tensors: Sequence[Tensor], dst: int, tag: int = 0) -> Any:
        """Begin to send a tensor to rank `dst` of the group."""
        return self._message("send", tensors, dst, tag)

    def recv(self, tensors: Sequence[Tensor], src: int, tag: int = 0) -> Any:
        """Begin to receive a tensor from rank `src` of the group."""
        return self._message("recv", tensors, src, tag)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> Any:
        """Begin to receive the first tensor that anyone sends with this tag."""
        return self._message("recv_anysource", tensors, tag)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Block until all ranks have come; on rank 0 the error names a rank that is late.

        With `wait_all_ranks` it names all of them. Every rank sends rank 0 an empty message, and
        rank 0 answers when all have. A timeout of 0 is not unset here: it passes at once, as Gloo's
        does. The errors have Gloo's words, for which torch's tests look.
        """
        allowed = self.backend.timeout
        if timeout is not None and timeout >= UNSET:
            allowed = timeout.total_seconds()
        try:
            if self.backend.rank:
                _come_to_rank_0(self.backend, allowed or SHORTEST)
            else:
                _await_ranks(self.backend, allowed, every=wait_all_ranks)
        except DistributedError as error:
            raise as_torch(error) from None


def _come_to_rank_0(backend: Backend, seconds: float) -> None:
    nothing = torch.empty(0)
    try:
        backend.send(nothing, 0, tag=MAX_TAG, timeout=seconds)
        backend.recv(nothing, 0, tag=MAX_TAG, timeout=seconds)
    except CollectiveTimeoutError as error:
        error.message = (
            f"Rank {backend.rank} successfully reached monitoredBarrier, but received "
            f"errors while waiting for send/recv from rank 0: {error.message}"
        )
        raise


def _await_ranks(backend: Backend, allowed: float, *, every: bool) -> None:
    nothing, seconds = torch.empty(0), allowed or SHORTEST
    others, late = range(1, backend.world_size), []
    works = [backend.irecv(nothing, other, tag=MAX_TAG, timeout=seconds) for other in others]
    for other, work in zip(others, works, strict=True):
        try:
            work.wait()
        except CollectiveTimeoutError:
            late.append(other)
            if not every:
                break
    if late:
        names = f"Rank{'s' if len(late) > 1 else ''} {', '.join(map(str, late))}"
        raise CollectiveTimeoutError(
            f"Rank 0 timed out in monitoredBarrier after {allowed:g} s: {names} failed to "
            "pass monitoredBarrier",
            rank=0,
            peer=late[0],
            op="monitored_barrier",
            seconds=allowed,
        )
    for other in others:
        backend.send(nothing, other, tag=MAX_TAG, timeout=seconds)


def premultiplied(
    operation: Operation, backend: Backend, s: Settings, tensors: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Return a call's tensors, the input scaled by `factor`: in place in the result's memory."""
    *outputs, given = tensors
    copies = bool(outputs) or ("root" in operation.short and s.root != backend.rank)

    def scale(tensor: Tensor) -> Tensor:
        memory = memory_of(tensor)
        if memory.is_sparse or not (memory.is_floating_point() or memory.is_complex()):
            raise UnsupportedOperationError(
                f"rank {backend.rank}: {operation.name}: PREMUL_SUM is for dense tensors of "
                f"floating-point or complex numbers, not {memory.dtype}: scale it, and use SUM",
                rank=backend.rank,
                op=operation.name,
            )
        return torch.mul(memory, s.factor, out=None if copies else memory)

    scaled = pytree.tree_map_only(Tensor, scale, given)
    return (*outputs, scaled) if copies else tensors


class Counted:
    """The operator that a group of torch's own calls, as `CommDebugMode` takes it."""

    def __init__(self, packet: Any) -> None:
        self._overloadpacket = packet

    def __call__(self) -> None:
        """Do nothing: the group runs the collective."""

    def __str__(self) -> str:
        return f"{self._overloadpacket}.default"


def count(method: str, modes: Iterable[Any]) -> None:
    """Tell each `CommDebugMode` that a method of a group is called: nothing is dispatched here."""
    packet = getattr(torch.ops.c10d, f"{method}_", None)
    for mode in modes:
        if packet is not None and hasattr(mode, "comm_counts"):
            mode.__torch_dispatch__(Counted(packet), ())


def _method(name: str, operation: Operation) -> Callable[..., Any]:
    tensor_count = operation.tensors
    counted_as = {new: old for old, new in OLD_NAMES.items()}.get(name, name)

    def call(self: CollectiveMethods, *arguments: Any, **named: Any) -> Any:
        first = arguments[0] if arguments else None
        if type(first) is list and first:
            first = first[0]
        if not getattr(first, "is_cpu", False):  # which costs those of the CPU 0.1 us
            device = self._others.device(arguments, named)
            if device is not None:
                return self._others.call(name, operation.name, device, *arguments, **named)
        if modes := dispatch_modes():
            count(counted_as, modes)
        tensors = arguments[:tensor_count]
        settings, blocking = self._settings(operation, arguments[tensor_count:], named)
        if not _profiled():
            return self._do(operation, tensors, settings, blocking)
        with recorded(operation.name, tensors):
            return self._do(operation, tensors, settings, blocking)

    call.__name__ = operation.name
    call.__doc__ = f"{operation.name}, as torch's process groups have it."
    return call


for _name, _operation in OPERATIONS.items():
    setattr(CollectiveMethods, _name, _method(_name, _operation))
for _old, _new in OLD_NAMES.items():
    setattr(CollectiveMethods, _old, _method(_old, OPERATIONS[_new]))
untraced(CollectiveMethods)


@untraced
class PhalanxBackend(CollectiveMethods, TorchBackend):
    """The backend inside a process group, for tensors on the CPU, from torch 2.14 on."""

    def __init__(self, backend: Backend, others: OtherDevices) -> None:
        TorchBackend.__init__(self, backend.rank, backend.world_size)
        CollectiveMethods.__init__(self, backend, others)


@untraced
class PhalanxProcessGroup(CollectiveMethods, ProcessGroup):
    """One rank of a process group, for torch.

    From torch 2.14 on it contains a `PhalanxBackend`, which torch's code asks for. A group of
    torch's would do less with that backend: its callers get a C++ object around our work. Its
    `is_completed` is false forever, and it does not know the sender of a message from anyone.

    backend   ours, which this closes
    store     torch's, through which the ranks have met, if they have
    others    takes the tensors that are on other devices
    """

    def __init__(self, backend: Backend, store: Any, others: OtherDevices) -> None:
        ProcessGroup.__init__(self, backend.rank, backend.world_size)  # type: ignore[call-arg]
        CollectiveMethods.__init__(self, backend, others)
        self._store = store
        self._name = self._description = ""
        if VERSION >= CONTAINS_BACKENDS:
            custom = ProcessGroup.BackendType.CUSTOM
            self._set_default_backend(custom)
            self._register_backend(CPU, custom, PhalanxBackend(backend, others))

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        """Return the name that torch has given to the group."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Set the group's name, as torch gives it."""
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return torch's description of the group."""
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Set torch's description of the group."""
        self._description = description

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)
    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc  # type: ignore[assignment]

    @property
    def _device_types(self) -> list[torch.device]:
        return self._others.device_types

    def _get_backend(self, device: torch.device | str) -> Any:
        device = torch.device(device)
        if device.type in self._others.ours:
            return super()._get_backend(CPU) if VERSION >= CONTAINS_BACKENDS else self
        return self._others.backend_for(device, "_get_backend").backend

    def get_group_store(self) -> Any:
        """Return the store through which the ranks have met."""
        return self._store
