"""PHALANX_METRICS: each rank's counters for Prometheus, while the job runs and not after it."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import threading
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from clusters import Cluster, SharedMemory, Tcp
from ports import unused_port

import phalanx
from phalanx import Backend, MisuseError, SimulatedBackend
from phalanx.core.counters import Counts, LoggedStep, OperationCounts, PeerCounts
from phalanx.launch.run import Job
from phalanx.ops.observe import metrics
from phalanx.ops.observe.http_server import CONNECTIONS
from phalanx.ops.observe.metrics import METRICS, MetricsServer, check, exposition
from phalanx.wire.control import Endpoint

DOCS = Path(__file__).parents[3] / "docs"
DASHBOARD = DOCS / "grafana.json"
SAMPLE = re.compile(r"^(\w+)\{((?:\w+=\"(?:[^\"\\]|\\.)*\",?)+)\} (\S+)$")
LABEL = re.compile(r"(\w+)=\"((?:[^\"\\]|\\.)*)\"")

Samples = dict[str, list[tuple[dict[str, str], float]]]


def parsed(text: str) -> Samples:
    """The samples of each metric; every line is a sample, or told about what follows."""
    found: Samples = defaultdict(list)
    for line in text.splitlines():
        if line.startswith(("# HELP ", "# TYPE ")):
            continue
        sample = SAMPLE.match(line)
        assert sample is not None, line
        name, labels, value = sample.groups()
        found[name].append((dict(LABEL.findall(labels)), float(value)))
    return found


def scrape(port: int, path: str = "/metrics", **options: str) -> str:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", **options)  # type: ignore[arg-type]
    with urllib.request.urlopen(request, timeout=20) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return str(answer.read().decode())


# ------------------------------------------------------------------------------
# A job.


def train_and_scrape(backend: Backend) -> list[str]:
    """Rank 0 reads all ranks' numbers while the others wait for it."""
    metrics.begin(backend)
    rank, size, tensor = backend.rank, backend.world_size, torch.ones(30_000)
    for step in range(3):
        phalanx.all_reduce_(tensor, backend)
        if size > 1:
            backend.sendrecv(
                bytes(1000), (rank + 1) % size, bytearray(1000), (rank - 1) % size, tag=1
            )
        backend.progress.log(step, loss=1.5)
    backend.barrier()
    base = int(os.environ[metrics.VARIABLE])
    texts = [scrape(base + each) for each in range(size)] if rank == 0 else []
    backend.barrier()
    return texts


@pytest.mark.parametrize("ranks", [Tcp(), SharedMemory()], ids=str)
def test_bytes_sent_by_all_ranks_are_bytes_received_by_all(
    ranks: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(metrics.VARIABLE, str(unused_port()))
    samples = [parsed(text) for text in ranks.run(train_and_scrape, 3)[0]]
    sent = [value for each in samples for _, value in each["phalanx_sent_bytes_total"]]
    received = [value for each in samples for _, value in each["phalanx_received_bytes_total"]]
    assert sum(sent) == sum(received) >= 3 * 3 * 1000 + 3 * 4 * 30_000 * 4
    for rank, each in enumerate(samples):
        assert {labels["rank"] for rows in each.values() for labels, _ in rows} == {str(rank)}
        reduced = {"rank": str(rank), "operation": "all_reduce"}, 3.0
        assert reduced in each["phalanx_operations_total"]
        assert each["phalanx_step"] == [({"rank": str(rank)}, 2.0)]
        assert each["phalanx_logged"] == [({"rank": str(rank), "name": "loss"}, 1.5)]


def read_own(backend: Backend) -> str:
    phalanx.all_reduce(torch.ones(3), backend)
    return scrape(int(os.environ[metrics.VARIABLE]))


def test_ranks_that_phalanx_starts_serve_their_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(metrics.VARIABLE, str(unused_port()))
    (text,) = phalanx.spawn(read_own, 1)
    reduced = {"rank": "0", "operation": "all_reduce"}, 1.0
    assert reduced in parsed(text)["phalanx_operations_total"]


def test_the_server_ends_with_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    port = unused_port()
    monkeypatch.setenv(metrics.VARIABLE, f":{port}")
    for _ in range(2):  # the port is free again at once
        with phalanx.init():
            assert "phalanx_kept_bytes" in scrape(port)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=20)


def test_without_the_variable_nothing_is_counted_and_nobody_listens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(metrics.VARIABLE, raising=False)
    threads = threading.active_count()
    with phalanx.init() as backend:
        assert backend.engine.counters is None
        assert threading.active_count() == threads


def test_a_taken_port_is_a_warning_and_the_rank_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv(metrics.VARIABLE, str(port))
        with caplog.at_level(logging.WARNING, "phalanx"), phalanx.init() as backend:
            backend.barrier()
    (record,) = caplog.records
    said = f"rank 0 serves no metrics: it cannot listen at 127.0.0.1:{port} .*in use"
    assert re.match(said, record.getMessage())


def test_a_port_beyond_the_last_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(metrics.VARIABLE, "65535")
    backends = SimulatedBackend.create_group(2)
    with caplog.at_level(logging.WARNING, "phalanx"):
        metrics.begin(backends[1])
    assert "rank 1 serves no metrics: it cannot listen at 127.0.0.1:65536" in caplog.text


# ------------------------------------------------------------------------------
# What the variable says.


@pytest.mark.parametrize(
    ("text", "means"),
    [
        ("", None),
        ("9400", Endpoint("127.0.0.1", 9400)),
        (":9400", Endpoint("127.0.0.1", 9400)),
        ("0.0.0.0:9400", Endpoint("0.0.0.0", 9400)),
        ("[::1]:9400", Endpoint("::1", 9400)),
    ],
)
def test_where_ranks_listen(text: str, means: object) -> None:
    assert check({metrics.VARIABLE: text}) == means


WRONG = ["yes", "0", "65536", "-1", "127.0.0.1", "127.0.0.1:", "::1:9400", "http://a:9400", "Otel"]


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_value_is_refused(text: str) -> None:
    with pytest.raises(MisuseError, match=rf"{metrics.VARIABLE}='{re.escape(text)}' is none of"):
        check({metrics.VARIABLE: text})


@pytest.mark.parametrize("how", ["init", "spawn", "run"])
def test_a_wrong_value_is_refused_before_a_rank_starts(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(metrics.VARIABLE, "yes")
    start = {
        "init": phalanx.init,
        "spawn": lambda: phalanx.spawn(read_own, 2),
        "run": Job(target=__file__, args=(), ranks=2).check,
    }
    with pytest.raises(MisuseError, match=metrics.VARIABLE):
        start[how]()


# ------------------------------------------------------------------------------
# Requests.


@pytest.fixture
def server() -> Iterator[tuple[int, Backend]]:
    """The port of a rank's server, which waits a third of a second for a request."""
    backend = SimulatedBackend.create_group(1)[0]
    listener = socket.create_server(("127.0.0.1", 0))
    MetricsServer(backend.engine, listener, ["Node1"], seconds=1 / 3)
    port = listener.getsockname()[1]
    yield port, backend
    backend.close()


def answer(port: int, request: bytes) -> bytes:
    """All that the server says to these bytes; it may end the connection without a word."""
    said = b""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        with suppress(ConnectionError):
            client.sendall(request)
        with suppress(ConnectionError):
            while piece := client.recv(1 << 16):
                said += piece
    return said


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"GET /metrics HTTP/1.1", b"200"),
        (b"GET /metrics?name=x HTTP/1.0", b"200"),
        (b"HEAD /metrics HTTP/1.1", b"200"),
        (b"GET / HTTP/1.1", b"404"),
        (b"GET /metrics/../../etc/passwd HTTP/1.1", b"404"),
        (b"GET /metricsx HTTP/1.1", b"404"),
        (b"POST /metrics HTTP/1.1", b"405"),
        (b"DELETE /metrics HTTP/1.1", b"405"),
        (b"nonsense", b"400"),
        (b"GET /metrics GOPHER/1.0", b"400"),
        (b"\xff\x00 \xff HTTP/1.1", b"404"),
    ],
)
def test_only_metrics_can_be_read(
    server: tuple[int, Backend], request_line: bytes, status: bytes
) -> None:
    said = answer(server[0], request_line + b"\r\nHost: localhost\r\n\r\n")
    head, _, body = said.partition(b"\r\n\r\n")
    assert head.split(b" ")[1] == status
    length = re.search(rb"Content-Length: (\d+)", head)
    assert length is not None
    assert len(body) == (0 if request_line.startswith(b"HEAD") else int(length[1]))
    assert (b"phalanx_" in body) == (status == b"200" and request_line.startswith(b"GET"))


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:9400", b"200"),
        ("10.1.2.3", b"200"),
        ("[::1]:9400", b"200"),
        ("localhost", b"200"),
        ("LocalHost.:80", b"200"),
        ("node1:9400", b"200"),
        ("evil.example", b"403"),
        ("node1.evil.example", b"403"),
        ("127.0.0.1.evil.example", b"403"),
        ("127.0.0.1:80@evil.example", b"403"),
        ("evil.example:127", b"403"),
        ("", b"403"),
        ("localhost\r\nHost: evil.example", b"403"),
        ("localhost\r\nhost : evil.example", b"403"),
        ("2130706433x", b"403"),
    ],
)
def test_a_page_of_another_site_reads_nothing(
    server: tuple[int, Backend], host: str, status: bytes
) -> None:
    """It sends its own name, though that name's address may be this one (DNS rebinding)."""
    said = answer(server[0], f"GET /metrics HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    assert said.split(b" ")[1] == status
    assert (b"phalanx_" in said) == (status == b"200")


def test_a_request_that_names_nobody_reads_nothing(server: tuple[int, Backend]) -> None:
    assert answer(server[0], b"GET /metrics HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 403")


def test_a_request_of_any_size_ends_and_others_are_answered(server: tuple[int, Backend]) -> None:
    port, _ = server
    assert answer(port, b"GET /metrics HTTP/1.1\r\nX: " + b"x" * (4 << 20)) == b""
    assert "phalanx_kept_bytes" in scrape(port)


def test_who_says_nothing_is_left_alone_and_holds_up_nobody(server: tuple[int, Backend]) -> None:
    port, _ = server
    with socket.create_connection(("127.0.0.1", port), timeout=20) as slow:
        slow.sendall(b"GET /metr")
        assert "phalanx_kept_bytes" in scrape(port)
        with suppress(ConnectionError):
            assert slow.recv(1) == b""


def test_more_connections_than_there_may_be_are_closed(server: tuple[int, Backend]) -> None:
    """The first ones time out; then there is room again."""
    port, _ = server
    clients = [
        socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(3 * CONNECTIONS)
    ]
    for client in clients:
        with suppress(ConnectionError):
            assert client.recv(1) == b""
        client.close()
    assert "phalanx_kept_bytes" in scrape(port)


def test_a_backend_closes_while_a_client_is_connected(server: tuple[int, Backend]) -> None:
    port, backend = server
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        client.sendall(b"GET")
        backend.close()
        with suppress(ConnectionError):
            assert client.recv(1) == b""


# ------------------------------------------------------------------------------
# The text, and the dashboard.

COUNTS = Counts(
    rank=3,
    world_size=8,
    since=0.0,
    peers={0: PeerCounts(2, 1, 20, 10, 400, 300, 7, 0.5)},
    operations={"all_reduce": OperationCounts(4, 0.25)},
    seconds_unknown=0.25,
    failures={"PeerLostError": 1},
)
STEP = LoggedStep(9, 1.75e9, 0.125, {'odd "name"\\\n': float("nan"), "lr": float("inf")})


def test_all_that_is_known_is_in_the_text() -> None:
    text = exposition(COUNTS, STEP)
    assert [line for line in text.splitlines() if not line.startswith("#")] == [
        'phalanx_sent_bytes_total{rank="3",peer="0",by="message"} 20',
        'phalanx_sent_bytes_total{rank="3",peer="0",by="memory"} 400',
        'phalanx_received_bytes_total{rank="3",peer="0",by="message"} 10',
        'phalanx_received_bytes_total{rank="3",peer="0",by="memory"} 300',
        'phalanx_sent_messages_total{rank="3",peer="0"} 2',
        'phalanx_received_messages_total{rank="3",peer="0"} 1',
        'phalanx_kept_bytes{rank="3",peer="0"} 7',
        'phalanx_waiting_seconds_total{rank="3",peer="0"} 0.5',
        'phalanx_waiting_seconds_total{rank="3",peer="unknown"} 0.25',
        'phalanx_operations_total{rank="3",operation="all_reduce"} 4',
        'phalanx_operation_seconds_total{rank="3",operation="all_reduce"} 0.25',
        'phalanx_failures_total{rank="3",error="PeerLostError"} 1',
        'phalanx_step{rank="3"} 9',
        'phalanx_step_seconds{rank="3"} 0.125',
        'phalanx_step_ended_seconds{rank="3"} 1750000000.0',
        r'phalanx_logged{rank="3",name="odd \"name\"\\\n"} NaN',
        'phalanx_logged{rank="3",name="lr"} +Inf',
    ]
    for metric in METRICS:
        assert f"# TYPE {metric.prometheus_name} {metric.kind}\n" in text


def test_the_dashboard_shows_metrics_that_are_served() -> None:
    """Each panel has what Grafana asks of one; the data source is chosen where it is imported."""
    dashboard = json.loads(DASHBOARD.read_text())
    served = {metric.prometheus_name for metric in METRICS}
    assert dashboard["title"] == "Phalanx"
    assert dashboard["id"] is None
    assert dashboard["schemaVersion"] >= 36
    (source,) = (v for v in dashboard["templating"]["list"] if v["type"] == "datasource")
    assert source["query"] == "prometheus"
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    named = set()
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        assert {"title", "type", "gridPos", "datasource", "fieldConfig", "targets"} <= panel.keys()
        assert panel["datasource"]["uid"] == f"${{{source['name']}}}"
        place = panel["gridPos"]
        cells = {
            (place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])
        }
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells
        for target in panel["targets"]:
            assert target["refId"]
            used = set(re.findall(r"\bphalanx_\w+", target["expr"]))
            assert used
            named |= used
    assert named <= served
    assert {name for name in served if "messages" not in name} <= named


def test_the_table_of_metrics_in_the_documents_is_this_one() -> None:
    document = (DOCS / "seeing-a-job.md").read_text()
    shown = re.search(r"<!-- metrics -->\n\n(.*?)\n\n<!-- end of metrics -->", document, re.DOTALL)
    assert shown is not None
    rows = [f"| `{metric.prometheus_name}` | {metric.help} |" for metric in METRICS]
    assert shown[1].splitlines() == ["| metric | |", "|---|---|", *rows]
