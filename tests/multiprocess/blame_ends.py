"""The ways in which one of four ranks may end by itself, while the others call."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from random import Random
from time import monotonic

import torch
from blame_acts import error_of
from blame_cast import Report, Verdict, cast, judge

import phalanx
from phalanx import Backend
from phalanx.transport.tcp.transport import TcpTransport

RANKS = 4
WITHIN = 1.0  # seconds


def as_python_ends(error: BaseException) -> None:
    """What the interpreter does when a script raises."""
    sys.stderr.flush()
    atexit._run_exitfuncs()
    os._exit(1 if isinstance(error, Exception) else 0)


def crash() -> None:
    """Read from address 0."""
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    ctypes.string_at(0)


def reset(backend: Backend) -> None:
    """End so that the others' connections are reset, as by a firewall or a host that came back."""
    transport = backend.engine.transport
    assert isinstance(transport, TcpTransport)
    for connection in transport.mesh.connections.values():
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    os._exit(4)


# name -> what the rank does, and what the others' errors say of it
ENDS: dict[str, tuple[Callable[[Backend], object], str]] = {
    "raises": (lambda _: as_python_ends(ValueError("a bug in user code")), "left"),
    "sys.exit": (lambda _: as_python_ends(SystemExit(0)), "left"),
    "os._exit": (lambda _: os._exit(3), "was lost"),
    "SIGTERM": (lambda _: os.kill(os.getpid(), signal.SIGTERM), "was lost"),
    "abort": (lambda _: os.abort(), "was lost"),
    "crash": (lambda _: crash(), "was lost"),
    "reset": (reset, "was lost"),
    "close": (lambda backend: backend.close(), "left"),
    "backend.abort": (lambda backend: backend.abort(), "was lost"),
    "returns early": (lambda _: None, "left"),
}


def end_by(name: str, seed: int, *, within: float = WITHIN) -> Verdict:
    """The others name the rank that has ended, within a second, and say how it went."""
    culprit = Random(seed).randrange(RANKS)
    with cast(RANKS) as company:
        company.start_all(end_or_wait, name, culprit, seed % 2 == 0)
        ended = monotonic()
        company.tell("end", culprit)
        reports = {rank: company.report(rank) for rank in company.others(culprit)}
        words = f"rank {culprit} {ENDS[name][1]}"
        return judge(reports, culprit, ended, within, words=words)


def end_or_wait(
    backend: Backend, wire: Connection, name: str, culprit: int, together: bool
) -> Report | None:
    """One rank ends in that way; the others wait for it, in a sum or each for a message."""
    backend.barrier()
    wire.send("met")
    if backend.rank == culprit:
        wire.recv()
        ENDS[name][0](backend)
        return None
    if together:
        return error_of(lambda: phalanx.all_reduce(torch.ones(1000), backend))
    return error_of(lambda: backend.recv(bytearray(1), culprit))
