"""`SharedMemoryBackend` and `HybridBackend`: ranks that have memory in common."""

from __future__ import annotations

from phalanx.backends.shm.sharing import Sharing
from phalanx.backends.tcp.mesh_backend import MeshBackend


class SharedMemoryBackend(MeshBackend):
    """One rank of a group whose ranks are processes of one host, and share memory.

    Collectives are done in it: each rank reads what it needs straight from its peers' memory, after
    a look at a flag, and writes in its own only. Tensors from `empty` are in that memory and are
    read where they are; others are staged, in pieces of bounded size. Messages, words of failure
    and signs of life go over TCP, as with `TcpBackend`, whose arguments these are; so a dead or
    stopped peer is known as soon.

    A rank that waits looks at the flags for a short while, in which it offers the processor to
    others, and then sleeps until a peer wakes it. The memory has no name: when the last process
    ends, in whatever way, it is free.

    With `fall_back`, ranks that cannot share memory do all over TCP, and rank 0's log says why;
    `init("auto")` asks for that.

    Raises what `TcpBackend` does, and `BackendUnavailableError` if the ranks are not on one host,
    are not one user's, or this is not Linux.
    """

    sharing = Sharing.ALL


class HybridBackend(MeshBackend):
    """One rank of a group on several hosts: shared memory inside a host, TCP between.

    Collectives of ranks that are all on one host are those of `SharedMemoryBackend`. Of others, a
    host's ranks first do in their memory what they can, so that each host sends its data once.

    The arguments are `TcpBackend`'s. `host` says what this rank's host counts as, where it is not
    the machine that decides: two names on one machine are two hosts.
    """

    sharing = Sharing.HOSTS
