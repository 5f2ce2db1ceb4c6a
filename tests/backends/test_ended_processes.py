"""Processes that end: a peer on the same host is lost before the system has ended its connections.

A zombie has ended, and stays visible until its parent has asked for its exit code.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from raw_peer import message, rank_0_and_a_raw_peer

import phalanx
from phalanx import PeerLostError
from phalanx.transport.tcp.heartbeat import State, host_id, state_of
from phalanx.wire.control import Address
from phalanx.wire.frame import Kind

LONG = bytes(range(256)) * (4 << 10)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing."""
    process = subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"])
    yield process
    process.kill()
    process.wait()


def become_a_zombie(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def test_the_state_of_a_process_follows_what_happens_to_it(
    sleeper: subprocess.Popen[bytes],
) -> None:
    states = [state_of(sleeper.pid)]
    os.kill(sleeper.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED | os.WNOWAIT)
    states.append(state_of(sleeper.pid))
    become_a_zombie(sleeper)
    states.append(state_of(sleeper.pid))
    sleeper.wait()
    states.append(state_of(sleeper.pid))
    assert states == [State.RUNS, State.STOPPED, State.ENDS, State.RUNS]
    assert state_of(os.getpid()) is State.RUNS


def test_a_process_whose_first_thread_has_ended_still_runs() -> None:
    code = (
        "import ctypes, threading, time\n"
        "threading.Thread(target=lambda: print('begun', flush=True) or time.sleep(60)).start()\n"
        "ctypes.CDLL(None).pthread_exit(None)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        seen = {state_of(process.pid) for _ in range(100)}
        process.kill()
    assert seen == {State.RUNS}


def test_a_peer_whose_process_has_ended_is_lost_though_its_connection_stands(
    sleeper: subprocess.Popen[bytes],
) -> None:
    with rank_0_and_a_raw_peer(Address("127.0.0.1", 1, host_id(), sleeper.pid)) as (backend, _):
        become_a_zombie(sleeper)
        with pytest.raises(PeerLostError, match="rank 1 was lost: its connection ended") as info:
            phalanx.barrier(backend)
        assert info.value.peer == 1


def test_what_it_had_sent_is_received_first(sleeper: subprocess.Popen[bytes]) -> None:
    with rank_0_and_a_raw_peer(Address("127.0.0.1", 1, host_id(), sleeper.pid)) as (backend, peer):
        peer.sock.sendall(message(LONG) + message(LONG, tag=1)[:-1])
        whole, half = (torch.zeros(len(LONG), dtype=torch.uint8) for _ in range(2))
        pending = [
            phalanx.irecv(into, backend, 1, tag=tag) for tag, into in enumerate((whole, half))
        ]
        become_a_zombie(sleeper)
        with backend.engine.lock:
            backend._transport.mesh.connections[1].end()
        pending[0].wait()
        assert bytes(whole.tolist()) == LONG
        with pytest.raises(PeerLostError, match="its connection ended within a message"):
            pending[1].wait()


def test_a_peer_that_has_said_goodbye_is_not_lost(sleeper: subprocess.Popen[bytes]) -> None:
    with rank_0_and_a_raw_peer(Address("127.0.0.1", 1, host_id(), sleeper.pid)) as (backend, peer):
        peer.send_control(Kind.LEAVE)
        become_a_zombie(sleeper)
        with pytest.raises(PeerLostError, match="rank 1 left") as info:
            phalanx.barrier(backend)
        assert "was lost" not in str(info.value)
