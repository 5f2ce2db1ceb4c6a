"""The options of a connection's socket, and the size of its send buffer."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import TypeAlias

from phalanx.transport.crowding import Crowding

# TCP resends within a second after a short outage (TCP_RTO_MAX_MS: Linux 6.15, uapi tcp.h).
TCP_RTO_MAX_MS = 44
LONGEST_RETRANSMIT = 1000  # milliseconds, the least that the kernel takes

Option: TypeAlias = "tuple[int, int, int | bytes]"
OPTIONS: tuple[Option, ...] = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.IPPROTO_TCP, TCP_RTO_MAX_MS, LONGEST_RETRANSMIT),
)

# Inside a host no packet is lost, so nothing is gained by a sender that paces itself: with BBR,
# large messages take half as long again as with reno, which every user may choose. And a sender
# should not be far ahead: 2.5 GB/s for the 0.1 ms until a receiver runs are 256 KiB. Bytes beyond
# that have left the caches before they are read. But where cores are short the receiver waits for
# its turn on one, a millisecond and more for each buffer: then the kernel chooses the size, up to
# 4 MiB, as it does without the option (SO_BUF_LOCK: Linux 5.15, uapi asm-generic/socket.h). Not for
# more ranks than cores: with these buffers four on two take 1.4 times as long for 256 MiB.
SO_BUF_LOCK = 72
SMALL_BUFFER: Option = (socket.SOL_SOCKET, socket.SO_SNDBUF, 256 << 10)
BUFFER_OF_THE_KERNEL: Option = (socket.SOL_SOCKET, SO_BUF_LOCK, 0)
INSIDE_A_HOST: tuple[Option, ...] = (
    (socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno"),
    SMALL_BUFFER,
)


class SendBuffer:
    """A connection's send buffer in the kernel: small inside a host, while cores are not short."""

    def __init__(self, sock: socket.socket) -> None:
        """Set the options above, as far as the kernel knows them."""
        self._sock = sock
        self._inside_a_host = self._crowded = False
        with suppress(OSError):  # a connection that is broken already is noticed later
            self._inside_a_host = sock.getsockname()[:1] == sock.getpeername()[:1]
        for option in OPTIONS + (INSIDE_A_HOST if self._inside_a_host else ()):
            with suppress(OSError):
                sock.setsockopt(*option)

    def fit(self, crowding: Crowding, now: float) -> None:
        """Let the kernel choose the size while cores are short. Call it when the buffer is full."""
        if self._inside_a_host and crowding.at(now) is not self._crowded:
            self._crowded = not self._crowded
            with suppress(OSError):
                self._sock.setsockopt(*(BUFFER_OF_THE_KERNEL if self._crowded else SMALL_BUFFER))
