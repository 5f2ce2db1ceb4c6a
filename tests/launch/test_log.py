"""The line with which a job begins, and PHALANX_LOG."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from clusters import TOKEN, loopback_listener

import phalanx
from phalanx import Backend, HybridBackend, SharedMemoryBackend, SimulatedBackend, TcpBackend
from phalanx.errors import MisuseError
from phalanx.launch.init import announce

LOG = logging.getLogger("phalanx")
AT_LOOPBACK = r"rank 0 at lo\S* 127\.0\.0\.1"


@pytest.fixture(autouse=True)
def _log_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("PHALANX_LOG", "PHALANX_TOKEN", "PHALANX_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    level, handlers = LOG.level, list(LOG.handlers)
    yield
    LOG.setLevel(level)
    LOG.handlers[:] = handlers


def keep_no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be a program that keeps none; pytest does, in every test's body."""
    monkeypatch.setattr(logging.root, "handlers", [])


def begin(kind: type[TcpBackend], *hosts: str, token: str = TOKEN) -> None:
    """A job whose ranks are on these hosts."""
    listener = loopback_listener()
    address = f"127.0.0.1:{listener.getsockname()[1]}"

    def run(rank: int) -> None:
        given = listener if rank == 0 else None
        options = {"host": hosts[rank], "listener": given, "token": token, "timeout": 20}
        with kind(rank, len(hosts), address, **options) as backend:  # type: ignore[arg-type]
            announce(backend)
            phalanx.all_reduce(torch.ones(3), backend)

    with ThreadPoolExecutor(len(hosts)) as pool:
        list(pool.map(run, range(len(hosts))))


def told(caplog: pytest.LogCaptureFixture, level: int = logging.INFO) -> list[str]:
    return [r.getMessage() for r in caplog.records if (r.name, r.levelno) == ("phalanx", level)]


@pytest.mark.parametrize(
    ("kind", "hosts", "token", "expected"),
    [
        (SharedMemoryBackend, ",", TOKEN, "2 ranks on 1 host: shared memory; .*; with a token"),
        (TcpBackend, "a,b", "", r"2 ranks on 2 hosts \(1 each\): TCP; .*; without a token"),
        (
            HybridBackend,
            "a,a,b",
            TOKEN,
            r"3 ranks on 2 hosts \(1 to 2 each\): shared memory inside a host, TCP between; .*",
        ),
        (HybridBackend, "a,b", TOKEN, r"2 ranks on 2 hosts \(1 each\): TCP; .*"),
    ],
)
def test_rank_0_says_in_one_line_who_is_there_and_how_they_are_connected(
    kind: type[TcpBackend],
    hosts: str,
    token: str,
    expected: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "phalanx")
    begin(kind, *hosts.split(","), token=token)
    (line,) = told(caplog)
    assert re.fullmatch(expected, line), line
    assert re.search(AT_LOOPBACK, line), line


def test_it_goes_to_stderr_where_the_program_keeps_no_log(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_no_log(monkeypatch)
    begin(TcpBackend, "a", "a")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("phalanx: 2 ranks on 1 host: TCP; ")


def test_a_program_with_a_log_of_its_own_gets_it_there_only(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    begin(TcpBackend, "a", "a")
    assert capsys.readouterr().err == ""
    assert told(caplog) == []  # which is at level WARNING


def test_a_world_of_one_and_a_simulated_one_say_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(backend: Backend) -> None:
        announce(backend)

    keep_no_log(monkeypatch)
    phalanx.simulate(run, 2)
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)
    phalanx.init().close()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("level", "lines"), [("warning", 0), ("info", 1), ("DEBUG", 4)])
def test_how_much_is_told(
    level: str, lines: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_no_log(monkeypatch)
    monkeypatch.setenv("PHALANX_LOG", level)
    begin(TcpBackend, "a", "a")
    found = capsys.readouterr().err
    assert len(re.findall(r"phalanx INFO: 2 ranks on 1 host: TCP", found)) == (lines > 0)
    if lines < 4:
        assert len(found.splitlines()) == lines
        return
    for rank in (0, 1):
        assert len(re.findall(rf"DEBUG: rank {rank} listens at 127\.0\.0\.1:\d+", found)) == 1
        chosen = rf"DEBUG: rank {rank}: all_reduce of torch\.float32 \[3\]: \w+"
        assert len(re.findall(chosen, found)) == 1


def test_a_log_that_the_program_sets_up_later_is_the_only_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_no_log(monkeypatch)
    monkeypatch.setenv("PHALANX_LOG", "info")
    SimulatedBackend.create_group(1)
    LOG.info("before")
    logging.root.handlers.append(logging.NullHandler())
    LOG.info("after")
    err = capsys.readouterr().err
    assert "INFO: before" in err
    assert "after" not in err


def test_another_level_is_refused_with_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_LOG", "loud")
    with pytest.raises(MisuseError, match="PHALANX_LOG=loud is none of debug, info, warning"):
        SimulatedBackend.create_group(1)
