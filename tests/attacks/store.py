"""Strangers at the stores through which a job's launchers and ranks meet.

    unshare -n sh -c 'ip link set lo up; python tests/attacks/store.py [NAME...]'

`--short` takes seconds; `--count` says how many starts of each kind there are at random moments.
Needs root, for the user who is another one. Each line says of how many tries the job held: `NAME: K
of N`; the exit code is 1 if it did not hold in all. A stranger has no token. He speaks torch's
protocol and ours, writes himself as rank 0 wherever he can write, and waits to be called.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"  # torch tells of each call that is refused
BAIT = "stranger-token-0" * 2
NOBODY = 65534  # the other user
PATIENCE = 90.0
LATER = 1.0  # seconds by which a job may form later than without a stranger

TRAIN = """
import os, sys, time, torch
if os.environ.get("HOW") == "group":
    import torch.distributed as dist, datetime
    dist.init_process_group("phalanx", timeout=datetime.timedelta(seconds=15))
    rank, total = dist.get_rank(), torch.full((4,), 1000.0 + dist.get_rank())
    dist.all_reduce(total)
else:
    import phalanx
    backend = phalanx.init("tcp", timeout=15)
    rank, total = backend.rank, phalanx.all_reduce(torch.full((4,), 1000.0 + backend.rank), backend)
os.write(1, f"formed {time.time() - float(os.environ['BEGAN'])}\\n".encode())  # as one piece
for _ in range(int(os.environ.get("STEPS", "0"))):
    phalanx.all_reduce(torch.ones(4), backend)
    time.sleep(0.1)
os.write(1, f"sum {total[0].item()} done\\n".encode())
"""
RIGHT = "sum 2001.0 done"


# ------------------------------------------------------------------------------
# The stranger: `store.py --stranger`, a process that has torch already. It reads lines: a job's
# ports, or "stop", and answers with what it has got.


class Stranger:
    """Writes himself into every store that lets him, and plays rank 0 for who calls him."""

    def __init__(self) -> None:
        self.got: dict[str, Any] = {"in": 0, "keys": 0, "met": 0}
        self.over = threading.Event()
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"

    def torchs(self, port: int) -> None:
        """Speak torch's protocol."""
        from torch.distributed import TCPStore

        store = None
        while store is None:
            if self.over.wait(0.01):
                return
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                wait = timedelta(seconds=2)
                store = TCPStore("127.0.0.1", port, timeout=wait, wait_for_workers=False)
            except Exception:
                continue
        self.got["in"] += 1
        while not self.over.wait(0.003):
            with suppress(Exception):
                keys = list(store.list_keys())
                self.got["keys"] = max(self.got["keys"], len(keys))
                self.write(store, keys)

    def write(self, store: Any, keys: list[str]) -> None:
        """Be rank 0, in the words of every version."""
        answer = json.dumps({"address": self.address, "token": BAIT})
        for key in keys:
            if "rendezvous" in key or "address" in key or "answer" in key or key.endswith("/mesh"):
                text = answer if "answer" in key else f"{self.address} {BAIT}"
                store.set(key, text)
            if key.endswith("count/1"):  # before rank 0 has written: where it is going to
                head = key.removesuffix("count/1")
                for number in range(1, 3):
                    store.set(f"{head}rendezvous/{number}", f"{self.address} {BAIT}")
                    store.set(f"{head}{number}/address", f"{self.address} {BAIT}")
                    store.set(f"{head}{number}/answer/1", answer)

    def ours(self, port: int) -> None:
        """Speak our protocol with tokens that one might guess."""
        try:
            from phalanx.launch.store import connect_store
            from phalanx.wire.control import Endpoint

            place = Endpoint("127.0.0.1", port)
            tokens = ["", BAIT, "phalanx", secrets.token_hex(32)]
        except ImportError:  # before it was there
            return
        while not self.over.wait(0.05):
            for token in tokens:
                for job in ("", "phalanx"):
                    with suppress(Exception):
                        store = connect_store(place, token, time.monotonic() + 0.5, job=job)
                        self.got["in"] += 1
                        store.set("phalanx/log/0/1", '{"node":1,"failed":true,"final":true}')
                        store.close()

    def play(self, job: str) -> None:
        """Be called, as rank 0 of two."""
        import torch

        import phalanx

        kinds = [phalanx.TcpBackend, phalanx.SharedMemoryBackend]
        while not self.over.is_set():
            for kind in kinds:
                with suppress(Exception):
                    backend = kind(0, 2, self.address, token=BAIT, job=job, timeout=1.5)
                    phalanx.all_reduce(torch.full((4,), -1e6), backend, timeout=5)
                    self.got["met"] += 1
                    backend.close()


def be_the_stranger(user: int) -> None:
    """Answer lines: `{"ports": [...], "job": "..."}`, then "stop". From then on as this user."""
    warm_up()
    if user:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        stranger = Stranger()
        threads = [threading.Thread(target=stranger.play, args=(order["job"],))]
        for port in order["ports"]:
            threads.append(threading.Thread(target=stranger.torchs, args=(port,)))
            threads.append(threading.Thread(target=stranger.ours, args=(port,)))
        for thread in threads:
            thread.daemon = True
            thread.start()
        sys.stdin.readline()
        stranger.over.set()
        print(json.dumps(stranger.got), flush=True)


def warm_up() -> None:
    """Have all modules imported: another user may not be able to read them."""
    import torch
    from torch.distributed import TCPStore

    import phalanx

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    TCPStore("127.0.0.1", store.port, wait_for_workers=False).set("key", "value")
    for kind in (phalanx.TcpBackend, phalanx.SharedMemoryBackend):
        place = f"127.0.0.1:{free_port()}"

        def rank(number: int, kind: Any = kind, place: str = place) -> None:
            with kind(number, 2, place, token=BAIT) as backend:
                phalanx.all_reduce(torch.ones(4), backend)

        other = threading.Thread(target=rank, args=(1,))
        other.start()
        rank(0)
        other.join()


class Hired:
    """A stranger in a process of his own, perhaps of another user."""

    def __init__(self, user: int = 0) -> None:
        words = [sys.executable, __file__, "--stranger", str(user)]
        environ = {k: v for k, v in os.environ.items() if not k.startswith("PHALANX_")}
        self.process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**environ, "HOME": tempfile.gettempdir()},
            cwd=tempfile.gettempdir(),
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n", "the stranger does not start"

    def begin(self, *ports: int, job: str = "") -> None:
        """Go to work."""
        self._say(json.dumps({"ports": ports, "job": job}))

    def end(self) -> dict[str, int]:
        """Stop; return what he has got."""
        self._say("stop")
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def _say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()


# ------------------------------------------------------------------------------
# Jobs.


class Started:
    """A job, of one process or several."""

    def __init__(self, kind: str, folder: Path, **environ: str) -> None:
        self.port = free_port()
        token = {} if kind == "run" else {"PHALANX_TOKEN": secrets.token_hex(32)}
        base = {k: v for k, v in os.environ.items() if not k.startswith("PHALANX_")}
        base |= {"OMP_NUM_THREADS": "1", "BEGAN": str(time.time()), **token, **environ}
        script = str(folder / "train.py")
        (folder / "train.py").write_text(TRAIN)
        phalanx = [sys.executable, "-m", "phalanx", "run"]
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port), "WORLD_SIZE": "2"}
        self.job = ""
        if kind == "run":
            words = [([*phalanx, "-n", "2", script], {})]
        elif kind == "nodes":
            self.job = "phalanx"
            nodes = [*phalanx, "-n", "1", "--nnodes", "2", "--master", f"127.0.0.1:{self.port}"]
            words = [([*nodes, "--node-rank", str(node), script], {}) for node in (0, 1)]
        elif kind == "torchrun":
            self.job = "a-job"
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
            options = ["--rdzv-backend", "static", "--master-addr", "127.0.0.1"]
            options += ["--master-port", str(self.port), "--rdzv-id", self.job]
            words = [([*torchrun, *options, script], {})]
        else:
            group = {**place, "HOW": "group", "LOCAL_WORLD_SIZE": "2"}
            words = [([sys.executable, script], {**group, "RANK": str(rank)}) for rank in (0, 1)]
        self.processes = [
            subprocess.Popen(
                each,
                env={**base, **own},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
            for each, own in words
        ]

    def end(self) -> tuple[list[int], str]:
        """Return the exit codes, and all that was said."""
        said = []
        for process in self.processes:
            try:
                said.append(process.communicate(timeout=PATIENCE)[0])
            except subprocess.TimeoutExpired:
                process.kill()
                said.append(process.communicate()[0])
        return [process.returncode for process in self.processes], "\n".join(said)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def is_right(codes: list[int], said: str) -> bool:
    return not any(codes) and said.count(RIGHT) == 2


def formed(said: str) -> float:
    """Return the seconds from the start until the last rank was in, or infinity."""
    times = [float(line.split("formed ")[1]) for line in said.splitlines() if "formed " in line]
    return max(times) if len(times) == 2 else float("inf")


def listeners() -> set[int]:
    """Return the ports at which somebody listens on this host: anybody may read them."""
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *_ = line.split()
        if state == "0A":
            found.add(int(local.rpartition(":")[2], 16))
    return found


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


@contextmanager
def decoy(patience: float = 0.1) -> Iterator[int]:
    """A port where callers are heard for so many seconds, and hung up on."""
    listener = socket.create_server(("127.0.0.1", 0))

    def hang_up() -> None:
        with suppress(OSError):
            while True:
                with listener.accept()[0] as caller:
                    caller.settimeout(patience)
                    with suppress(OSError):
                        caller.recv(4096)

    threading.Thread(target=hang_up, daemon=True).start()
    yield int(listener.getsockname()[1])
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def rss(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 >> 20


def connect_as_torch(port: int, seconds: float) -> Any:
    """Return a client of torch's at this port; None where there is no store of torch's."""
    from torch.distributed import TCPStore

    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with suppress(Exception):
            socket.create_connection(("127.0.0.1", port), 1).close()
            wait = timedelta(seconds=2)
            return TCPStore("127.0.0.1", port, timeout=wait, wait_for_workers=False)
        time.sleep(0.05)
    return None


# ------------------------------------------------------------------------------
# The attacks. Each returns whether the job held.


def attack_end() -> bool:
    """One key ends a running job, on both nodes, with exit code 0, and colours on the terminal."""
    with folder() as place:
        job = Started("nodes", place, STEPS="30")
        time.sleep(4)
        store = connect_as_torch(job.port, 3)
        if store is not None:
            said = {"node": 1, "failed": True, "summary": "\x1b[31mstop", "final": True, "code": 0}
            with suppress(Exception):
                store.set("phalanx/log/0/1", json.dumps(said))
        codes, said_by_all = job.end()
        return is_right(codes, said_by_all) and "\x1b" not in said_by_all


def attack_read() -> bool:
    """A stranger reads what is in the store."""
    with folder() as place:
        job = Started("nodes", place, STEPS="10")
        found = 0
        store = connect_as_torch(job.port, 4)
        if store is not None:
            time.sleep(2)
            with suppress(Exception):
                found = store.num_keys()
        return is_right(*job.end()) and not found


def attack_memory() -> bool:
    """A stranger makes node 0's launcher hold a gigabyte."""
    with folder() as place:
        job = Started("nodes", place, STEPS="30")
        store = connect_as_torch(job.port, 3)
        before = rss(job.processes[0].pid)
        with suppress(Exception):
            for number in range(40):
                store.set(f"junk{number}", "x" * ((8 << 20) - 100))
        callers = []
        with suppress(OSError):
            for _ in range(400):
                callers.append(caller := socket.create_connection(("127.0.0.1", job.port), 1))
                caller.sendall(b"\xff" * 60_000)
        grown = rss(job.processes[0].pid) - before
        return is_right(*job.end()) and grown < 64


def attack_garbage() -> bool:
    """Idle, half and random callers, before the second node comes, and while the job ends.

    The job that it is compared with has them at another port.
    """
    with folder() as place:
        with decoy(patience=0.0) as port:
            job = Started("nodes", place)
            with called_at(port):
                quiet = formed(job.end()[1])
        job = Started("nodes", place, STEPS="10")
        with called_at(job.port):
            codes, said = job.end()
        return is_right(codes, said) and formed(said) <= quiet + LATER


@contextmanager
def called_at(port: int) -> Iterator[None]:
    """Let 1,500 callers come to a port, one after the other."""
    callers, over = [], threading.Event()

    def call() -> None:
        while not over.wait(0.002) and len(callers) < 1500:
            with suppress(OSError):
                caller = socket.create_connection(("127.0.0.1", port), 1)
                callers.append(caller)
                caller.sendall(
                    secrets.token_bytes(random.choice((0, 1, 3, 512)))
                    if len(callers) % 2
                    else b"PHX?\x01\xff\xff"[: len(callers) % 8]
                )

    thread = threading.Thread(target=call)
    thread.start()
    yield
    over.set()
    thread.join()


def attack_local_user() -> bool:
    """Another user of this host takes a rank of `phalanx run -n 2`, whose port he looks up."""
    with folder() as place:
        hired = Hired(NOBODY)
        before = listeners()
        job = Started("run", place)
        until = time.monotonic() + 10
        while not (ports := listeners() - before) and time.monotonic() < until:
            time.sleep(0.005)
        hired.begin(*ports, job=_run_id(ports))
        codes, said = job.end()
        got = hired.end()
        hired.process.kill()
        return is_right(codes, said) and not got["met"] and not got["in"]


def _run_id(ports: set[int]) -> str:
    """Return the job's name, from the store's list of keys; "" where it shows none."""
    for port in ports:
        store = connect_as_torch(port, 0.5)
        until = time.monotonic() + 5
        while store is not None and time.monotonic() < until:
            with suppress(Exception):
                for key in store.list_keys():
                    parts = key.strip("/").split("/")
                    if parts[0] == "phalanx" and len(parts) > 2:
                        return str(parts[1])
            time.sleep(0.01)
    return ""


def at_random_moments(kind: str, count: int) -> tuple[int, list[float]]:
    """Return in how many of `count` starts nothing was taken; how much later each formed, seconds.

    Each is compared with a start just before it, with the stranger at a port that is not the job's:
    he takes as much time of this machine, which is faster or slower a minute later.
    """
    with folder() as place:
        hired, held, later = Hired(), 0, []
        for _ in range(count):
            with decoy() as port:
                hired.begin(port)
                quiet = formed(Started(kind, place).end()[1])
                hired.end()
            before = listeners()
            job = Started(kind, place)
            ports = {job.port}
            if kind == "run":
                until = time.monotonic() + 10
                while not (ports := listeners() - before) and time.monotonic() < until:
                    time.sleep(0.005)
            time.sleep(random.uniform(0, 1.2 * quiet))
            hired.begin(*ports, job=job.job)
            codes, said = job.end()
            got = hired.end()
            later.append(formed(said) - quiet)
            good = is_right(codes, said) and not got["met"]
            held += good
            if not good:
                print(f"  {kind}: {codes}, {got}; {said[-300:]}", file=sys.stderr)
        hired.process.kill()
        return held, later


def attack_token() -> bool:
    """He writes address and token of his own into the store of `--nnodes`, as rank 0."""
    return _as_rank_0("nodes")


def attack_torchrun_token() -> bool:
    """The same at the store of `init_process_group("phalanx")`."""
    return _as_rank_0("group")


def _as_rank_0(kind: str) -> bool:
    with folder() as place:
        hired = Hired()
        job = Started(kind, place)
        hired.begin(job.port, job=job.job)
        codes, said = job.end()
        got = hired.end()
        hired.process.kill()
        return is_right(codes, said) and not got["met"]


ATTACKS: dict[str, tuple[Callable[[], bool], int, int]] = {  # how often, and in the short form
    "end": (attack_end, 2, 1),
    "read": (attack_read, 2, 0),
    "memory": (attack_memory, 2, 0),
    "garbage": (attack_garbage, 2, 0),
    "token": (attack_token, 3, 1),
    "torchrun_token": (attack_torchrun_token, 3, 1),
    "local_user": (attack_local_user, 2, 0),
}
KINDS = ("run", "nodes", "torchrun", "group")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--stranger", type=int, help="for this program: be one, as this user")
    parser.add_argument("--count", type=int, default=25, help="starts of each kind at random")
    parser.add_argument("names", nargs="*")
    asked = parser.parse_args()
    if asked.stranger is not None:
        be_the_stranger(asked.stranger)
        return
    failed = False
    for name, (attack, often, short) in ATTACKS.items():
        times = short if asked.short else often
        if times and (not asked.names or name in asked.names):
            held = sum(attack() for _ in range(times))
            print(f"{name}: {held} of {times}", flush=True)
            failed |= held < times
    for kind in KINDS:
        name = f"random_{kind}"
        if not asked.short and (not asked.names or name in asked.names):
            held, later = at_random_moments(kind, asked.count)
            middle, worst = statistics.median(later), max(later)
            print(f"{name}: {held} of {asked.count}; {middle:.2f} s later, {worst:.2f} at most")
            failed |= held < asked.count or middle > LATER
    sys.exit(failed)


if __name__ == "__main__":
    main()
