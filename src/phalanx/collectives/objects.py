"""Collectives and messages of objects: first the lengths of their bytes, then the bytes.

Of a collective both are one operation with one number, so that objects may be under way beside
other collectives. The size of the second is known only when the first has come: between the two,
the program makes room.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from operator import itemgetter
from typing import TypeVar, cast

import torch

from phalanx.collectives.cost import choose
from phalanx.collectives.layout import WORK, Binder, Range, chunk_ranges, cut, ranges_of
from phalanx.collectives.request import (
    ProgramRequest,
    Request,
    asynchronous,
    check_backend,
    collective,
)
from phalanx.collectives.schedules import ROOTED, for_root, row_for
from phalanx.collectives.tuning import tuning_of
from phalanx.core.backend import Backend
from phalanx.core.steps import Round
from phalanx.errors import (
    MalformedObjectError,
    PeerLostError,
    UnsupportedObjectError,
    UnsupportedOperationError,
)
from phalanx.wire.codec import decode, encode
from phalanx.wire.memory import tensor_bytes

T = TypeVar("T")
CONTENT = 1  # the buffer after WORK, in which the lengths are
MOST = 1 << 40  # bytes that an object may have
LENGTH = 8  # bytes of a length


def _encoded(obj: object, backend: Backend, op: str) -> bytearray:
    """Encode an object. If it cannot be encoded, the group fails: others wait for it."""
    rank = backend.rank
    try:
        return encode(obj)
    except Exception as error:
        what = str(error) if isinstance(error, UnsupportedObjectError) else repr(error)
        problem = f"rank {rank}: {op}: {what}"
        backend.fail(UnsupportedOperationError(problem, rank=rank, op=op))
        if not isinstance(error, UnsupportedObjectError):
            raise
        raise UnsupportedObjectError(problem, rank=rank, op=op) from None


def _exchange(
    gather: str,
    mine: bytearray | None,
    backend: Backend,
    result: Callable[[list[object]], T],
    label: str,
    timeout: float | None,
    root: int = 0,
) -> Request[T]:
    """Gather or broadcast objects, as the collective of that name does with tensors.

    mine     the bytes of this rank's object
    result   makes the caller's result of the objects, one for each rank that gives one
    """
    name, rank, size = f"{gather}_object", backend.rank, backend.world_size
    owners = [root] if gather in ROOTED else list(range(size))
    lengths = torch.zeros(len(owners), dtype=torch.int64)
    if mine is not None:
        lengths[owners.index(rank)] = len(mine)
    buffers = [tensor_bytes(lengths)]
    places: list[Range] = []

    def rounds(buffer: int, parts: list[int]) -> Iterator[Round]:
        about = 1 << sum(parts).bit_length()  # so that choices are few enough to be remembered
        algorithm = choose(gather, about, backend).algorithm
        row = row_for(gather, algorithm, backend.topology, root)
        ranges = ranges_of(parts) if len(parts) > 1 else chunk_ranges(sum(parts), row.chunks(size))
        schedule = for_root(gather, row.schedule, root)
        for step in Binder(rank, cut(ranges, buffer=buffer), 1).bind(schedule(rank, size)):
            assert isinstance(step, Round)  # there is nothing to reduce
            yield step

    def program() -> Iterator[Round]:
        yield from rounds(WORK, [LENGTH] * len(owners))
        announced = lengths.tolist()
        places.extend(ranges_of(announced))
        room = _room(announced, owners, name, backend.finished, backend)  # of which this is next
        buffers.append(tensor_bytes(room))
        if mine is not None:
            buffers[CONTENT][slice(*places[owners.index(rank)])] = mine
        yield from rounds(CONTENT, announced)

    def objects() -> T:
        parts = (buffers[CONTENT][slice(*place)] for place in places)
        owned = zip(parts, owners, strict=True)
        return result([_decoded(part, name, owner, backend) for part, owner in owned])

    tuning = tuning_of(backend)
    told = [f"root {root}" if gather in ROOTED else "", label, tuning and f"tuning {tuning}"]
    signature = ", ".join(filter(None, told))
    memory = cast("tuple[memoryview, ...]", buffers)  # a list, since the program adds one
    return ProgramRequest(backend, name, program(), memory, objects, signature, timeout)


def _room(
    announced: list[int], owners: list[int], name: str, sequence: int, backend: Backend
) -> torch.Tensor:
    """Return memory for objects of these lengths, as told by their owners."""
    lies = [length for length in announced if not 0 < length <= MOST]
    if lies:
        blamed, problem = lies[0], "no object has that length"
    else:
        try:
            return torch.empty(sum(announced), dtype=torch.uint8)
        except RuntimeError:
            blamed, problem = max(announced), f"there is no memory for {sum(announced):,} in all"
    rank, peer = backend.rank, owners[announced.index(blamed)]
    raise MalformedObjectError(
        f"rank {rank}: {name} #{sequence}: rank {peer} announced an object of {blamed:,} bytes: "
        f"{problem}",
        rank=rank,
        peer=peer,
        op=name,
        sequence=sequence,
    )


def _decoded(content: memoryview, name: str, owner: int, backend: Backend) -> object:
    try:
        return decode(content)
    except MalformedObjectError as error:
        raise MalformedObjectError(
            f"rank {backend.rank}: {name}: the bytes of rank {owner} are no object: {error}. Do "
            "all ranks run the same version of Phalanx and of torch?",
            rank=backend.rank,
            peer=owner,
            op=name,
        ) from None


# ------------------------------------------------------------------------------


@collective
def all_gather_object(
    obj: object, backend: Backend, *, label: str = "", timeout: float | None = None
) -> Request[list[object]]:
    """Every rank's `obj`, as a list in rank order.

    obj         None, bool, int, float, str, bytes, a tensor on the CPU, or a list, tuple or dict of
                such; another one on each rank, if you like
    label, timeout   as `all_reduce` has them

    Blocks until this rank has all objects, which are new ones, its own too. Types survive, tensors
    arrive contiguous and without a gradient, and nothing is pickled. Moves the objects' bytes like
    `all_gather`, after a round of their lengths. Raises `UnsupportedObjectError` (a TypeError and
    an `UnsupportedOperationError`), naming the part, such as `obj["a"][3]`, of an object that
    cannot be sent: of another type, a subclass of these types, containing itself, nested more than
    100 deep. The others learn of it, and the group is broken. `CollectiveTimeoutError`,
    `PeerLostError`, `DesyncError`.
    """
    mine = _encoded(obj, backend, "all_gather_object")
    return _exchange("all_gather", mine, backend, list, label, timeout)


@collective
def broadcast_object(
    obj: object,
    backend: Backend,
    root: int = 0,
    *,
    label: str = "",
    timeout: float | None = None,
) -> Request[object]:
    """The object of rank `root`, on every rank.

    obj         what `all_gather_object` takes; only the root's matters, the others may give None
    root        the rank whose object it is; the same on every rank
    label, timeout   as `all_reduce` has them

    Blocks until this rank has the object, which is a new one, on the root too. Moves its bytes like
    `broadcast`, after those of its length. Raises as `all_gather_object` does, on the root, and
    `InvalidRankError` for a root that does not exist.
    """
    root = backend.check_rank(root, "root")
    mine = _encoded(obj, backend, "broadcast_object") if backend.rank == root else None
    return _exchange("broadcast", mine, backend, itemgetter(0), label, timeout, root)


async_all_gather_object = asynchronous(all_gather_object)
async_broadcast_object = asynchronous(broadcast_object)


# ------------------------------------------------------------------------------
# Messages: a head has the length of the object, and the stream in which its bytes come, which no
# other object has: receivers of one tag cannot take each other's.

HEADS = 1 << 31  # the stream of heads
HEAD = struct.Struct("<QQ")


def send_object(
    obj: object, backend: Backend, dst: int, *, tag: int = 0, timeout: float | None = None
) -> None:
    """Send an object to rank `dst`, which need not know its length, nor what it is.

    obj      what `all_gather_object` takes: plain data, bytes and tensors; nothing is pickled
    tag      objects with one tag from one rank arrive in order; they never mix with `send`'s
    timeout  seconds that this rank waits at most; by default the backend's

    Blocks until the bytes have left, as `send` does. Moves 16 bytes, and the object's. Raises
    `InvalidRankError` and `SelfSendError`; `UnsupportedObjectError`, which names the part that
    cannot be sent; `PeerLostError` and `CollectiveTimeoutError`. An object that cannot be sent, or
    is given up in the middle, breaks the group, as the other side waits for it.
    """
    check_backend(backend, "send_object(obj, backend, dst)", dst)
    dst, content = backend.check_peer(dst), _encoded(obj, backend, "send_object")
    numbers = cast("Iterator[int]", backend.kept.setdefault("objects sent", count(2)))
    stream = HEADS * next(numbers)
    send = partial(backend.isend, dst=dst, tag=tag, timeout=timeout, background=False)
    send(HEAD.pack(stream, len(content)), stream=HEADS).wait()
    with _to_the_end(backend):
        send(content, stream=stream).wait()


def recv_object(
    src: int | None, backend: Backend, *, tag: int = 0, timeout: float | None = None
) -> object:
    """Receive the next object that rank `src`, or with None any rank, sends by `send_object`.

    timeout  seconds until it begins to come, at most; by default the backend's, which its rest has

    Blocks until it is here, and returns it: a new one, of the types that were sent. If none has
    begun to come, a `CollectiveTimeoutError` breaks nothing: call again. Else as `send_object`;
    also raises `MalformedObjectError` for bytes that are no object.
    """
    check_backend(backend, "recv_object(src, backend)", src)
    head, receive = bytearray(HEAD.size), partial(backend.irecv, tag=tag, background=False)
    first = receive(head, src, timeout=timeout, stream=HEADS)
    sender, (stream, length) = first.wait(), HEAD.unpack(head)
    with _to_the_end(backend):
        room = _room([length], [sender], "recv_object", first.sequence, backend)
        receive(room, sender, stream=stream).wait()
    return _decoded(tensor_bytes(room), "recv_object", sender, backend)


@contextmanager
def _to_the_end(backend: Backend) -> Iterator[None]:
    """Fail the group if this block does not come to its end: the other side waits for it."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, PeerLostError):
            what = f"rank {backend.rank} gave up in the middle of an object: {error!r}"
            backend.fail(PeerLostError(what, rank=backend.rank))
        raise
