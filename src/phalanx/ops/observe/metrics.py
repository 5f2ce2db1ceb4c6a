"""Metrics: the counters of each rank, for Prometheus and OpenTelemetry.

    PHALANX_METRICS=9400           rank 0 of each host serves http://127.0.0.1:9400/metrics, the
                                   next rank of the host the next port, and so on
    PHALANX_METRICS=10.0.0.7:9400  there: whoever can connect can read them, but for pages of other
                                   sites in a browser: what `Host` says has to be an address, or a
                                   name of this host, or the one that stands here
    PHALANX_METRICS=otel           they go to the meter provider that the program has set up

What is told is one table, `METRICS`. The text is our own, some 20 lines, and so is the server: that
of prometheus_client takes any number of connections, for any time, and would be one more package.
A rank that cannot listen warns, and trains without.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import logging
import math
import os
import re
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from phalanx.errors import MisuseError
from phalanx.transport.tcp.addresses import listen_at
from phalanx.wire.control import Endpoint, is_loopback, parse_address

if TYPE_CHECKING:
    import asyncio

    from phalanx.core.backend import Backend
    from phalanx.core.counters import Counts, LoggedStep
    from phalanx.core.engine import Engine

log = logging.getLogger("phalanx")

VARIABLE = "PHALANX_METRICS"
LOOPBACK = "127.0.0.1"
OTEL = "otel"
MAX_REQUEST = 8 << 10  # bytes
MAX_CONNECTIONS = 16  # at a time; more are closed at once
MAX_SECONDS = 5.0  # from a connection's begin to its end
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[\w.-]+)(?::\d{1,5})?")


def check(environ: Mapping[str, str]) -> Endpoint | str | None:
    """What `PHALANX_METRICS` says: where rank 0 of each host listens, `OTEL`, or None.

    Raises `MisuseError` for anything else, and where OpenTelemetry is missing.
    """
    text = environ.get(VARIABLE, "").strip()
    if not text:
        return None
    if text == OTEL:
        if importlib.util.find_spec("opentelemetry") is None:
            raise MisuseError(
                f"{VARIABLE}={OTEL} needs OpenTelemetry's API, and the program its SDK: "
                "pip install 'phalanx[otel]'"
            )
        return OTEL
    host, _, port = text.rpartition(":")
    try:
        return parse_address(f"{host or LOOPBACK}:{port}")
    except ValueError as error:
        raise MisuseError(
            f"{VARIABLE}={text!r} is none of: a port, such as 9400, on which the first rank of "
            "each host answers on loopback, and the next ones on the next ports; host:port, for "
            f"another address; {OTEL}, for OpenTelemetry"
        ) from error


def begin(backend: Backend, _: object = None) -> None:
    """Count from now on, and serve the numbers as `PHALANX_METRICS` says, until the backend closes.

    Rank r of a host, by the order of ranks, listens r ports after the first. If it cannot, it warns
    and goes on. Raises what `check` does.
    """
    where, engine = check(os.environ), backend.engine
    if where is None:
        return
    engine.count()
    if not isinstance(where, Endpoint):
        hand_to_otel(engine)
        return
    local_rank = backend.topology[: backend.rank].count(backend.topology[backend.rank])
    endpoint = where._replace(port=where.port + local_rank)
    try:
        listener = _listen(endpoint)
    except (OSError, OverflowError) as error:
        log.warning(
            "rank %d serves no metrics: it cannot listen at %s (%s=%s, and %d ranks of this host "
            "before it): %s. Is another job there? The training goes on",
            backend.rank,
            endpoint,
            VARIABLE,
            os.environ[VARIABLE],
            local_rank,
            getattr(error, "strerror", None) or error,
        )
        return
    names = {endpoint.host, socket.gethostname()}
    if not is_loopback(endpoint.host):
        names.add(socket.getfqdn())  # which may ask a name server
    MetricsServer(engine, listener, names)


def _listen(endpoint: Endpoint) -> socket.socket:
    if endpoint.port > 65535:
        raise OverflowError("the last port is 65535")
    family, _, _, _, address = socket.getaddrinfo(*endpoint, type=socket.SOCK_STREAM)[0]
    return listen_at(family, address, backlog=MAX_CONNECTIONS)


# ------------------------------------------------------------------------------
# The table: what is told.

Labels: TypeAlias = "dict[str, str]"
Samples: TypeAlias = "Iterable[tuple[Labels, float]]"


class Metric(NamedTuple):
    """One row.

    name   without `phalanx_`; Prometheus sees `_total` behind that of a counter
    kind   `counter` or `gauge`
    unit   as OpenTelemetry writes it
    read   gives its samples, each with its labels but for the rank
    """

    name: str
    kind: str
    unit: str
    help: str
    read: Callable[[Counts, LoggedStep], Samples]

    @property
    def prometheus_name(self) -> str:
        """As Prometheus sees it."""
        return f"phalanx_{self.name}{'_total' if self.kind == 'counter' else ''}"


def _of_peers(*fields: tuple[str, Labels]) -> Callable[[Counts, LoggedStep], Samples]:
    """A sample for each peer and field of `PeerCounts`."""

    def read(counts: Counts, _: LoggedStep) -> Samples:
        for peer, counted in counts.peers.items():
            for field, labels in fields:
                yield {"peer": str(peer), **labels}, getattr(counted, field)

    return read


def _waiting(counts: Counts, _: LoggedStep) -> Samples:
    """For each peer, and for nobody knows whom."""
    for peer, counted in counts.peers.items():
        yield {"peer": str(peer)}, counted.seconds_waiting
    yield {"peer": "unknown"}, counts.seconds_unknown


def _of_operations(field: str) -> Callable[[Counts, LoggedStep], Samples]:
    return lambda counts, _: (
        ({"operation": name}, getattr(each, field)) for name, each in counts.operations.items()
    )


def _of_step(read: Callable[[LoggedStep], float | None]) -> Callable[[Counts, LoggedStep], Samples]:
    """One sample, once a step has ended."""

    def samples(_: Counts, step: LoggedStep) -> Samples:
        value = read(step)
        if step.number >= 0 and value is not None:
            yield {}, value

    return samples


MESSAGE, MEMORY = {"by": "message"}, {"by": "memory"}
METRICS = (
    Metric(
        "sent_bytes",
        "counter",
        "By",
        "Bytes that a peer has from this rank: of messages, and read in shared memory.",
        _of_peers(("bytes_sent", MESSAGE), ("bytes_given", MEMORY)),
    ),
    Metric(
        "received_bytes",
        "counter",
        "By",
        "Bytes that this rank has from a peer: of messages, and read in shared memory.",
        _of_peers(("bytes_received", MESSAGE), ("bytes_read", MEMORY)),
    ),
    Metric(
        "sent_messages",
        "counter",
        "{message}",
        "Messages to a peer.",
        _of_peers(("messages_sent", {})),
    ),
    Metric(
        "received_messages",
        "counter",
        "{message}",
        "Messages from a peer.",
        _of_peers(("messages_received", {})),
    ),
    Metric(
        "kept_bytes",
        "gauge",
        "By",
        "Memory of a peer's messages that no receive has asked for yet.",
        _of_peers(("bytes_kept", {})),
    ),
    Metric(
        "waiting_seconds",
        "counter",
        "s",
        "Seconds in which a thread was blocked in a call, by the peer whose part came last.",
        _waiting,
    ),
    Metric(
        "operations",
        "counter",
        "{operation}",
        "Collectives and messages that are over, well or not.",
        _of_operations("count"),
    ),
    Metric(
        "operation_seconds",
        "counter",
        "s",
        "Their seconds, from the call to the end; those that overlap count each.",
        _of_operations("seconds"),
    ),
    Metric(
        "failures",
        "counter",
        "{call}",
        "Calls that have ended with an error, by its class.",
        lambda counts, _: (({"error": name}, n) for name, n in counts.failures.items()),
    ),
    Metric(
        "step",
        "gauge",
        "{step}",
        "The number of the last step, as the program logs it, or counted from 0.",
        _of_step(lambda step: step.number),
    ),
    Metric(
        "step_seconds",
        "gauge",
        "s",
        "Seconds that a step has taken since the one before that was logged or counted.",
        _of_step(lambda step: step.seconds),
    ),
    Metric(
        "step_ended_seconds",
        "gauge",
        "s",
        "When that step ended, in seconds since 1970.",
        _of_step(lambda step: step.ended),
    ),
    Metric(
        "logged",
        "gauge",
        "1",
        "The latest values that the program has logged, such as its loss.",
        lambda _, step: (({"name": name}, value) for name, value in step.values.items()),
    ),
)


# ------------------------------------------------------------------------------
# OpenTelemetry.


def hand_to_otel(engine: Engine) -> None:
    """Give OpenTelemetry's global meter provider an observable instrument for each metric.

    Whenever its reader collects, it gets the numbers of that moment; after the end the last ones.
    The program may set up its provider before or afterwards.
    """
    from opentelemetry import metrics  # noqa: PLC0415

    meter = metrics.get_meter("phalanx")
    create = {"counter": meter.create_observable_counter, "gauge": meter.create_observable_gauge}
    for metric in METRICS:

        def observe(_: object, metric: Metric = metric) -> Iterator[metrics.Observation]:
            for labels, value in metric.read(engine.count(), engine.progress.latest):
                yield metrics.Observation(value, {"rank": str(engine.rank), **labels})

        create[metric.kind](
            f"phalanx.{metric.name}", [observe], unit=metric.unit, description=metric.help
        )


# ------------------------------------------------------------------------------
# Prometheus: the text, and the server.


def exposition(counts: Counts, step: LoggedStep) -> str:
    """All metrics of a rank in Prometheus's text format 0.0.4."""
    lines = []
    for metric in METRICS:
        name = metric.prometheus_name
        lines += [f"# HELP {name} {metric.help}", f"# TYPE {name} {metric.kind}"]
        for labels, value in metric.read(counts, step):
            pairs = ",".join(
                f'{label}="{_escaped(text)}"'
                for label, text in {"rank": str(counts.rank), **labels}.items()
            )
            lines.append(f"{name}{{{pairs}}} {_number(value)}")
    return "\n".join([*lines, ""])


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


class MetricsServer:
    """Answers GET and HEAD of /metrics for one rank, in a thread that ends with its backend.

    Requests are bounded: in bytes, in seconds, and in how many there are at a time.

    names   by which it may be called, beside localhost and addresses
    """

    def __init__(
        self,
        engine: Engine,
        listener: socket.socket,
        names: Iterable[str] = (),
        *,
        seconds: float = MAX_SECONDS,
    ) -> None:
        self._engine = engine
        self._names = {"localhost", *(name.lower() for name in names)}
        self._listener = listener
        self._seconds = seconds
        self._began = threading.Event()
        self._end: Callable[[], object] = bool  # nothing, before it has begun
        name = f"phalanx metrics of rank {engine.rank}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        engine.at_close.append(self.close)
        engine.in_child.append(listener.close)  # a data loader's worker must not keep the port

    def close(self) -> None:
        """Stop; the port is free when this returns."""
        self._began.wait()
        with suppress(RuntimeError):  # it has ended
            self._end()
        self._thread.join()

    def _run(self) -> None:
        import asyncio  # noqa: PLC0415 - which a rank without metrics need not wait for

        try:
            asyncio.run(self._serve())
        finally:
            self._began.set()

    async def _serve(self) -> None:
        import asyncio  # noqa: PLC0415

        loop, over = asyncio.get_running_loop(), asyncio.Event()
        listener, connected = self._listener, set[asyncio.Task[None]]()

        def accept() -> None:
            try:
                client, _ = listener.accept()
            except OSError:  # such as of a process that has too many files open
                loop.remove_reader(listener)
                loop.call_later(1.0, listen)
                return
            client.setblocking(False)
            if len(connected) >= MAX_CONNECTIONS:
                client.close()
                return
            task = loop.create_task(self._talk(client))
            connected.add(task)
            task.add_done_callback(partial(ended, client))

        def ended(client: socket.socket, task: asyncio.Task[None]) -> None:
            connected.discard(task)
            client.close()

        def listen() -> None:
            loop.add_reader(listener, accept)

        listener.setblocking(False)
        listen()
        self._end = partial(loop.call_soon_threadsafe, over.set)
        self._began.set()
        try:
            await over.wait()
        finally:
            loop.remove_reader(listener)
            listener.close()

    async def _talk(self, client: socket.socket) -> None:
        import asyncio  # noqa: PLC0415

        with suppress(OSError, asyncio.TimeoutError):  # it is gone, or slow
            await asyncio.wait_for(self._answer(client), self._seconds)

    async def _answer(self, client: socket.socket) -> None:
        import asyncio  # noqa: PLC0415

        loop, request = asyncio.get_running_loop(), b""
        while b"\r\n\r\n" not in request:
            piece = await loop.sock_recv(client, MAX_REQUEST)
            if not piece:
                return
            request += piece
            if len(request) > MAX_REQUEST:
                await loop.sock_sendall(client, _response(f"431 Over {MAX_REQUEST} Bytes"))
                return
        await loop.sock_sendall(client, self._respond(request))

    def _respond(self, request: bytes) -> bytes:
        """The answer to a request, whose body, if any, is not read."""
        words = request.partition(b"\r\n")[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return _response("400 Bad Request")
        if not self._is_called(request):
            body = f"call it by an address, this host's name, or the one in {VARIABLE}\n"
            return _response("403 Forbidden", body)
        if words[1].partition(b"?")[0] != b"/metrics":
            return _response("404 Not Found", "only /metrics is here\n")
        if words[0] not in (b"GET", b"HEAD"):
            return _response("405 Method Not Allowed", also="Allow: GET, HEAD\r\n")
        text = exposition(self._engine.count(), self._engine.progress.latest)
        return _response("200 OK", text, head_only=words[0] == b"HEAD")

    def _is_called(self, request: bytes) -> bool:
        """Whether `Host` says who this is: a page of another site can only send that site's name,
        of which it may say that its address is this one (DNS rebinding).
        """
        fields = (line.partition(b":") for line in request.split(b"\r\n")[1:])
        hosts = [value.strip() for name, _, value in fields if name.strip().lower() == b"host"]
        found = _HOST.fullmatch(hosts[0].decode("latin-1")) if len(hosts) == 1 else None
        if found is None:
            return False
        host = found[1].lower().rstrip(".")
        with suppress(ValueError):
            ipaddress.ip_address(host.strip("[]"))
            return True
        return host in self._names


def _response(status: str, body: str = "", *, also: str = "", head_only: bool = False) -> bytes:
    content = body.encode()
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n{also}\r\n"
    )
    return head.encode() + (b"" if head_only else content)
