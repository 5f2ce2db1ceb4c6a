"""The parts of elastic training fit: ranks die, and the others train on in their processes."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection

import pytest
import torch
from elastic_stores import TOKEN
from forms import LONG, examples
from hypothesis import given, settings
from hypothesis import strategies as st
from member import WRAPPERS, Member, Place, check
from processes import PATIENCE, fork_server
from torch import Tensor

import phalanx
from phalanx import Backend, SharedMemoryBackend, SimulatedBackend, TcpBackend
from phalanx.elastic.stores import JobStore, KeyValueStore, open_store
from phalanx.launch.store import StoreServer, listen_for_store
from phalanx.transport.backends import MeshBackend
from phalanx.transport.simulated_process import SimulatedProcess

# In simulated processes, which crash at any turn -------------------------------------------------


class SimulatedEntries(KeyValueStore):
    """The store of a simulation. Who waits for it sleeps until it changes."""

    name, timeout = "the simulated store", 1.0

    def __init__(self, process: SimulatedProcess) -> None:
        self._process = process

    def get(self, key: str) -> str:
        store = self._process.store
        return store.get(key).decode() if store.check([key]) else ""

    def set(self, key: str, value: str) -> None:
        self._process.store.set(key, value)

    def compare_set(self, key: str, expected: str, value: str) -> str:
        return self._process.store.compare_set(key, expected, value).decode()

    def pauses(self, seconds: float) -> Iterator[object]:
        end = self._process.now() + seconds
        while self._process.now() < end:
            yield None
            self._process.store.wait_for_change(1.0)

    def close(self) -> None:
        """There is nothing to close."""


class SimulatedPlace(Place):
    def __init__(self, process: SimulatedProcess) -> None:
        self._process = process

    def address(self) -> str:
        return f"p{self._process.number}:1"

    def meet(self, generation: int, rank: int, size: int, address: str) -> Backend:
        return self._process.form(f"generation {generation}", rank, size, seconds=5.0)

    def now(self) -> float:
        return self._process.now()


def simulate(wrap: str, size: int, crashes: Mapping[int, int], seed: int = 0) -> list[int]:
    """Train, and compare the ends; for each process the turns that it had."""
    ends: list[dict[str, Tensor]] = []

    def train(backend: Backend) -> None:
        assert isinstance(backend, SimulatedBackend)
        process = backend.process
        assert process is not None
        store = JobStore(SimulatedEntries(process), "job", TOKEN.encode())
        member = Member(f"p{process.number}", wrap, SimulatedPlace(process), store)
        member.enter(1, tuple(f"p{number}" for number in range(size)), "p0:1")
        member.train()
        ends.append({name: p.detach() for name, p in member.model.named_parameters()})

    turns = phalanx.simulate(train, size, seed, crashes=crashes).turns
    assert len(ends) >= size - len(crashes)
    for state in ends:
        check(state)
        assert all(torch.equal(state[name], ends[0][name]) for name in state)
    return turns


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_the_others_train_on_wherever_one_of_them_crashes(wrap: str) -> None:
    for process, turns in enumerate(simulate(wrap, 3, {})):
        for turn in range(turns // 4, turns, 1 if LONG else 3):  # they have met then
            simulate(wrap, 3, {process: turn})


@settings(max_examples=examples(40))
@given(
    st.sampled_from(sorted(WRAPPERS)),
    st.dictionaries(st.integers(0, 3), st.integers(10, 60), min_size=2, max_size=3),
    st.integers(0, 99),
)
def test_several_crashes_also_while_a_generation_forms_leave_the_others_training(
    wrap: str, crashes: dict[int, int], seed: int
) -> None:
    simulate(wrap, 4, crashes, seed)


# In processes, one of which is killed -----------------------------------------------------------

KINDS: Mapping[str, type[MeshBackend]] = {"shm": SharedMemoryBackend, "tcp": TcpBackend}
LONG_STEPS = 60


class ProcessPlace(Place):
    """Listens for the next generation from the end of the one before."""

    def __init__(self, kind: str) -> None:
        self._kind = KINDS[kind]
        self._listener: socket.socket | None = None

    def address(self) -> str:
        if self._listener is None:
            self._listener = socket.create_server(("127.0.0.1", 0))
            self._listener.setblocking(False)
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def meet(self, generation: int, rank: int, size: int, address: str) -> Backend:
        listener = self._listener if rank == 0 and address == self.address() else None
        if listener is not None:
            self._listener = None
        return self._kind(
            rank, size, address, token=TOKEN, job="job", generation=generation, listener=listener
        )

    def now(self) -> float:
        return time.monotonic()


def be_a_process(number: int, size: int, first: str, kind: str, store: str, to: Connection) -> None:
    """Train, tell the steps that count, and then what it has come to."""
    torch.set_num_threads(1)
    entries = open_store(store, TOKEN, job="job", launch="launch")
    member = Member(f"p{number}", "ddp", ProcessPlace(kind), entries)
    member.enter(1, tuple(f"p{each}" for each in range(size)), first)
    member.train(LONG_STEPS, counted=to.send)
    to.send((member.generation, {name: p.tolist() for name, p in member.model.named_parameters()}))
    member.backend.close()


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_process_is_left_behind_and_no_step_is_lost(kind: str, victim: int) -> None:
    server = StoreServer(listen_for_store("127.0.0.1", 0), TOKEN.encode(), job="launch")
    with socket.create_server(("127.0.0.1", 0)) as free:
        first = f"127.0.0.1:{free.getsockname()[1]}"
    ends, processes = [], []
    for number in range(3):
        receive, send = fork_server().Pipe(duplex=False)
        words = number, 3, first, kind, str(server.endpoint), send
        processes.append(fork_server().Process(target=be_a_process, args=words))
        processes[-1].start()
        send.close()
        ends.append(receive)
    try:
        while ends[victim].recv() < 10:
            pass
        os.kill(processes[victim].pid or 0, signal.SIGKILL)
        for number in {0, 1, 2} - {victim}:
            steps: list[int] = []
            while isinstance(said := receive_from(ends[number]), int):
                steps.append(said)
            generation, state = said
            assert generation == 2
            assert steps == sorted(set(steps))
            tensors = {
                name: torch.tensor(value, dtype=torch.float64) for name, value in state.items()
            }
            check(tensors, LONG_STEPS)
    finally:
        for process in processes:
            process.kill()
            process.join()
        server.close()


def receive_from(end: Connection) -> object:
    assert end.poll(PATIENCE), "a process hangs"
    return end.recv()
