"""`phalanx watch --web`: who gets in, what is sent, and what it costs. The page: tests/clients."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from time import time
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from phalanx.cli.app import app
from phalanx.errors import MisuseError
from phalanx.ops.observe.http_server import CONNECTIONS, LONGEST_REQUEST
from phalanx.ops.observe.watch.folder import open_folder
from phalanx.ops.observe.watch.state import JobState, RankState
from phalanx.ops.observe.watch.web import (
    MOST_MOMENTS,
    PAGES,
    Feed,
    PageServer,
    sample,
    serve,
)

PATIENCE = 30.0  # seconds, for what comes at once


def a_job(*, at: float = 0.0, ranks: int = 2, **more: Any) -> JobState:
    states = [RankState(rank=rank, step=7, step_seconds=0.5 + rank) for rank in range(ranks)]
    return JobState(name="train.py", world_size=ranks, time=at, ranks=states, **more)


@pytest.fixture
def server() -> Iterator[PageServer]:
    with closing(PageServer(Feed())) as made:
        yield made


def ask(
    server: PageServer, path: str, *, method: str = "GET", **headers: str
) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    connection.putrequest(method, path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    return connection.getresponse()


def next_event(stream: http.client.HTTPResponse) -> Any:
    line, end = stream.readline(), stream.readline()
    assert line.startswith(b"data: ")
    assert end == b"\n"
    return json.loads(line[len("data: ") :])


# Who gets in ------------------------------------------------------------------------------------


def test_the_page_is_at_the_address_that_has_the_word(server: PageServer) -> None:
    assert server.address == f"http://127.0.0.1:{server.port}/{server.word}/"
    answer = ask(server, f"/{server.word}/")
    assert answer.status == 200
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    policy = answer.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "connect-src 'self'; base-uri 'none'; form-action 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["Referrer-Policy"] == "no-referrer"
    assert answer.headers["Cache-Control"] == "no-store"
    page = answer.read().decode()
    assert "<h1" in page
    assert not any(word in page for word in ("https:", "http:", "@import", "url(", " src="))


def test_the_word_is_another_one_each_time_and_long() -> None:
    words = set()
    for _ in range(5):
        with closing(PageServer(Feed())) as server:
            words.add(server.word)
    assert len(words) == 5
    assert min(map(len, words)) >= 32


@pytest.mark.parametrize(
    "path", ["/", "/events", "//", "/x/", "/x/events", "/?word", "*", "/%00/é"]
)
def test_without_the_word_everything_is_forbidden(server: PageServer, path: str) -> None:
    path = path.encode().decode("latin1")
    assert ask_raw(server, f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n").startswith(
        b"HTTP/1.1 403"
    )


def test_a_part_of_the_word_is_not_enough(server: PageServer) -> None:
    for word in (server.word[:-1], server.word + "x", server.word.swapcase(), f"x/{server.word}"):
        assert ask(server, f"/{word}/").status == 403


@pytest.mark.parametrize("method", ["POST", "HEAD", "PUT", "DELETE", "OPTIONS", "CONNECT", "X"])
def test_nothing_but_get_is_allowed(server: PageServer, method: str) -> None:
    assert ask(server, f"/{server.word}/", method=method).status == 405
    assert ask(server, "/", method=method).status == 403


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("localhost:8000", 200),  # a port that was forwarded
        ("LOCALHOST", 200),
        ("[::1]:80", 200),
        ("attacker.example", 403),
        ("127.0.0.1.attacker.example", 403),
        ("localhost.attacker.example:80", 403),
        ("127.0.0.1:80@attacker.example", 403),
        ("192.0.2.1", 403),
        ("", 403),
    ],
)
def test_a_name_that_was_made_to_point_here_is_refused(
    server: PageServer, host: str, status: int
) -> None:
    assert ask(server, f"/{server.word}/", Host=host).status == status


def test_a_request_has_one_host(server: PageServer) -> None:
    for hosts in ("", "Host: localhost\r\nHost: localhost\r\n"):
        answer = ask_raw(server, f"GET /{server.word}/ HTTP/1.1\r\n{hosts}\r\n")
        assert answer.startswith(b"HTTP/1.1 403")


def test_what_is_not_there_is_not_found(server: PageServer) -> None:
    for place in ("page.js", "../", "events/", "%65vents", "//events"):
        assert ask(server, f"/{server.word}/{place}").status == 404


# What is sent -----------------------------------------------------------------------------------


def test_a_page_gets_all_samples_at_once_and_then_each_state_as_it_comes(
    server: PageServer,
) -> None:
    for second in range(3):
        server.feed.put(a_job(at=float(second)))
    stream = ask(server, f"/{server.word}/events")
    assert stream.headers["Content-Type"] == "text/event-stream"
    first = next_event(stream)
    assert first["job"]["name"] == "train.py"
    assert [each["time"] for each in first["samples"]] == [0, 1, 2]
    server.feed.put(a_job(at=3.0, slowest=1))
    second_event = next_event(stream)
    assert second_event["job"]["slowest"] == 1
    assert [each["time"] for each in second_event["samples"]] == [3]
    server.feed.put(a_job(at=4.0, ended="it has ended well"))
    server.feed.end()
    assert next_event(stream)["job"]["ended"] == "it has ended well"
    assert stream.read() == b""


def test_samples_are_kept_for_a_minute() -> None:
    feed = Feed()
    for second in range(200):
        feed.put(a_job(at=float(second)))
    number, event = feed.after(0)
    assert number == 200
    times = [each["time"] for each in json.loads(event[len(b"data: ") :])["samples"]]
    assert times == list(range(139, 200))


def test_logged_values_are_kept_for_the_whole_time_in_a_bounded_number_of_moments() -> None:
    feed = Feed()
    for second in range(2 * MOST_MOMENTS):
        job = a_job(at=float(second))
        job.ranks[0].values = {"loss": float(-second)}
        feed.put(job)
    curves = json.loads(feed.after(0)[1][len(b"data: ") :])["curves"]
    times = [time for time, _ in curves]
    assert MOST_MOMENTS // 2 <= len(times) <= MOST_MOMENTS
    assert times == list(range(0, 2 * MOST_MOMENTS, int(times[1])))
    assert all(values == {"loss": -time} for time, values in curves)
    assert json.loads(feed.after(1)[1][len(b"data: ") :])["curves"] is None


def test_nothing_is_drawn_of_ranks_that_have_ended() -> None:
    """Their last values are those of another time."""
    job = a_job(ranks=2)
    for rank in job.ranks:
        rank.status, rank.values, rank.sent = "dead", {"loss": 1.0}, 5.0
    drawn = sample(job)
    assert (drawn.values, drawn.steps, drawn.sent) == ({}, (0.0, 0.0), 0.0)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_states_of_a_rank_differ_in_lightness(scheme: str) -> None:
    """L* of CIE 1976: also who sees no colours can tell them apart."""
    style = files("phalanx.ops.observe").joinpath("common.css").read_text()
    light, dark = style.split("@media", 1)
    colours = dict(re.findall(r"--(\w+): (#\w{6})", light if scheme == "light" else dark))
    states = sorted(lightness(colours[name]) for name in STATES)
    assert all(lighter - darker >= 12 for darker, lighter in pairwise(states)), states


STATES = ("computing", "communicating", "waiting")


def lightness(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    luminance = sum(x * share for x, share in zip(linear, (0.2126, 0.7152, 0.0722), strict=True))
    return 116 * luminance ** (1 / 3) - 16


def test_a_sample_has_three_characters_a_rank_and_means_of_what_is_logged() -> None:
    job = a_job(ranks=4)
    for rank, loss in zip(job.ranks, [1.0, 9.0, 3.0, float("inf")], strict=True):
        rank.values = {"accuracy": 0.5, "train/loss": loss}
        rank.communicating, rank.waiting = 1 / 35, 1.0
    job.ranks[1].status, job.ranks[0].values["train/word"] = "dead", "nan"
    drawn = sample(job)
    assert drawn.ranks == "1zr00d1zr1zr"
    assert drawn.values == {"train/loss": 2.0, "accuracy": 0.5}
    assert list(drawn.values) == ["train/loss", "accuracy"]
    assert drawn.steps == (0.5, 3.5)


# What it costs ----------------------------------------------------------------------------------


def connect(server: PageServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)


def all_of(connection: socket.socket) -> bytes:
    """What is answered until the connection ends, in whatever way."""
    found = b""
    try:
        while data := connection.recv(1 << 16):
            found += data
    except ConnectionError:
        pass
    return found


def ask_raw(server: PageServer, request: str) -> bytes:
    with connect(server) as connection:
        connection.sendall(request.encode("latin1"))
        return all_of(connection)


def test_a_request_that_is_too_long_gets_no_answer(server: PageServer) -> None:
    head = f"GET /{server.word}/ HTTP/1.1\r\nHost: localhost\r\n"
    assert ask_raw(server, f"{head}X: {'x' * LONGEST_REQUEST}\r\n\r\n") == b""
    assert ask_raw(server, f"{head}\r\n").startswith(b"HTTP/1.1 200"), "others are served"


def test_what_is_no_request_is_refused(server: PageServer) -> None:
    for words in ("\r\n\r\n", "GET\r\n\r\n", "a b c d e\r\n\r\n", "GET / HTTP/9.9\r\n\r\n"):
        assert b"200" not in ask_raw(server, words)
    assert ask(server, f"/{server.word}/").status == 200


def test_beyond_a_number_of_connections_the_next_is_closed_until_one_has_gone(
    server: PageServer,
) -> None:
    idle = [connect(server) for _ in range(CONNECTIONS)]
    with connect(server) as one_more:
        assert all_of(one_more) == b""
    for connection in idle:
        connection.shutdown(socket.SHUT_WR)
        assert all_of(connection) == b""
        connection.close()
    assert ask(server, f"/{server.word}/").status == 200


def test_a_number_of_pages_may_be_open(server: PageServer) -> None:
    streams = [ask(server, f"/{server.word}/events") for _ in range(PAGES)]
    assert {stream.status for stream in streams} == {200}
    assert ask(server, f"/{server.word}/events").status == 503
    server.feed.end()
    assert [stream.read() for stream in streams] == [b""] * PAGES


def test_a_port_that_is_taken_is_said(server: PageServer) -> None:
    with pytest.raises(MisuseError, match=rf"--web {server.port}: nothing can listen"):
        PageServer(Feed(), server.port)


def test_a_page_has_the_last_state_before_the_server_ends() -> None:
    streams: list[http.client.HTTPResponse] = []
    opened = threading.Event()

    def ready(address: str) -> None:
        port, word = address.removeprefix("http://127.0.0.1:").rstrip("/").split("/")
        connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=PATIENCE)
        connection.request("GET", f"/{word}/events")
        streams.append(connection.getresponse())
        opened.set()

    def states() -> Iterator[JobState]:
        assert opened.wait(PATIENCE)
        yield a_job(ended="it has ended well")

    last = serve(states(), 0, ready=ready)
    assert last is not None
    assert next_event(streams[0])["job"]["ended"] == last.ended
    assert streams[0].read() == b""


# The command ------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [[], ["0"]])
def test_the_command_prints_the_address_and_how_the_job_has_ended(
    tmp_path: Path, words: list[str]
) -> None:
    folder = tmp_path / "watch"
    over = a_job(at=time(), ended="it has ended well")
    over.ranks = [RankState(rank=rank, pid=os.getpid(), status="ended") for rank in range(2)]
    open_folder(folder).write("node-0.json", over)
    result = CliRunner().invoke(app, ["watch", str(folder), "--web", *words])
    assert result.exit_code == 0, result.output
    address, end = result.output.splitlines()
    assert address.startswith("http://127.0.0.1:")
    assert address.endswith("/  (Ctrl-C ends it)")
    assert end == "the job has ended: it has ended well; pages that are open go on showing it"


@pytest.mark.parametrize(
    ("words", "places", "port"),
    [
        ([], None, None),
        (["--web"], None, 0),
        (["--web", "8000"], None, 8000),
        (["runs/a", "--web"], ["runs/a"], 0),
        (["--web", "runs/a"], ["runs/a"], 0),
    ],
)
def test_the_page_is_asked_for_with_a_port_or_without(
    words: list[str], places: list[str] | None, port: int | None
) -> None:
    context = get_command(app).commands["watch"].make_context("watch", list(words))  # type: ignore[attr-defined]
    assert (context.params["places"] or None, context.params["web"]) == (places, port)


def test_what_does_not_go_with_a_page_is_said(tmp_path: Path) -> None:
    for words in (["--web", "70000"], ["--web", "-1"]):
        result = CliRunner().invoke(app, ["watch", str(tmp_path), *words])
        assert result.exit_code == 2
    for option in ("--once", "--json"):
        result = CliRunner().invoke(app, ["watch", str(tmp_path), "--web", option])
        assert isinstance(result.exception, MisuseError)
    result = CliRunner().invoke(app, ["watch", str(tmp_path), "--web"])
    assert isinstance(result.exception, MisuseError)
    assert "nothing is published" in str(result.exception)
