"""`phalanx watch --web`: a page that shows a job while it runs, for this user on this host.

    gather.follow -> Feed -> GET /<word>/          page.html, with its style and script
                          -> GET /<word>/events    server-sent events, one for each state

An event holds the latest `JobState`, and a `Sample` of each state that its page has not had: the
data of the timeline and the plots. A page opened later gets those of the last minute at once, and
the logged values of the whole time since the watch began. A page that is slow to read misses
states, and no samples.

Access: only with the word in the address, which is drawn at random for each start. The server
listens on loopback only, takes only names of loopback as `Host`, and answers nothing but GET. Its
bounds are those of http_server.py.
"""

from __future__ import annotations

import hmac
import math
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import closing
from typing import get_args

import msgspec
from typing_extensions import override

from phalanx.errors import MisuseError
from phalanx.ops.observe.http_server import CONNECTIONS, SECONDS, HttpRequest, HttpServer
from phalanx.ops.observe.one_page import assemble, digit
from phalanx.ops.observe.watch.state import JobState, RankState, Status
from phalanx.transport.tcp.addresses import listen_at

MINUTE = 60.0  # seconds of samples that are kept
MOST_SAMPLES = 240
MOST_MOMENTS = 600  # of the curves of the whole time
PAGES = 8  # that are open at a time
_GOODBYE = 1.0  # seconds for the last event
_LOGGED = 4  # values that the program logs, of which there are plots

_STATUS: dict[Status, str] = dict(zip(get_args(Status), "srtdue", strict=True))


class Sample(msgspec.Struct, kw_only=True):
    """The data that a page draws of one state of a job.

    Ranks that do not run any more count for `ranks` alone: their last values are old.
    """

    time: float  # seconds since 1970, by the watcher's clock
    # Three characters a rank: shares of time communicating and waiting, 0..z, and its `_STATUS`.
    ranks: str
    steps: tuple[float, float]  # seconds that the last step of the fastest and slowest rank took
    sent: float  # bytes a second, of all ranks together
    received: float
    values: dict[str, float]  # means over the ranks of logged values, such as the loss


def sample(job: JobState) -> Sample:
    """Return the data to draw of a state."""
    running = [rank for rank in job.ranks if rank.status == "running"]
    steps = [rank.step_seconds for rank in running if rank.step_seconds > 0]
    logged: dict[str, list[float]] = {}
    for rank in running:
        for name, value in rank.values.items():
            if isinstance(value, float | int) and math.isfinite(value):
                logged.setdefault(name, []).append(value)
    # The loss first, if there is one.
    names = sorted(logged, key=lambda name: ("loss" not in name.lower(), name))[:_LOGGED]
    return Sample(
        time=job.time,
        ranks="".join(map(_shares, job.ranks)),
        steps=(min(steps, default=0.0), max(steps, default=0.0)),
        sent=sum(rank.sent for rank in running),
        received=sum(rank.received for rank in running),
        values={name: sum(logged[name]) / len(logged[name]) for name in names},
    )


def _shares(rank: RankState) -> str:
    shares = (rank.communicating, rank.waiting) if rank.status == "running" else (0.0, 0.0)
    return "".join(map(digit, shares)) + _STATUS[rank.status]


class Curves:
    """Logged values since the watch began: at most so many moments, evenly spread over that time.

    Whenever there are too many, every other one goes, and from then on half as many are taken.
    """

    def __init__(self, most: int = MOST_MOMENTS) -> None:
        self.moments: list[tuple[float, dict[str, float]]] = []
        self._most = most
        self._every = 1
        self._came = 0

    def add(self, time: float, values: dict[str, float]) -> None:
        """Add the values of a moment; they may be left out, or others for them."""
        if self._came % self._every == 0:
            self.moments.append((time, values))
        self._came += 1
        if len(self.moments) > self._most:
            del self.moments[1::2]
            self._every *= 2


class Feed:
    """The latest state of a job and the samples before it, for any number of pages."""

    def __init__(self) -> None:
        self.number = 0  # of the latest state, from 1
        self.over = False  # whether it is the last one, or the server ends
        self._state = b"null"
        self._samples: deque[tuple[int, float, bytes]] = deque(maxlen=MOST_SAMPLES)
        self._curves = Curves()
        self._changed = threading.Condition()

    def put(self, job: JobState) -> None:
        """Add a new state for all pages."""
        drawn = sample(job)
        state, data = msgspec.json.encode(job), msgspec.json.encode(drawn)
        with self._changed:
            self.number += 1
            if drawn.values:
                self._curves.add(drawn.time, drawn.values)
            self._state = state
            self._samples.append((self.number, job.time, data))
            while self._samples[0][1] < job.time - MINUTE:
                self._samples.popleft()
            self._changed.notify_all()

    def end(self) -> None:
        """End the feed: no state comes any more."""
        with self._changed:
            self.over = True
            self._changed.notify_all()

    def after(self, number: int) -> tuple[int, bytes]:
        """Wait for a state later than `number`; return its number and its event.

        The event is empty at the end. It has all samples after `number` that there are, and the
        first one, after 0, the curves.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.number > number or self.over)
            if self.number <= number:
                return number, b""
            new = b",".join(drawn for place, _, drawn in self._samples if place > number)
            curves = b"null" if number else msgspec.json.encode(self._curves.moments)
            event = b'data: {"job":%s,"samples":[%s],"curves":%s}\n\n' % (self._state, new, curves)
            return self.number, event


class PageServer(HttpServer):
    """Serves the page of one feed on loopback, at a port of its own if it is 0.

    Raises `MisuseError` if the port is not available.
    """

    remedy = "open it as 127.0.0.1 or localhost"

    def __init__(self, feed: Feed, port: int = 0) -> None:
        try:
            listener = listen_at(socket.AF_INET, ("127.0.0.1", port), backlog=CONNECTIONS)
        except (OSError, OverflowError) as error:
            raise MisuseError(
                f"--web {port}: nothing can listen at 127.0.0.1:{port} ({error}): name another "
                "port, or 0 for one that is free"
            ) from error
        self.feed = feed
        self.word = secrets.token_urlsafe(24)
        self.port = listener.getsockname()[1]
        # To open in a browser; anybody with it has access.
        self.address = f"http://127.0.0.1:{self.port}/{self.word}/"
        self._page, policy = assemble(__package__, more_policy="; connect-src 'self'")
        self.headers = (
            f"Content-Security-Policy: {policy}; base-uri 'none'; form-action 'none'; "
            "frame-ancestors 'none'\r\n"
            "X-Content-Type-Options: nosniff\r\n"
            "Cross-Origin-Resource-Policy: same-origin\r\n"
            "Referrer-Policy: no-referrer\r\n"
            "Cache-Control: no-store\r\n"
        )
        self._places = threading.BoundedSemaphore(PAGES)
        super().__init__(listener, "phalanx watch page", ("127.0.0.1", "localhost", "[::1]"))

    @override
    def answer(self, request: HttpRequest) -> None:
        word = "".join(request.path.split("/")[1:2])
        place = request.path.removeprefix(f"/{self.word}")
        if not hmac.compare_digest(word.encode(), self.word.encode()):
            why = "the address that phalanx watch printed has a word in it\n"
            request.reply("403 Forbidden", why)
        elif request.method != "GET":
            request.reply("405 Method Not Allowed", "GET only\n")
        elif place == "/":
            request.reply("200 OK", self._page, kind="text/html; charset=utf-8")
        elif place != "/events":
            request.reply("404 Not Found", "there is nothing here\n")
        elif not self._places.acquire(blocking=False):
            request.reply("503 Service Unavailable", "too many pages are open\n")
        else:
            try:
                self._send_events(request)
            finally:
                self._places.release()

    def _send_events(self, request: HttpRequest) -> None:
        request.reply("200 OK", None, kind="text/event-stream")
        number, event = self.feed.after(0)
        while event:
            request.client.settimeout(SECONDS)
            request.client.sendall(event)
            number, event = self.feed.after(number)

    @override
    def close(self) -> None:
        """Stop when all pages have the last state, or a moment is over."""
        self.feed.end()
        deadline = time.monotonic() + _GOODBYE
        for _ in range(PAGES):
            self._places.acquire(timeout=max(0.0, deadline - time.monotonic()))
        super().close()


def serve(
    states: Iterable[JobState], port: int, *, ready: Callable[[str], object]
) -> JobState | None:
    """Show states on a page until there is no further one; return the last.

    `ready` is called with the page's address. The page goes on showing the last state when the
    server has ended.
    """
    feed, state = Feed(), None
    with closing(PageServer(feed, port)) as server:
        ready(server.address)
        for state in states:
            feed.put(state)
    return state
