"""`phalanx watch --web`: a page that shows a job while it runs, for this user on this host.

    gather.follow -> Feed -> GET /<word>/          page.html, with its style and script
                          -> GET /<word>/events    server-sent events, one for each state

An event holds the latest `JobState`, and a `Sample` of each state that its page has not had: they
are what the timeline and the plots are drawn from. Who opens the page later gets those of the last
minute at once. A page that is slow to read misses states, and no samples.

Who may look: whoever knows the word in the address, which is drawn at random for each start. The
server listens on loopback only, and answers no request that a page of another site could make: the
name in `Host` has to be one of this host's loopback (or an attacker's name could be made to point
here), and nothing but GET is allowed. A request costs a stranger 8 KiB, five seconds, and one of
`CLIENTS` connections at most.
"""

from __future__ import annotations

import hmac
import io
import math
import re
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
from typing_extensions import override

from phalanx.errors import MisuseError
from phalanx.ops.observe.one_page import assemble
from phalanx.ops.observe.watch.state import JobState, RankState

MINUTE = 60.0  # seconds of samples that are kept
MOST_SAMPLES = 240
CLIENTS = 16  # connections at a time
PAGES = 8  # that are open at a time
LONGEST_REQUEST = 8 << 10
PATIENCE = 5.0  # seconds for a request, and for a page to take an event
_GOODBYE = 1.0  # seconds for the last event
_LOGGED = 4  # values that the program logs, of which there are plots

_LOOPBACK = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?", re.IGNORECASE)
_STATUS = {
    "starting": "s",
    "running": "r",
    "stopped": "t",
    "dead": "d",
    "unreachable": "u",
    "ended": "e",
}


class Sample(msgspec.Struct, kw_only=True):
    """What is drawn of one state of a job.

    time           seconds since 1970, by the watcher's clock
    ranks          three characters for each rank: shares of time communicating and waiting, 0..z,
                   and its status (see `_STATUS`)
    steps          seconds that the last step of the fastest and the slowest rank took
    sent, received bytes a second, of all ranks together
    values         means over the ranks of what the program logs, such as the loss
    """

    time: float
    ranks: str
    steps: tuple[float, float]
    sent: float
    received: float
    values: dict[str, float]


def sample(job: JobState) -> Sample:
    """Return what is drawn of a state."""
    steps = [rank.step_seconds for rank in job.ranks if rank.step_seconds > 0]
    logged: dict[str, list[float]] = {}
    for rank in job.ranks:
        for name, value in rank.values.items():
            if isinstance(value, float | int) and math.isfinite(value):
                logged.setdefault(name, []).append(value)
    # The loss first, if there is one.
    names = sorted(logged, key=lambda name: ("loss" not in name.lower(), name))[:_LOGGED]
    return Sample(
        time=job.time,
        ranks="".join(map(_shares, job.ranks)),
        steps=(min(steps, default=0.0), max(steps, default=0.0)),
        sent=sum(rank.sent for rank in job.ranks),
        received=sum(rank.received for rank in job.ranks),
        values={name: sum(logged[name]) / len(logged[name]) for name in names},
    )


def _shares(rank: RankState) -> str:
    digits = "0123456789abcdefghijklmnopqrstuvwxyz"
    shares = (rank.communicating, rank.waiting) if rank.status == "running" else (0.0, 0.0)
    return "".join(digits[round(share * 35)] for share in shares) + _STATUS[rank.status]


class Feed:
    """The latest state of a job and the samples before it, for any number of pages.

    number   of the latest state, from 1
    over     whether it is the last one, or the server ends
    """

    def __init__(self) -> None:
        self.number = 0
        self.over = False
        self._state = b"null"
        self._samples: deque[tuple[int, float, bytes]] = deque(maxlen=MOST_SAMPLES)
        self._changed = threading.Condition()

    def put(self, job: JobState) -> None:
        """A new state has come."""
        state, drawn = msgspec.json.encode(job), msgspec.json.encode(sample(job))
        with self._changed:
            self.number += 1
            self._state = state
            self._samples.append((self.number, job.time, drawn))
            while self._samples[0][1] < job.time - MINUTE:
                self._samples.popleft()
            self._changed.notify_all()

    def end(self) -> None:
        """No state comes any more."""
        with self._changed:
            self.over = True
            self._changed.notify_all()

    def after(self, number: int) -> tuple[int, bytes]:
        """Wait for a state later than `number`; return its number and its event.

        The event is empty at the end. It has all samples after `number` that there are.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.number > number or self.over)
            if self.number <= number:
                return number, b""
            new = b",".join(drawn for place, _, drawn in self._samples if place > number)
            event = b'data: {"job":%s,"samples":[%s]}\n\n' % (self._state, new)
            return self.number, event


class PageServer(ThreadingHTTPServer):
    """Serves the page of one feed on loopback, at a port of its own if it is 0.

    address   what to open in a browser

    Raises `MisuseError` if the port cannot be had.
    """

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = CLIENTS

    def __init__(self, feed: Feed, port: int = 0) -> None:
        try:
            super().__init__(("127.0.0.1", port), _Request)
        except (OSError, OverflowError) as error:
            raise MisuseError(
                f"--web {port}: nothing can listen at 127.0.0.1:{port} ({error}): name another "
                "port, or 0 for one that is free"
            ) from error
        self.feed = feed
        self.word = secrets.token_urlsafe(24)
        page, self.policy = assemble(__package__, more_policy="; connect-src 'self'")
        self.page = page.encode()
        self.connections = threading.BoundedSemaphore(CLIENTS)
        self.pages = threading.BoundedSemaphore(PAGES)

    @property
    def address(self) -> str:
        """What to open in a browser; it lets anybody in who has it."""
        return f"http://127.0.0.1:{self.server_port}/{self.word}/"

    @override
    def process_request(self, request: Any, client_address: Any) -> None:
        if not self.connections.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self.connections.release()
            raise

    @override
    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.connections.release()

    @override
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away, or is too slow, is no error."""


class _Request(BaseHTTPRequestHandler):
    """One request, and the answer to it; then the connection ends."""

    server: PageServer
    server_version = "phalanx"
    sys_version = ""

    @override
    def setup(self) -> None:
        super().setup()
        self.rfile = io.BytesIO(_head(self.connection))
        self.connection.settimeout(PATIENCE)

    @override
    def parse_request(self) -> bool:
        if not super().parse_request():
            return False
        self.close_connection = True
        refused = self._refused()
        if refused is not None:
            self.send_error(*refused)
        return refused is None

    def _refused(self) -> tuple[HTTPStatus, str] | None:
        """Why the request is not answered, if it is not."""
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or not _LOOPBACK.fullmatch(hosts[0].strip()):
            return HTTPStatus.FORBIDDEN, "open it as 127.0.0.1 or localhost"
        word = self.path.split("?")[0].split("/")[1:2]
        if not hmac.compare_digest("".join(word).encode(), self.server.word.encode()):
            return HTTPStatus.FORBIDDEN, "the address that phalanx watch printed has a word in it"
        if self.command != "GET":
            return HTTPStatus.METHOD_NOT_ALLOWED, "GET only"
        return None

    def do_GET(self) -> None:
        """Answer with the page, or with events."""
        place = self.path.split("?")[0].removeprefix(f"/{self.server.word}")
        if place == "/":
            self._begin("text/html; charset=utf-8", len(self.server.page))
            self.wfile.write(self.server.page)
        elif place == "/events":
            self._send_events()
        else:
            self.send_error(HTTPStatus.NOT_FOUND, "there is nothing here")

    def _send_events(self) -> None:
        server, number = self.server, 0
        if not server.pages.acquire(blocking=False):
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, "too many pages are open")
            return
        try:
            self._begin("text/event-stream")
            while True:
                number, event = server.feed.after(number)
                if not event:
                    return
                self.wfile.write(event)
        finally:
            server.pages.release()

    def _begin(self, kind: str, length: int | None = None) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()

    @override
    def end_headers(self) -> None:
        policy = (
            f"{self.server.policy}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        for name, value in (
            ("Content-Security-Policy", policy),
            ("X-Content-Type-Options", "nosniff"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
            ("Referrer-Policy", "no-referrer"),
            ("Cache-Control", "no-store"),
        ):
            self.send_header(name, value)
        super().end_headers()

    @override
    def log_message(self, format: str, *args: Any) -> None:
        """The terminal is the user's."""


def _head(connection: socket.socket) -> bytes:
    """Read a request up to the end of its headers; "" if it is too long or too slow."""
    deadline, head = time.monotonic() + PATIENCE, b""
    while b"\r\n\r\n" not in head and b"\n\n" not in head:
        left = deadline - time.monotonic()
        if left <= 0 or len(head) >= LONGEST_REQUEST:
            return b""
        connection.settimeout(left)
        try:
            data = connection.recv(LONGEST_REQUEST - len(head))
        except OSError:
            return b""
        if not data:
            return b""
        head += data
    return head


def serve(
    states: Iterable[JobState], port: int, *, ready: Callable[[str], object]
) -> JobState | None:
    """Show states on a page until there is no further one; return the last.

    `ready` is called with the page's address. The page goes on showing the last state when the
    server has ended.
    """
    feed, state = Feed(), None
    with PageServer(feed, port) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True)
        thread.start()
        try:
            ready(server.address)
            for state in states:
                feed.put(state)
        finally:
            feed.end()
            server.shutdown()
            thread.join()
            deadline = time.monotonic() + _GOODBYE
            for _ in range(PAGES):  # all pages have the last state
                server.pages.acquire(timeout=max(0.0, deadline - time.monotonic()))
    return state
