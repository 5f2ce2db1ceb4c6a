"""Workers of a parameter server that push what is not finite, or lie, or vanish.

    python tests/attacks/parameter_server.py [--short] [--runs 1]

Rank 0 serves, rank 1 is an honest worker, rank 2 is not. A run is held if the parameters stay
finite and each end has its cause, which names rank 2; in asynchronous mode the honest worker goes
on.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

# ------------------------------------------------------------------------------
# A rank.


def be_a_rank(case: str, mode: str) -> None:
    """Be what this rank is in that case, and print what came of it."""
    import torch

    import phalanx
    from phalanx.aggregation import ParameterServer, ServerMode

    backend = phalanx.init("tcp", timeout=60)
    params = [torch.zeros(4)]
    name = ["SERVER", "HONEST", "LIAR"][backend.rank]
    try:
        if backend.rank == 0:
            record = ParameterServer.serve(
                params,
                backend,
                lambda p: torch.optim.SGD(p, 0.1),
                mode=getattr(ServerMode, mode),
                timeout=20,
            )
            ends = "FINITE" if record.params[0].isfinite().all() else "POISONED"
            print(f"{name} ENDED {ends} {record.dropped}", flush=True)
        elif backend.rank == 1:
            with ParameterServer.connect(params, backend, timeout=40) as client:
                for _ in range(5):
                    client.push([torch.ones(4)])
                    client.pull()
            print(f"{name} ENDED", flush=True)
        else:
            LIES[case](backend, torch)
            print(f"{name} ENDED", flush=True)
    except (phalanx.DistributedError, ValueError) as error:
        # No more: if a rank fails, its launcher ends the others before they have said theirs.
        print(f"{name} {type(error).__name__} {error}".replace("\n", " "), flush=True)


def lie_nan(backend, torch, value=float("nan")):  # type: ignore[no-untyped-def]
    """As a worker whose training diverges, and goes on as the error says."""
    from phalanx.aggregation import ParameterServer

    with ParameterServer.connect([torch.zeros(4)], backend) as client:
        for step in range(5):
            try:
                client.push([torch.full((4,), value if step == 1 else 1.0)])
            except ValueError as error:
                print(f"LIAR REFUSED {error}", flush=True)
                client.skip()
            client.pull()


def lie_nan_past_the_client(backend, torch):  # type: ignore[no-untyped-def]
    from phalanx.aggregation import ParameterServer
    from phalanx.aggregation.parameter_server.wire import MessageKind

    client = ParameterServer.connect([torch.zeros(4)], backend)
    client._connections[0].fill([torch.full((4,), float("inf"))])
    client._call(MessageKind.PUSH, 1, "push", None)


def lie_shape(backend, torch):  # type: ignore[no-untyped-def]
    from phalanx.aggregation import ParameterServer

    ParameterServer.connect([torch.zeros(5)], backend)


def lie_raw(backend, torch):  # type: ignore[no-untyped-def]
    from phalanx.aggregation.parameter_server import wire

    pair = backend.subgroup((0, 2))
    for _ in range(50):
        noise = torch.randint(0, 256, (wire.HEADER_SIZE,), dtype=torch.uint8)
        pair.send(noise, 0, tag=wire.HEADERS)


def lie_push_of_nothing(backend, torch):  # type: ignore[no-untyped-def]
    from phalanx.aggregation import ParameterServer
    from phalanx.aggregation.parameter_server import wire

    client = ParameterServer.connect([torch.zeros(4)], backend)
    header = wire.MessageHeader(wire.MessageKind.PUSH, 99, 1)
    client._connections[0].pair.send(header.message(), 0, tag=wire.HEADERS)
    client.pull()


def lie_size(backend, torch):  # type: ignore[no-untyped-def]
    from phalanx.aggregation.parameter_server import wire

    backend.subgroup((0, 2)).send(torch.zeros(1 << 20, dtype=torch.uint8), 0, tag=wire.HEADERS)


def lie_kill(backend, torch):  # type: ignore[no-untyped-def]
    from phalanx.aggregation import ParameterServer

    ParameterServer.connect([torch.zeros(4)], backend).push([torch.ones(4)])
    os.kill(os.getpid(), signal.SIGKILL)


def lie_vanish(backend, torch):  # type: ignore[no-untyped-def]
    from phalanx.aggregation import ParameterServer

    ParameterServer.connect([torch.zeros(4)], backend).push([torch.ones(4)])
    with contextlib.suppress(BaseException):
        time.sleep(30)


def lie_flood(backend, torch):  # type: ignore[no-untyped-def]
    from phalanx.aggregation import ParameterServer

    with ParameterServer.connect([torch.zeros(4)], backend) as client:
        for _ in range(2000):
            client.push([torch.zeros(4)])


LIES: dict[str, Callable[..., None]] = {
    "nan": lie_nan,
    "nan_past_the_client": lie_nan_past_the_client,
    "push_of_nothing": lie_push_of_nothing,
    "shape": lie_shape,
    "raw": lie_raw,
    "size": lie_size,
    "kill": lie_kill,
    "vanish": lie_vanish,
    "flood": lie_flood,
}

SHORT = [("nan_past_the_client", "SYNCHRONOUS")]

# ------------------------------------------------------------------------------
# What has to come of it.

WELL = r"SERVER ENDED FINITE \{\}", r"HONEST ENDED"
DROPPED = r"SERVER ENDED FINITE \{2: ", r"HONEST ENDED"
NAMED = r"SERVER \w+Error .*rank 2", r"HONEST \w+Error .*rank 2"
ENDS: dict[tuple[str, str], tuple[str, ...]] = {
    **{(case, "ASYNCHRONOUS"): DROPPED for case in ("shape", "raw", "size")},
    **{(case, "SYNCHRONOUS"): NAMED for case in ("shape", "raw", "size")},
    ("nan", "ASYNCHRONOUS"): (*WELL, r"LIAR REFUSED rank 2: .* gradient 0 .* nan", "LIAR ENDED"),
    ("nan", "SYNCHRONOUS"): (*WELL, r"LIAR REFUSED rank 2: .* gradient 0 .* nan", "LIAR ENDED"),
    ("nan_past_the_client", "ASYNCHRONOUS"): (*DROPPED, "parameter 0 with the value inf"),
    ("nan_past_the_client", "SYNCHRONOUS"): (*NAMED, "parameter 0 with the value inf"),
    ("push_of_nothing", "ASYNCHRONOUS"): DROPPED,
    ("push_of_nothing", "SYNCHRONOUS"): NAMED,
    ("kill", "ASYNCHRONOUS"): (r"rank 2 .*(SIGKILL|killed)",),  # the launcher ends the job
    ("vanish", "ASYNCHRONOUS"): (r"SERVER CollectiveTimeoutError .*rank 2 came", "HONEST ENDED"),
    ("flood", "ASYNCHRONOUS"): WELL,
    ("flood", "SYNCHRONOUS"): (r"SERVER ENDED FINITE", "HONEST ENDED"),
}


def is_held(case: str, mode: str) -> bool:
    """Run the job, and see whether it came as it has to."""
    command = [sys.executable, "-m", "phalanx", "run", "-n", "3", __file__, case, mode]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    said = done.stdout + done.stderr
    held = has_come(case, mode, said)
    if not held:
        print(f"  {case}, {mode}: exit {done.returncode}\n{said[-1500:]}", file=sys.stderr)
    return held


def has_come(case: str, mode: str, said: str) -> bool:
    """Whether a job that has said this has come as it has to."""
    return all(re.search(wanted, said) for wanted in ENDS[case, mode]) and "POISONED" not in said


def main() -> int:
    """Run all cases; 0 if every run of every one was held."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--runs", type=int, default=1)
    options = parser.parse_args()
    runs, lost = options.runs, 0
    cases = [each for each in ENDS if not options.short or each in SHORT]
    with ThreadPoolExecutor(2) as pool:  # a job waits more than it computes
        every = [[pool.submit(is_held, *each) for _ in range(runs)] for each in cases]
        for (case, mode), made in zip(cases, every, strict=True):
            held = sum(each.result() for each in made)
            lost += runs - held
            print(f"{case}, {mode.lower()}: {held} of {runs}", flush=True)
    return int(lost > 0)


if __name__ == "__main__":
    if "RANK" in os.environ and len(sys.argv) == 3:
        be_a_rank(*sys.argv[1:])
    else:
        sys.exit(main())
