"""Metrics: the counters of each rank, for Prometheus and OpenTelemetry.

    PHALANX_METRICS=9400           rank 0 of each host serves http://127.0.0.1:9400/metrics, the
                                   next rank of the host the next port, and so on
    PHALANX_METRICS=10.0.0.7:9400  there: all that can connect can read them, but for pages of other
sites in a browser: `Host` has to be an address, or a
                                   name of this host, or the one that stands here
    PHALANX_METRICS=otel           they go to the meter provider that the program has set up

`METRICS` is the table of all metrics. Prometheus's text is written here, in some 20 lines, without
the package prometheus_client. A rank that cannot listen warns, and trains without.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from typing_extensions import override

from phalanx.errors import MisuseError
from phalanx.ops.observe.http_server import CONNECTIONS, SECONDS, HttpRequest, HttpServer
from phalanx.transport.tcp.addresses import listen_at
from phalanx.wire.control import Endpoint, is_loopback, parse_address

if TYPE_CHECKING:
    from phalanx.core.backend import Backend
    from phalanx.core.counters import Counts, LoggedStep
    from phalanx.core.engine import Engine

log = logging.getLogger("phalanx")

VARIABLE = "PHALANX_METRICS"
LOOPBACK = "127.0.0.1"
OTEL = "otel"


def check(environ: Mapping[str, str]) -> Endpoint | str | None:
    """Return the value of `PHALANX_METRICS`: the address of each host's rank 0, `OTEL`, or None.

    Raises `MisuseError` for anything else, and if OpenTelemetry is missing.
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


def begin(backend: Backend, _: object = None, environ: Mapping[str, str] = os.environ) -> None:
    """Count from now on, and serve the numbers by `PHALANX_METRICS`, until the backend closes.

    Rank r of a host, by the order of ranks, listens r ports after the first. If it cannot, it warns
    and goes on. Raises as `check` does.
    """
    where, engine = check(environ), backend.engine
    if where is None:
        return
    engine.count()
    if not isinstance(where, Endpoint):
        hand_to_otel(engine)
        return
    endpoint = where._replace(port=where.port + backend.local_rank)
    try:
        if endpoint.port > 65535:
            raise OverflowError("the last port is 65535")
        family, _, _, _, address = socket.getaddrinfo(*endpoint, type=socket.SOCK_STREAM)[0]
        listener = listen_at(family, address, backlog=CONNECTIONS)
    except (OSError, OverflowError) as error:
        log.warning(
            "rank %d serves no metrics: it cannot listen at %s (%s=%s, and %d ranks of this host "
            "before it): %s. Is another job there? The training goes on",
            backend.rank,
            endpoint,
            VARIABLE,
            environ[VARIABLE],
            backend.local_rank,
            getattr(error, "strerror", None) or error,
        )
        return
    names = {endpoint.host, socket.gethostname()}
    if not is_loopback(endpoint.host):
        names.add(socket.getfqdn())  # which may ask a name server
    MetricsServer(engine, listener, names)


# ------------------------------------------------------------------------------
# The table of all metrics.

Labels: TypeAlias = "dict[str, str]"
Samples: TypeAlias = "Iterable[tuple[Labels, float]]"


class Metric(NamedTuple):
    """One row of the table below."""

    name: str  # without `phalanx_`; Prometheus gets `_total` behind that of a counter
    kind: str  # `counter` or `gauge`
    unit: str  # as OpenTelemetry writes it
    help: str
    read: Callable[[Counts, LoggedStep], Samples]  # each with its labels but for the rank

    @property
    def prometheus_name(self) -> str:
        return f"phalanx_{self.name}{'_total' if self.kind == 'counter' else ''}"


def _of_peers(*fields: tuple[str, Labels]) -> Callable[[Counts, LoggedStep], Samples]:
    """Return a sample for each peer and field of `PeerCounts`."""

    def read(counts: Counts, _: LoggedStep) -> Samples:
        for peer, counted in counts.peers.items():
            for field, labels in fields:
                yield {"peer": str(peer), **labels}, getattr(counted, field)

    return read


def _waiting(counts: Counts, _: LoggedStep) -> Samples:
    """Yield a sample for each peer, and one for waits without a known peer."""
    for peer, counted in counts.peers.items():
        yield {"peer": str(peer)}, counted.seconds_waiting
    yield {"peer": "unknown"}, counts.seconds_unknown


def _of_operations(field: str) -> Callable[[Counts, LoggedStep], Samples]:
    return lambda counts, _: (
        ({"operation": name}, getattr(each, field)) for name, each in counts.operations.items()
    )


def _of_step(read: Callable[[LoggedStep], float | None]) -> Callable[[Counts, LoggedStep], Samples]:
    """Return one sample, once a step has ended."""

    def samples(_: Counts, step: LoggedStep) -> Samples:
        value = read(step)
        if step.number >= 0 and value is not None:
            yield {}, value

    return samples


MESSAGE, MEMORY = {"by": "message"}, {"by": "memory"}
# fmt: off
METRICS = (
    Metric("sent_bytes", "counter", "By",
           "Bytes that a peer has from this rank: of messages, and read in shared memory.",
           _of_peers(("bytes_sent", MESSAGE), ("bytes_given", MEMORY))),
    Metric("received_bytes", "counter", "By",
           "Bytes that this rank has from a peer: of messages, and read in shared memory.",
           _of_peers(("bytes_received", MESSAGE), ("bytes_read", MEMORY))),
    Metric("sent_messages", "counter", "{message}",
           "Messages to a peer.", _of_peers(("messages_sent", {}))),
    Metric("received_messages", "counter", "{message}",
           "Messages from a peer.", _of_peers(("messages_received", {}))),
    Metric("kept_bytes", "gauge", "By",
           "Memory of a peer's messages that no receive has asked for yet.",
           _of_peers(("bytes_kept", {}))),
    Metric("waiting_seconds", "counter", "s",
           "Seconds in which a thread was blocked in a call, by the peer whose part came last.",
           _waiting),
    Metric("operations", "counter", "{operation}",
           "Collectives and messages that are over, well or not.", _of_operations("count")),
    Metric("operation_seconds", "counter", "s",
           "Their seconds, from the call to the end; those that overlap count each.",
           _of_operations("seconds")),
    Metric("failures", "counter", "{call}",
           "Calls that have ended with an error, by its class.",
           lambda counts, _: (({"error": name}, n) for name, n in counts.failures.items())),
    Metric("step", "gauge", "{step}",
           "The number of the last step, as the program logs it, or counted from 0.",
           _of_step(lambda step: step.number)),
    Metric("step_seconds", "gauge", "s",
           "Seconds that a step has taken since the one before that was logged or counted.",
           _of_step(lambda step: step.seconds)),
    Metric("step_ended_seconds", "gauge", "s",
           "When that step ended, in seconds since 1970.", _of_step(lambda step: step.ended)),
    Metric("logged", "gauge", "1",
           "The latest values that the program has logged, such as its loss.",
           lambda _, step: (({"name": name}, value) for name, value in step.values.items())),
)
# fmt: on


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
    """Return all metrics of a rank in Prometheus's text format 0.0.4."""
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


class MetricsServer(HttpServer):
    """Answers GET and HEAD of /metrics for one rank, in threads that end with its backend.

    names   that callers may use for it, beside localhost and addresses
    """

    remedy = f"call it by an address, this host's name, or the one in {VARIABLE}"

    def __init__(
        self,
        engine: Engine,
        listener: socket.socket,
        names: Iterable[str] = (),
        *,
        seconds: float = SECONDS,
    ) -> None:
        self._engine = engine
        called = ["localhost", *(name.lower() for name in names)]
        name = f"phalanx metrics of rank {engine.rank}"
        super().__init__(listener, name, called, by_address=True, seconds=seconds)
        engine.at_close.append(self.close)
        engine.in_child.append(listener.close)  # a data loader's worker must not keep the port

    @override
    def answer(self, request: HttpRequest) -> None:
        if request.path != "/metrics":
            request.reply("404 Not Found", "only /metrics is here\n")
        elif request.method not in ("GET", "HEAD"):
            request.reply("405 Method Not Allowed", also="Allow: GET, HEAD\r\n")
        else:
            text = exposition(self._engine.count(), self._engine.progress.latest)
            request.reply("200 OK", text, kind="text/plain; version=0.0.4; charset=utf-8")
