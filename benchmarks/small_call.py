"""The parts of a small all_reduce in shared memory, as one rank's own time: what is it bound by?

    python benchmarks/small_call.py

Two ranks are threads of this process. Words in which the peer has arrived at every epoch take the
place of its own, so nobody waits, and the second rank does nothing. A part is timed alone; the
least of many short stretches counts, so it is the same on a busy machine. What a call takes between
two processes is more by the time until each sees the other's flag.
"""

from __future__ import annotations

import math
import socket
import timeit
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

import phalanx
from phalanx.collectives.request import finish_into
from phalanx.collectives.resolve import Resolved, TensorRequest
from phalanx.collectives.shm.executor import ShmCollective, copy
from phalanx.core.call import UNKNOWN_SITE
from phalanx.core.steps import Step
from phalanx.transport.shm.control import ControlBlock

CALLS, STRETCHES = 200, 400
EVERYWHERE = 1 << 62  # a flag


def two_ranks() -> list[phalanx.SharedMemoryBackend]:
    """Two ranks of this process."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(2) as threads:
        place = "{}:{}".format(*server.getsockname())

        def meet(rank: int) -> phalanx.SharedMemoryBackend:
            listener = server.dup() if rank == 0 else None
            return phalanx.SharedMemoryBackend(rank, 2, place, token="", listener=listener)

        backends = list(threads.map(meet, range(2)))
        list(threads.map(partial(phalanx.all_reduce_, torch.ones(2)), backends))
        return backends


def never_wait(control: ControlBlock) -> None:
    """Let the peer have arrived at every epoch from now on."""
    control.known.clear()
    control.others.clear()
    control.flags[None] = [memoryview(bytearray(EVERYWHERE.to_bytes(8, "little") * 64)).cast("Q")]
    control.met = EVERYWHERE


def microseconds(part: Callable[[], object]) -> float:
    """Of one call of it."""
    return min(timeit.repeat(part, number=CALLS, repeat=STRETCHES)) / CALLS * 1e6


def parts(backend: phalanx.SharedMemoryBackend) -> dict[str, Callable[[], object]]:
    """Each part by its name, to be called."""
    tensor, control, checker = torch.ones(2), backend.shared, backend.group.checker
    assert isinstance(control, ControlBlock)
    phalanx.all_reduce_(tensor, backend)
    request: TensorRequest[torch.Tensor] = phalanx.all_reduce_.request(tensor, backend)  # type: ignore[attr-defined]
    resolved = next(each for each in backend.cache.values() if isinstance(each, Resolved))
    shm, call = resolved.shm, checker.next_call("all_reduce", "", 0, UNKNOWN_SITE, 0.0, math.inf)
    assert isinstance(shm, ShmCollective)
    slots = [control.slot(place, 0, 2, torch.float32) for place in range(2)]

    def carry_out() -> None:
        for step in shm.steps(tensor, tensor):
            take(step)

    def take(step: object) -> None:
        assert isinstance(step, Step)
        step.begin(call)
        step.ready()

    return {
        "all_reduce_ of 8 B": lambda: phalanx.all_reduce_(tensor, backend),
        "checks, and the request": lambda: phalanx.all_reduce_.request(tensor, backend),  # type: ignore[attr-defined]
        "its plan, of the cache; the arguments": request._bind,
        "a call without steps: lock, clocks, history": lambda: backend.run("all_reduce", ()),
        "- the number, and the hash of all calls": lambda: checker.next_call(
            "all_reduce", "", 0, UNKNOWN_SITE, 0.0, math.inf
        ),
        "the steps": carry_out,
        "- copy to the slot": lambda: copy(
            control.slot_address(0, 0), tensor.data_ptr(), tensor.nbytes
        ),
        "- an epoch: flag, fence, look at the flags": lambda: take(control.epoch(first=True)),
        "- torch adds two slots": lambda: torch.add(*slots, out=tensor),
        "the result: autograd is told": lambda: finish_into(tensor, tensor),
    }


def main() -> None:
    torch.set_num_threads(1)
    first, second = two_ranks()
    assert isinstance(first.shared, ControlBlock)
    never_wait(first.shared)
    timed = parts(first)
    print("| part | us |", "|---|---:|", sep="\n")
    for name, part in timed.items():
        print(f"| {name} | {microseconds(part):.2f} |", flush=True)
    for backend in (second, first):
        backend.abort()


if __name__ == "__main__":
    main()
