"""A stranger at every port of a job while it forms, trains and ends, for each way to start one.

    python tests/attacks/starts.py [--short] [--rounds 4] [--only NAME ...]

Each job of two ranks runs in network namespaces of its own. He is another user of the host (in two
namespaces: of both), and does not hold the token: as soon as anybody listens he calls, again and
again, at random and in every way of `KINDS`. In every other round he calls at a port of his own
instead, as often: so it is the doors that are compared, and not a machine with one process more.
A round is right if each rank has computed the right sums, every process has ended with 0, and he
has not held the job up by more than `ALLOWED` beyond the slowest of those others. Needs root.
"""

from __future__ import annotations

import argparse
import os
import random
import secrets
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "multiprocess"))

from commands import PHALANX
from launchers import environ_without_launcher
from mpi_jobs import MPIRUN
from networks import Network, why_not

from phalanx.wire.handshake import DialerHandshake, Identity, Refused

ALLOWED = 1.0  # seconds
PATIENCE = 90.0  # seconds for a job
NOBODY = 65534  # the stranger's user
PORT = 29400
PORTS = range(30000, 30100)  # of ranks under mpirun: MPI's own ports are no doors of Phalanx

TRAIN = """
import datetime, sys, torch, phalanx
if sys.argv[1:] == ["torch"]:
    import torch.distributed as dist
    dist.init_process_group("phalanx", timeout=datetime.timedelta(seconds=40))
    rank, all_reduce = dist.get_rank(), dist.all_reduce
else:
    backend = phalanx.init("tcp", timeout=40)
    rank = backend.rank
    def all_reduce(tensor):
        phalanx.all_reduce_(tensor, backend)
for step in range(20):
    tensor = torch.full((1000,), float(step + rank))
    all_reduce(tensor)
    assert tensor.tolist() == [2.0 * step + 1] * 1000
print("right", flush=True)
if sys.argv[1:] == ["torch"]:
    dist.destroy_process_group()
else:
    backend.close()
"""


# ------------------------------------------------------------------------------
# The ways to start a job: the words of each of its processes, with what its environment has beside.


class Process(NamedTuple):
    """One process of a job, on a host."""

    words: list[str]
    environ: Mapping[str, str] = MappingProxyType({})
    host: int = 0


def _by_hand(script: str, token: str, *words: str) -> list[Process]:
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(PORT)}
    common |= {"PHALANX_TOKEN": token} if token else {}
    return [
        Process([sys.executable, script, *words], common | {"RANK": str(rank)}) for rank in (0, 1)
    ]


def _run(script: str, token: str) -> list[Process]:
    return [Process([*PHALANX, "run", "-n", "2", script])]


def _watched(script: str, token: str) -> list[Process]:
    environ = {"PHALANX_WATCH": f"127.0.0.1:{PORT}", "PHALANX_TOKEN": token}
    return [Process([*PHALANX, "run", "-n", "2", script], environ)]


def _two_hosts(script: str, token: str) -> list[Process]:
    words = ["run", "-n", "1", "--nnodes", "2", "--master", f"{Network.address(0)}:{PORT}"]
    return [
        Process(
            [*PHALANX, *words, "--node-rank", str(node), script], {"PHALANX_TOKEN": token}, node
        )
        for node in (0, 1)
    ]


def _torchrun(script: str, token: str) -> list[Process]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return [Process([*torchrun, script], {"PHALANX_TOKEN": token})]


def _mpirun(script: str, token: str) -> list[Process]:
    mpirun = [MPIRUN or "mpirun", "--map-by", ":OVERSUBSCRIBE", "-n", "2", sys.executable, script]
    environ = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return [Process(mpirun, environ | {"PHALANX_PORTS": f"{PORTS[0]}-{PORTS[-1]}"})]


def _slurm(script: str, token: str) -> list[Process]:
    step = {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_NODEID": "0",
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_SUBMIT_DIR": str(Path(script).parent),
    }
    ranks = [{"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in (0, 1)]
    return [Process([sys.executable, script], step | rank) for rank in ranks]


STARTS: Mapping[str, Callable[[str, str], list[Process]]] = MappingProxyType(
    {
        "phalanx run": _run,
        "phalanx run on two hosts": _two_hosts,
        "a watched job": _watched,
        "torchrun": _torchrun,
        "mpirun": _mpirun,
        "by hand": _by_hand,
        "by hand, no token": lambda script, _: _by_hand(script, ""),
        "Slurm's environment": _slurm,
        "init_process_group": lambda script, token: _by_hand(script, token, "torch"),
    }
)


# ------------------------------------------------------------------------------
# The stranger: `python starts.py stranger SEED [only | elsewhere]`, until it is killed; `only`: at
# `PORTS`; `elsewhere`: at a port of his own.


def _hello(rng: random.Random) -> bytes:
    job = rng.choice(["", "phalanx", "phalanx watch", "phalanx store"])
    return DialerHandshake(
        Identity(job, 0, rng.randrange(3), 2), b"the stranger's own", rng.randrange(2)
    ).start()


def _try_a_token(sock: socket.socket, rng: random.Random) -> None:
    """Carry a handshake on as far as it goes, with a forged proof."""
    sock.settimeout(0.3)
    sock.sendall(_hello(rng))
    with suppress(Refused):
        sock.recv(400)
        sock.sendall(b"PHX?\x03\x20\x00" + rng.randbytes(32))
        sock.recv(400)


def _reset(sock: socket.socket, rng: random.Random) -> None:
    sock.sendall(_hello(rng)[: rng.randrange(80)])
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


KINDS: tuple[Callable[[socket.socket, random.Random], object], ...] = (
    lambda sock, rng: None,  # silent
    lambda sock, rng: sock.sendall(_hello(rng)),
    lambda sock, rng: sock.sendall(_hello(rng)[: rng.randrange(1, 80)]),
    lambda sock, rng: sock.sendall(rng.randbytes(rng.randrange(1, 2000))),
    lambda sock, rng: sock.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
    lambda sock, rng: sock.sendall(b"PHX?\x01" + struct.pack("<H", rng.randrange(65536))),
    lambda sock, rng: sock.sendall(b"\x16\x03\x01\x02\x00\x01\x00" + rng.randbytes(64)),  # TLS
    _try_a_token,
    _reset,
)


def listening() -> list[tuple[str, int]]:
    """Every address at which somebody listens in this network namespace."""
    found = []
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with suppress(OSError):
            for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
                _, local, _, state, *_ = line.split()
                if state == "0A":
                    host, _, port = local.partition(":")
                    words = struct.unpack(f">{len(host) // 8}I", bytes.fromhex(host))
                    packed = struct.pack(f"={len(words)}I", *words)
                    found.append((socket.inet_ntop(family, packed), int(port, 16)))
    return found


def be_a_stranger(seed: int, where: str) -> None:
    rng = random.Random(seed)
    held: list[socket.socket] = []
    own = None
    if where == "elsewhere":
        own = socket.create_server(("127.0.0.1", 0))
    while True:
        time.sleep(0.005)  # he does not want the processor, but the door
        places = [(host, port) for host, port in listening() if where != "only" or port in PORTS]
        if own is not None:  # he has looked at all places, as he does at the doors
            places = [own.getsockname()]
        for host, port in places:
            for _ in range(4):
                try:
                    sock = socket.create_connection((host, port), 0.5)
                    held.append(sock)
                    if own is not None:
                        own.accept()[0].close()  # now, or he would wait for an answer
                    rng.choice(KINDS)(sock, rng)
                except OSError:
                    continue
        while len(held) > 300:
            held.pop(rng.randrange(len(held))).close()


# ------------------------------------------------------------------------------
# Rounds.


class Round(NamedTuple):
    """How a job went."""

    seconds: float
    wrong: str  # "" if nothing was


def play(name: str, *, seed: int, elsewhere: bool) -> Round:
    """Run one job, with the stranger at its doors, or elsewhere."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        network = stack.enter_context(Network(2))
        script = Path(folder, "train.py")
        script.write_text(TRAIN)
        processes = STARTS[name](str(script), secrets.token_hex(32))
        environ = {**environ_without_launcher(), "OMP_NUM_THREADS": "1"}
        where = "elsewhere" if elsewhere else "only" if name == "mpirun" else "everywhere"
        for host in {process.host for process in processes}:
            as_nobody = ["setpriv", "--reuid", str(NOBODY), "--regid", str(NOBODY)]
            words = [*as_nobody, "--clear-groups", sys.executable, __file__, "stranger"]
            him = _start([*words, str(seed), where], environ, network.host(host))
            stack.callback(him.wait)
            stack.callback(him.kill)
        begin = time.monotonic()
        jobs = [
            _start(each.words, environ | each.environ, network.host(each.host))
            for each in processes
        ]
        try:
            said = [job.communicate(timeout=PATIENCE) for job in jobs]
        except subprocess.TimeoutExpired:
            return Round(PATIENCE, f"did not end in {PATIENCE:g} s")
        finally:
            for job in jobs:
                job.kill()
        seconds = time.monotonic() - begin
    text = "".join(out for out, _ in said)
    codes = [job.returncode for job in jobs]
    if any(codes) or text.count("right") != 2:
        return Round(seconds, f"exit codes {codes}: {text}{''.join(err for _, err in said)}")
    return Round(seconds, "")


def _start(words: list[str], environ: Mapping[str, str], host: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    words = ["ip", "netns", "exec", host, *words]
    return subprocess.Popen(words, env=environ, stdout=pipe, stderr=pipe, text=True)


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["stranger"]:
        be_a_stranger(int(arguments[1]), arguments[2])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="one round of some starts")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--only", nargs="*", default=list(STARTS))
    options = parser.parse_args(arguments)
    if why_not() or os.geteuid():
        print(f"starts: skipped ({why_not() or 'needs root'})")
        return 0
    names = ["phalanx run", "by hand, no token"] if options.short else options.only
    good = total = 0
    for name in names:
        rounds = 1 if options.short else options.rounds
        in_peace, disturbed = [], []
        for number in range(rounds):
            in_peace.append(play(name, seed=number, elsewhere=True))
            disturbed.append(play(name, seed=number, elsewhere=False))
        slowest = max(each.seconds for each in in_peace)
        right = sum(not e.wrong and e.seconds <= slowest + ALLOWED for e in disturbed)
        held_up = max(each.seconds for each in disturbed) - slowest
        print(
            f"  {name:26} {right} of {rounds}; {slowest:.1f} s in peace, at most {held_up:+.1f} s",
            flush=True,
        )
        for each in (*in_peace, *disturbed):
            if each.wrong:
                print(f"    {each.wrong[-800:]}", flush=True)
        good, total = good + right, total + rounds
    print(f"starts: {good} of {total}")
    return int(good < total)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
