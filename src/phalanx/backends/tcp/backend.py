"""`TcpBackend`: ranks are processes, on any hosts."""

from __future__ import annotations

from phalanx.backends.tcp.mesh_backend import MeshBackend


class TcpBackend(MeshBackend):
    """One rank of a group whose ranks talk over TCP, IPv4 or IPv6.

    rank, world_size  which one this is, of how many
    master_addr       `"host:port"` (`"[::1]:29500"` for IPv6) where rank 0 listens; the host is one
                      of its own addresses, and it listens there only
    token             the job's secret, the same on every rank, of 16 bytes at least; by default
                      that of PHALANX_TOKEN, or of the file PHALANX_TOKEN_FILE, which only its owner
                      may read. Without one (or with ""), only ranks on this host are let in
    timeout           seconds that a call waits at most, the meeting of the ranks included
    job, generation   ranks of another job, or of an earlier start of it, are turned away
    listener          for rank 0: a socket that listens at `master_addr` already
    heartbeat         seconds within which a call that waits knows of a peer that is stopped or
                      cannot be reached: 3, or PHALANX_HEARTBEAT. `math.inf`: never, but for the
                      timeout. One that holds Python's interpreter for longer than 2/3 of that, on
                      another host, is taken for stopped

    Blocks until all ranks have met and are connected, each with each; those that start early try
    again until the others are there. Then nobody listens any more. A message is sent when the
    kernel has taken it; up to 256 MiB of each peer's that nobody has asked for are kept by this
    process, whenever it is in a call of this backend, those of collectives that the peer has issued
    ahead among them. Beyond that the peer waits, and so does what it sends behind.

    Raises `InvalidWorldSizeError`, `InvalidRankError`, `BackendUnavailableError` (the port is in
    use, the address is not this host's), `AuthenticationError` (another token, job or world size;
    a token of less than 128 bits, or in a file that others can read),
    `CollectiveTimeoutError` (naming the ranks that did not come).
    """
