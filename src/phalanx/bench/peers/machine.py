"""What this machine can do by itself: a plain socket between two processes, and a memory copy."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from phalanx.backends.memory import tensor_bytes
from phalanx.bench.exchange import Exchange
from phalanx.bench.memory import Memory
from phalanx.bench.operations import OPERATIONS, Operation
from phalanx.bench.peers.peer import Binder, Peer, Place, messages
from phalanx.launch.address import address_toward

__all__ = ["Copy", "Socket"]

_ANY_PORT = 9  # nothing is sent there

MOVING = tuple(name for name, row in OPERATIONS.items() if row.source is not None)
"""What moves bytes of a message."""


class Socket(Peer):
    """Blocking `sendall` and `recv_into` between each even rank and the next one, over TCP.

    Beside any operation it sends the same number of bytes one way; beside `ping_pong`, to and fro.
    """

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        one_host = len(set(place.control.topology)) == 1
        own = address_toward(place.master, _ANY_PORT, one_host=one_host)
        family = socket.AF_INET6 if ":" in own else socket.AF_INET
        listener: socket.socket | None = None
        if self.rank % 2 == 0:
            listener = socket.create_server((own, 0), family=family)
        listening = place.control.gather((own, listener.getsockname()[1] if listener else 0))
        self._socket: socket.socket | None = None
        if listener is not None:
            if self.rank + 1 < self.size:
                listener.settimeout(place.timeout)
                self._socket, _ = listener.accept()
            listener.close()
        else:
            address = listening[self.rank - 1]
            self._socket = socket.create_connection(address, place.timeout)
        if self._socket is not None:
            self._socket.settimeout(None)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def binders(self) -> Mapping[str, Binder]:
        """Messages, beside whatever is asked for."""
        return dict.fromkeys(MOVING, self._messages)

    def exchange(
        self, operation: Operation, count: int, kind: str, algorithm: str, memory: Memory
    ) -> Exchange:
        """As many bytes, in messages."""
        row = operation if operation.name == "ping_pong" else OPERATIONS["stream"]
        return super().exchange(row, count, kind, algorithm, memory)

    def _messages(self, operation: Operation, data: Tensor | None, *_: object) -> Exchange:
        return messages(operation, data, self.rank, self.size, self._send, self._recv)

    def _send(self, tensor: Tensor, peer: int) -> None:
        assert self._socket is not None
        self._socket.sendall(tensor_bytes(tensor))

    def _recv(self, tensor: Tensor, peer: int) -> None:
        assert self._socket is not None
        view = tensor_bytes(tensor)
        got = 0
        while got < len(view):
            count = self._socket.recv_into(view[got:])
            if count == 0:
                raise ConnectionError(f"rank {peer} has closed the plain socket")
            got += count

    def close(self) -> None:
        """Hang up."""
        if self._socket is not None:
            with suppress(OSError):
                self._socket.close()


class Copy(Peer):
    """A copy of as many bytes from memory to memory, on all ranks at the same time."""

    @property
    def binders(self) -> Mapping[str, Binder]:
        """Beside whatever is asked for."""
        return dict.fromkeys(MOVING, self._copy)

    def exchange(
        self, operation: Operation, count: int, kind: str, algorithm: str, memory: Memory
    ) -> Exchange:
        """As many bytes, copied."""
        return super().exchange(OPERATIONS["copy"], count, kind, algorithm, memory)

    def _copy(
        self, operation: Operation, source: Tensor | None, out: Tensor | None, *_: object
    ) -> Exchange:
        assert source is not None
        assert out is not None
        return Exchange(operation, source, out, partial(torch.Tensor.copy_, out, source))
