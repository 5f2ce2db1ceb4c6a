"""The launcher's store: the small table through which ranks find each other (torch's TCPStore)."""

from __future__ import annotations

import logging
import socket
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from phalanx.launch.reaper import die_with_parent
from phalanx.wire.control import is_loopback

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

log = logging.getLogger("phalanx")

# Seconds between two looks at something that another process has to do first.
FIRST_PAUSE, LONGEST_PAUSE = 0.001, 0.1


def listen_for_store(host: str, port: int) -> socket.socket:
    """Return a socket that listens where a store of `host` belongs; port 0 is any free one.

    That is the one interface of `host`. Where `host` is a name that means loopback on this host
    alone, no other host could connect there: the socket listens on all interfaces, and the log says
    so. `OSError` when the address is taken or another host's.
    """
    own = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    if is_loopback(own) and not is_loopback(host):
        log.warning(
            "%s means %s on this host, so the launcher's store listens on all of its interfaces: "
            "give the address of the one that the other hosts use, instead of a name",
            host,
            own,
        )
        if socket.has_dualstack_ipv6():
            return socket.create_server(
                ("", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True
            )
        own = ""
    family = socket.AF_INET6 if ":" in own else socket.AF_INET
    return socket.create_server((own, port), family=family, backlog=1024)


def hold_store(
    host: str, port: int, *, timeout: float, listener: socket.socket | None = None
) -> tuple[Store, int]:
    """Return a store that this process holds at `host:port`, and its port.

    `timeout` is in seconds. A `listener` that is given is the store's from now on; see
    `listen_for_store` for the one that is made else, and for the errors.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined] # noqa: PLC0415

    if listener is None:
        listener = listen_for_store(host, port)
    port = listener.getsockname()[1]
    store = TCPStore(
        host,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, port


SERVE_STORE = (
    "import sys; sys.path[:1] == [''] and sys.path.pop(0); "
    "from phalanx.launch.store import serve_alone; serve_alone(*map(int, sys.argv[1:]))"
)
"""What Python runs as the process of a store; its arguments are those of `serve_alone`."""


def serve_alone(parent: int, listener: int) -> None:
    """Hold a store in this process, at the socket of this descriptor, as long as `parent` lives."""
    die_with_parent(parent)
    _store = hold_store("127.0.0.1", 0, timeout=60.0, listener=socket.socket(fileno=listener))
    threading.Event().wait()


def connect_store(host: str, port: int, deadline: float) -> Store:
    """Return the launcher's store at `host:port`; tries again until `deadline`.

    `deadline` is a time of the monotonic clock. When it has passed this raises why the last try
    failed: an `OSError`, or torch's `RuntimeError`.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined] # noqa: PLC0415

    pause = FIRST_PAUSE
    while True:
        left = max(deadline - time.monotonic(), pause)
        try:
            # A plain socket says soon and in words what the store's own client says at length.
            socket.create_connection((host, port), left).close()
            store: Store = TCPStore(
                host,
                port,
                is_master=False,
                timeout=timedelta(seconds=max(left, 1.0)),
                wait_for_workers=False,
            )
        except (OSError, RuntimeError):
            if time.monotonic() + pause > deadline:
                raise
        else:
            return store
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
