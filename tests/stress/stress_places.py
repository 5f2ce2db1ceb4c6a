"""Where random programs are run: the six clusters of the tests, and real processes."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from types import MappingProxyType

import torch
from clusters import CLUSTERS, Cluster
from ranks import run_ranks
from stress_perform import Observer, Performer, Reference
from stress_program import Program

import phalanx
from phalanx import Backend, HybridBackend, SharedMemoryBackend, TcpBackend

TIMEOUT = 20.0  # seconds, of the backends
PROCESSES: Mapping[str, type[Backend]] = MappingProxyType(
    {
        "processes": TcpBackend,
        "processes_shm": SharedMemoryBackend,
        "processes_hybrid": HybridBackend,
    }
)
PLACES = [*(cluster.name.replace(" ", "_") for cluster in CLUSTERS), *PROCESSES]


def nobody(action: object) -> None:
    """Observes nothing."""


def run(program: Program, place: str, *, timeout: float = TIMEOUT) -> None:
    """Run a program on one kind of backend. Raises what the first rank that failed raised."""
    if place in PROCESSES:
        run_in_processes([program], place)
    else:
        run_on(cluster_named(place), program, timeout=timeout)


def cluster_named(name: str) -> Cluster:
    """One of the six. Raises ValueError if there is none of this name."""
    for cluster in CLUSTERS:
        if name == cluster.name.replace(" ", "_"):
            return cluster
    raise ValueError(f"there is no cluster {name!r}: it is one of {', '.join(PLACES)}")


def run_on(
    cluster: Cluster, program: Program, *, timeout: float = TIMEOUT, observe: Observer = nobody
) -> None:
    """Run a program on a cluster, whose ranks are in this process.

    Under the cooperative scheduler only a rank's own thread may wait, so that does what its threads
    would do; who is next is drawn from the program's seed.
    """
    reference = Reference(program)

    hosts = hosts_of(program)

    def be_a_rank(backend: Backend) -> None:
        backend.topology = hosts
        performer = Performer(
            program, backend, reference, threads=cluster.keeps_time, observe=observe
        )
        performer.run()

    if cluster.keeps_time:
        cluster.run(be_a_rank, program.size, timeout=timeout)
    else:
        phalanx.simulate(be_a_rank, program.size, seed=program.seed)


def hosts_of(program: Program) -> tuple[int, ...]:
    """Where the ranks take themselves to be: on up to three hosts, in whatever order."""
    chance = Random(program.seed)
    return tuple(chance.randrange(1 + program.seed % 3) for _ in range(program.size))


def run_in_processes(programs: list[Program], place: str = "processes") -> None:
    """Run programs of the same number of ranks in processes, one after the other."""
    outcomes = run_ranks(be_a_process, programs[0].size, programs, kind=PROCESSES[place])
    failed = [what for how, what in outcomes if how != "returned"]
    first = next((what for what in failed if "PeerLostError" not in str(what)), None)
    if failed:
        raise AssertionError(f"in processes: {first or failed[0]}")


def be_a_process(backend: Backend, programs: list[Program]) -> None:
    """One rank of several programs; all on the same connections."""
    torch.set_num_threads(1)  # or the ranks' threads wait for each other's
    for program in programs:
        Performer(program, backend, Reference(program), threads=True).run()
