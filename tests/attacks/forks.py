"""Forks of ranks at random moments, in ten kinds of traffic. `python forks.py [--short]`

A thread of each rank forks, and the main thread does, in the middle of what it issues and waits
for. The children call, wait, close, end, and are killed. Every one has to end as it should, soon,
and what its parent computes has to be right.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

SECONDS = 60.0  # of a call
LONGEST = 25  # of a child: one that hangs dies of SIGALRM; to end takes a busy machine seconds
MISUSE, OTHER, WENT_THROUGH = 3, 4, 5  # exit codes of children
SHOULD = {"call": MISUSE, "wait": MISUSE, "close": 0, "end": 0, "killed": -signal.SIGKILL}


class Forks:
    """The forks of one rank in one kind of traffic.

    call    what a child calls
    work    what it waits for: issued by the parent last
    """

    def __init__(self, backend: Any, call: Callable[[], object], count: int, seed: str) -> None:
        self._backend, self.call, self.work = backend, call, None
        self._draw = random.Random(seed)
        acts = [act for _ in range(count) for act in SHOULD]
        self._draw.shuffle(acts)
        self._in_main, self._in_thread = acts[: count // 2], acts[count // 2 : count]
        self.wrong: list[str] = []
        self.right = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        for act in self._in_thread:
            time.sleep(self._draw.random() * 0.02)
            self._fork(act)

    def moment(self) -> None:
        """In the main thread: fork, perhaps."""
        if self._in_main and self._draw.random() < 0.3:
            self._fork(self._in_main.pop())

    def over(self) -> bool:
        return not (self._in_main or self._thread.is_alive())

    def _fork(self, act: str) -> None:
        work, in_main = self.work, threading.current_thread() is threading.main_thread()
        if act == "wait" and work is None:
            act = "call"
        child = os.fork()
        if child == 0:
            signal.alarm(LONGEST)
            code = self._be_a_child(act, work)
            if act == "end" and in_main:
                sys.exit(code)  # by way of all that its parent would do at its end
            os._exit(code)
        if act == "killed":
            time.sleep(self._draw.random() * 0.005)
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        if code == SHOULD[act]:
            self.right += 1
        else:
            self.wrong.append(f"rank {self._backend.rank}: a child that {act}s ended with {code}")

    def _be_a_child(self, act: str, work: Any) -> int:
        from phalanx import MisuseError

        try:
            if act == "call":
                self.call()
            elif act == "wait":
                work.wait()
            elif act == "killed":
                signal.pause()
            elif act == "close":
                with self._backend:
                    self._backend.abort()
                return 0
            else:
                gc.collect()
                atexit._run_exitfuncs()  # a thread's child has no other end
                return 0
        except MisuseError as error:
            if "was forked" in str(error):
                return MISUSE
            os.write(2, f"a child that {act}s: {error!r}\n".encode())
        except BaseException as error:
            os.write(2, f"a child that {act}s: {error!r}\n".encode())
        else:
            return WENT_THROUGH
        return OTHER


# What a rank does: each is called again and again, and says whether its result is right.


def traffics(  # noqa: PLR0915 - ten of them
    backend: Any,
) -> dict[str, tuple[Callable[[Forks], bool], Callable[[], object]]]:
    import torch
    from torch import nn

    import phalanx
    from phalanx.aggregation import ParameterServer

    rank, peer = backend.rank, 1 - backend.rank
    group = backend.subgroup([0, 1])
    shared = backend.empty(100_000)

    def model(wrap: Any) -> Any:
        torch.manual_seed(0)
        return wrap(nn.Sequential(nn.Linear(200, 100), nn.ReLU(), nn.Linear(100, 1)), backend)

    def trained(net: Any, optimizer: Any, forks: Forks) -> bool:
        optimizer.zero_grad()
        loss = net(torch.full((4, 200), 1.0)).square().sum()
        forks.moment()
        loss.backward()
        forks.moment()
        optimizer.step()
        both = phalanx.all_gather(loss.detach().reshape(1), backend)
        return bool(both[0] == both[1]) and bool(both.isfinite().all())

    ddp, fsdp = model(phalanx.DDP), model(phalanx.FSDP)
    of_ddp = torch.optim.SGD(ddp.parameters(), lr=1e-4)
    of_fsdp = torch.optim.SGD(fsdp.parameters(), lr=1e-4)
    small = torch.ones(3)

    def blocking(forks: Forks) -> bool:
        forks.moment()
        large = phalanx.all_reduce(torch.full((50_000,), 1.0), backend)
        return phalanx.all_reduce(small, backend).tolist() == [2.0] * 3 and large[-1] == 2

    def asynchronous(forks: Forks) -> bool:
        works = [phalanx.async_all_reduce(torch.full((n,), 1.0), backend) for n in (9, 200_000)]
        forks.work = works[-1]
        forks.moment()
        time.sleep(0.001)  # the background drives
        return all(bool((work.wait() == 2).all()) for work in works)

    def messages(forks: Forks) -> bool:
        got = bytearray(1000)
        forks.moment()
        if rank == 0:
            backend.send(bytes([7] * 1000), 1)
            backend.recv(got, 1)
        else:
            backend.recv(got, 0)
            backend.send(bytes([7] * 1000), 0)
        return got == bytes([7] * 1000)

    def in_the_background(forks: Forks) -> bool:
        into, given = torch.zeros(300_000), torch.full((300_000,), 5.0)
        works = [phalanx.irecv(into, backend, peer), phalanx.isend(given, backend, peer)]
        forks.work = works[0]
        forks.moment()
        for work in works:
            work.wait()
        return bool((into == 5).all())

    def barrier(forks: Forks) -> bool:
        forks.work = phalanx.async_barrier(backend)
        forks.moment()
        forks.work.wait()
        backend.barrier()
        return True

    def subgroup(forks: Forks) -> bool:
        forks.work = phalanx.async_all_gather(torch.tensor([rank]), group)
        forks.moment()
        return bool(forks.work.wait().tolist() == [0, 1])

    def in_shared_memory(forks: Forks) -> bool:
        shared.fill_(rank + 1.0)
        backend.barrier()
        forks.moment()
        phalanx.all_reduce_(shared, backend)
        return bool((shared == 3).all())

    def parameter_server(forks: Forks) -> bool:
        param = torch.zeros(50)
        if rank == 0:
            made = ParameterServer.serve([param], backend, lambda p: torch.optim.SGD(p, lr=1.0))
            forks.moment()
            return bool((made.params[0] == -4).all())
        with ParameterServer.connect([param], backend) as client:
            for _ in range(4):
                client.push([torch.ones(50)])
                forks.moment()
            client.pull_()
        return bool((param == -4).all())

    # Children of DDP and FSDP call this, too, and do not compute before. In torch each leaf tensor
    # has a lock, and each node that adds up its gradient has one: a child that was forked while
    # another thread held one, as it trained that model, waits for ever (without Phalanx, too).
    call = lambda: phalanx.all_reduce(torch.ones(2), backend)  # noqa: E731
    return {
        "blocking collectives": (blocking, call),
        "asynchronous collectives": (asynchronous, call),
        "messages": (messages, lambda: backend.send(b"x", peer)),
        "messages in the background": (in_the_background, lambda: backend.isend(b"x", peer)),
        "barriers": (barrier, backend.barrier),
        "a sub-group": (subgroup, lambda: phalanx.all_gather(torch.ones(1), group)),
        "DDP": (lambda forks: trained(ddp, of_ddp, forks), call),
        "FSDP": (lambda forks: trained(fsdp, of_fsdp, forks), call),
        "shared tensors": (in_shared_memory, lambda: phalanx.all_reduce_(shared, backend)),
        "a parameter server": (parameter_server, lambda: backend.subgroup([0, 1])),
    }


# Not what a fork may find within torch's own locks: of DDP and FSDP see `call` above.
SHORT = ["blocking collectives", "messages", "barriers", "shared tensors"]


def be_a_rank(kind: str, count: int, seed: int, *, short: bool) -> None:
    import torch

    import phalanx

    torch.set_num_threads(1)
    backend = phalanx.init(kind, timeout=SECONDS)
    control = backend.subgroup([0, 1])
    for name, (step, call) in traffics(backend).items():
        if short and name not in SHORT:
            continue
        forks, over = Forks(backend, call, count, f"{seed} {kind} {name} {backend.rank}"), False
        steps = 0
        while not over:
            if not step(forks):
                forks.wrong.append(f"rank {backend.rank}: a result is wrong")
            steps += 1
            over = bool(
                phalanx.all_reduce(torch.tensor([forks.over()]), control, phalanx.ReduceOp.MIN)[0]
            )
        result = {"kind": kind, "traffic": name, "right": forks.right, "wrong": forks.wrong}
        print(json.dumps({**result, "steps": steps}), flush=True)
    backend.close()


def attack(kinds: list[str], count: int, seed: int, *, short: bool) -> tuple[int, int]:
    """How many of how many children ended as they should, in jobs whose results were right."""
    right: Counter[str] = Counter()
    wrong: list[str] = []
    for kind in kinds:
        here = [sys.executable, "-m", "phalanx", "run", "-n", "2", __file__]
        job = subprocess.run(  # noqa: PLW1510 - how it ended is looked at below
            [*here, "--rank", kind, "--count", str(count), "--seed", str(seed)]
            + ["--short"] * short,
            capture_output=True,
            text=True,
            timeout=540,
        )
        for line in job.stdout.splitlines():
            _, brace, rest = line.partition("{")  # behind the name of the rank
            if brace:
                result = json.loads(brace + rest)
                right[result["traffic"]] += result["right"]
                wrong += [f"{kind}, {result['traffic']}: {each}" for each in result["wrong"]]
        if job.returncode or "Traceback" in job.stderr or "Exception ignored" in job.stderr:
            wrong.append(f"{kind}: the job ended with {job.returncode}:\n{job.stderr[-3000:]}")
    for name, number in right.items():
        print(f"forks in {name}: {number} of {2 * len(kinds) * count}")
    print("".join(f"{each}\n" for each in wrong), end="")
    good, all_ = sum(right.values()), 2 * (len(SHORT) if short else 10) * len(kinds) * count
    return (good if not wrong else min(good, all_ - len(wrong))), all_


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--rank", default="")
    parser.add_argument("--count", type=int, default=5)  # of children, of each rank and traffic
    parser.add_argument("--seed", type=int, default=26)
    options = parser.parse_args()
    if options.rank:
        be_a_rank(options.rank, options.count, options.seed, short=options.short)
        return 0
    kinds, count = (["shm"], 1) if options.short else (["shm", "tcp", "hybrid"], options.count)
    good, all_ = attack(kinds, count, options.seed, short=options.short)
    print(f"forks: {good} of {all_}")
    return int(good < all_)


if __name__ == "__main__":
    sys.exit(main())
