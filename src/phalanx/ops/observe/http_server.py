"""The HTTP server under `/metrics` (metrics.py) and the page of a job (watch/web.py).

    caller ---> one thread accepts ---> a thread for each connection: reads, answers, hangs up

A stranger costs `LONGEST_REQUEST` bytes, `SECONDS`, and one of `CONNECTIONS` places at most.
http.server takes any number of connections, for any time. A page of another site, in a browser,
gets nothing: it can only send that site's name as `Host`, though the name may resolve to this
address (DNS rebinding).
"""

from __future__ import annotations

import ipaddress
import re
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import suppress
from time import monotonic
from typing import NamedTuple

from phalanx.transport.tcp.loop import LONGEST_SLEEP, Reactor

SECONDS = 5.0  # from a connection's begin to its end; each event that follows has as many
CONNECTIONS = 16  # at a time; more are closed at once
LONGEST_REQUEST = 8 << 10  # bytes; a longer request gets no answer
_REST = 1.0  # seconds without accepting, when it cannot
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[\w.-]+)(?::\d{1,5})?")


class HttpRequest(NamedTuple):
    """One request, whose body, if any, is not read. `path` excludes the part from `?` on."""

    client: socket.socket
    headers: str  # of every answer
    method: str
    path: str

    def reply(
        self,
        status: str,
        body: bytes | str | None = "",
        *,
        kind: str = "text/plain; charset=utf-8",
        also: str = "",
    ) -> None:
        """Send the answer; without its body to HEAD. None: the caller sends the body.

        `also` are more headers, each with its line's end. Raises OSError for a client that is slow,
        or gone.
        """
        content = body.encode() if isinstance(body, str) else body
        length = "" if content is None else f"Content-Length: {len(content)}\r\n"
        head = (
            f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\n{length}"
            f"Connection: close\r\n{self.headers}{also}\r\n"
        )
        self.client.sendall(head.encode() + (b"" if self.method == "HEAD" else content or b""))


class HttpServer(ABC):
    """Answers requests at a listener, which is its own from now on, until `close`.

    thread      the name of its threads
    names       that callers may use for it, in small letters
    by_address  whether callers may use any address, too

    A subclass sets its attributes before it calls this constructor.
    """

    remedy: str  # the answer to a caller that uses another name
    headers = ""  # of every answer, each with its line's end

    def __init__(
        self,
        listener: socket.socket,
        thread: str,
        names: Iterable[str],
        *,
        by_address: bool = False,
        seconds: float = SECONDS,
    ) -> None:
        self._listener = listener
        self._names, self._by_address = frozenset(names), by_address
        self._seconds = seconds
        self._lock = threading.RLock()
        self._connected: dict[socket.socket, threading.Thread] = {}
        self._reactor = Reactor()
        listener.setblocking(False)
        self._listen()
        self._thread = threading.Thread(target=self._run, name=thread, daemon=True)
        self._thread.start()

    @abstractmethod
    def answer(self, request: HttpRequest) -> None:
        """Answer a request that calls this server by its name."""

    def close(self) -> None:
        """Close all connections. The port is free, and no thread left, when this returns."""
        with self._lock:
            self._reactor.forget(self._listener)
            self._listener.close()
            self._reactor.wake()
        self._thread.join()
        self._reactor.close()
        with self._lock:
            connected = list(self._connected.items())
        for client, thread in connected:
            with suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
            thread.join()

    def _run(self) -> None:
        with self._lock:
            while self._listener.fileno() >= 0:
                self._reactor.turn(LONGEST_SLEEP, self._lock)

    def _listen(self) -> None:
        if self._listener.fileno() >= 0:
            self._reactor.watch(self._listener, self._accept)

    def _accept(self, readable: bool, writable: bool) -> None:
        """Give the next caller a thread, if there is a place. Lock held."""
        try:
            client, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # such as of a process that has too many files open
            self._reactor.forget(self._listener)
            self._reactor.call_later(_REST, self._listen)
            return
        if len(self._connected) < CONNECTIONS:
            thread = threading.Thread(
                target=self._talk, args=(client,), name=self._thread.name, daemon=True
            )
            with suppress(RuntimeError):  # this process can have no further thread
                thread.start()
                self._connected[client] = thread
                return
        client.close()

    def _talk(self, client: socket.socket) -> None:
        try:
            with suppress(OSError):  # it is gone, or slow
                self._serve(client)
        finally:
            with self._lock:
                del self._connected[client]
            client.close()

    def _serve(self, client: socket.socket) -> None:
        deadline, head = monotonic() + self._seconds, b""
        while b"\r\n\r\n" not in head:
            left = deadline - monotonic()
            if left <= 0 or len(head) >= LONGEST_REQUEST:
                return
            client.settimeout(left)
            data = client.recv(LONGEST_REQUEST - len(head))
            if not data:
                return
            head += data
        client.settimeout(max(deadline - monotonic(), 0.001))
        line, *fields = head.partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")
        words = line.split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            HttpRequest(client, self.headers, "", "").reply("400 Bad Request")
            return
        request = HttpRequest(client, self.headers, words[0], words[1].partition("?")[0])
        if self._is_called(fields):
            self.answer(request)
        else:
            request.reply("403 Forbidden", f"{self.remedy}\n")

    def _is_called(self, fields: Iterable[str]) -> bool:
        """Return whether there is one `Host`, and it names this server."""
        pairs = [field.partition(":") for field in fields]
        hosts = [value.strip() for name, _, value in pairs if name.strip().lower() == "host"]
        found = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
        if found is None:
            return False
        host = found[1].lower().rstrip(".")
        with suppress(ValueError):  # of a name
            return host in self._names or (
                self._by_address and bool(ipaddress.ip_address(host.strip("[]")))
            )
        return False
