"""The acceptor, when the process has no file descriptor left to accept a call with."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from acceptor_step import acceptor_step, answer, hung_up
from clusters import PATIENCE, TOKEN
from test_tcp_rendezvous import Start, place, start, works  # noqa: F401

import phalanx
from phalanx.transport.tcp import dial as dial_module

PROGRAM = Path(__file__).with_name("short_of_descriptors.py")
NEEDED = 3 + 2  # of the reactor, and one connection to each of two peers


def test_a_flood_that_takes_every_descriptor_does_not_keep_a_job_from_forming(
    start: Start,  # noqa: F811
) -> None:
    with subprocess.Popen(
        [sys.executable, str(PROGRAM), str(NEEDED + 6)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PHALANX_TOKEN": TOKEN},
    ) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        port = int(program.stdout.readline())
        callers = [
            socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) for _ in range(300)
        ]
        peers = [start(rank, 3, f"127.0.0.1:{port}") for rank in (1, 2)]
        program.stdin.write("go\n")
        program.stdin.flush()
        with ThreadPoolExecutor(2) as pool:
            both = pool.map(
                lambda peer: phalanx.all_reduce(torch.ones(1), peer.result()).item(), peers
            )
            assert list(both) == [3.0, 3.0]
        told = json.loads(program.stdout.readline())
        for caller in callers:
            caller.close()
        assert program.stderr is not None
        log = program.stderr.read()
    assert told["sum"] == 3.0, told
    assert told["asked"] < 1000, "accept() was called again and again"
    assert "300 unauthenticated" in log or "turned away 100 unauthenticated callers so far" in log


def test_without_a_descriptor_the_acceptor_rests_and_looks_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody stands there who could be sent away: it must neither spin, nor give up."""
    asked = 0
    plenty = False

    def accept(self: socket.socket) -> tuple[socket.socket, object]:
        nonlocal asked
        asked += 1
        if not plenty:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(self)

    real = socket.socket.accept
    monkeypatch.setattr(socket.socket, "accept", accept)
    with acceptor_step() as step:
        sock, call_site = step.rank(1)
        turns = 0

        def after_many_turns() -> bool:
            nonlocal turns
            turns += 1
            return turns > 200 or asked >= 3

        step._transport.mesh.reactor.wake()
        step.drive_until(after_many_turns)
        assert turns < 50, "each look at the acceptor is a turn or two, not many"
        plenty = True
        step.drive_until(lambda: any(k.auth_state == 2 for k in step.acceptor.pending))
        assert not answer(sock, call_site)
        step.drive_until(lambda: 1 in step.connected)
    assert "Too many open files; this process may need more (ulimit -n)" in caplog.text


def test_an_error_of_a_caller_does_not_stop_the_acceptor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux reports in accept() what befell the connection: the next one is as good as any."""
    troubles = [errno.ECONNABORTED, errno.EPROTO, errno.ENETUNREACH]

    def accept(self: socket.socket) -> tuple[socket.socket, object]:
        if troubles:
            code = troubles.pop()
            raise OSError(code, os.strerror(code))
        return real(self)

    real = socket.socket.accept
    monkeypatch.setattr(socket.socket, "accept", accept)
    with acceptor_step() as step:
        caller = step.call(b"GET /")
        step.drive_until(lambda: hung_up(caller))
    assert not troubles


def test_a_rank_that_has_no_descriptor_to_call_with_tries_again(
    start: Start,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its own trouble, which may pass, says nothing about the peer."""
    troubles = [errno.EMFILE] * 4

    def socket_or_trouble(*args: object) -> socket.socket:
        if troubles:
            code = troubles.pop()
            raise OSError(code, os.strerror(code))
        return socket.socket(*args)  # type: ignore[arg-type]

    fake = SimpleNamespace(**vars(socket))
    fake.socket = socket_or_trouble
    monkeypatch.setattr(dial_module, "socket", fake)
    listener, address = place()
    ranks = [start(0, 3, address, listener=listener), start(1, 3, address), start(2, 3, address)]
    works(*ranks)
    assert not troubles
