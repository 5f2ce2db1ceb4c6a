"""The launcher's store: the small table through which ranks find each other (torch's TCPStore)."""

from __future__ import annotations

import logging
import socket
import time
from datetime import timedelta
from typing import Protocol

from phalanx.errors import BackendUnavailableError
from phalanx.wire.control import Endpoint, is_loopback

__all__ = ["FIRST_PAUSE", "LONGEST_PAUSE", "Store", "connect_store", "hold_store"]

log = logging.getLogger("phalanx")

FIRST_PAUSE, LONGEST_PAUSE = 0.001, 0.1
"""Seconds between two looks at something that another process has to do first."""


class Store(Protocol):
    """What ranks use of torch's store. Values are bytes; a count is one too."""

    def set(self, key: str, value: str, /) -> None:
        """Set `key` for every rank."""

    def get(self, key: str, /) -> bytes:
        """Return the value of `key`."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to the count `key`, from 0; return what it is now."""

    def check(self, keys: list[str], /) -> bool:
        """Return whether all `keys` are there."""


def hold_store(host: str, port: int, *, timeout: float) -> tuple[Store | None, int]:
    """Return a store that this process holds at `host:port`, and its port (0: any free one).

    A server that torch makes later in this process for the same port is this one, which listens
    on the one interface of `host` instead of all. Where `host` is a name that means loopback on
    this host alone, no other host could come by there: the store is None, and left to torch, which
    listens on all interfaces; the log says so. `OSError` when the address is taken or another
    host's.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined] # noqa: PLC0415

    own = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    if is_loopback(own) and not is_loopback(host):
        log.warning(
            "%s means %s on this host, so the launcher's store listens on all of its interfaces: "
            "give the address of the one that the other hosts use, instead of a name",
            host,
            own,
        )
        return None, port
    family = socket.AF_INET6 if ":" in own else socket.AF_INET
    listener = socket.create_server((own, port), family=family, backlog=1024)
    port = listener.getsockname()[1]
    store: Store = TCPStore(
        host,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )
    return store, port


def connect_store(host: str, port: int, *, rank: int, deadline: float) -> Store:
    """Return the launcher's store at `host:port`, for `rank`; tries again until `deadline`.

    `deadline` is a time of the monotonic clock. `BackendUnavailableError` when it has passed.
    """
    pause = FIRST_PAUSE
    while True:
        left = max(deadline - time.monotonic(), pause)
        try:
            # A plain socket says soon and in words what the store's own client says at length.
            socket.create_connection((host, port), left).close()
            return _client(host, port, max(left, 1.0))
        except (OSError, RuntimeError) as error:
            if time.monotonic() + pause > deadline:
                raise BackendUnavailableError(
                    f"rank {rank} cannot reach the launcher's store at {Endpoint(host, port)} "
                    f"({error}): is the launcher running, and may this host connect to it?",
                    rank=rank,
                ) from error
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


def _client(host: str, port: int, timeout: float) -> Store:
    from torch.distributed import TCPStore  # type: ignore[attr-defined] # noqa: PLC0415

    store: Store = TCPStore(
        host,
        port,
        is_master=False,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
    )
    return store
