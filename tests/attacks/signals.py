"""SIGTERM at random moments of a rank whose finalizers are busy. `python signals.py [--short]`

The rank makes and drops objects with a `__del__`, objects with callbacks of weak references, cycles
for the garbage collector, and tensors of `backend.empty`. Python drops what the signal's handler
raises in the first three. It has to end all the same, soon, and to clean up once.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import random
import signal
import sys
import threading
import time
import weakref


class Busy:
    """Its end takes a while, in Python."""

    def __init__(self, itself: bool = False) -> None:
        self.itself = self if itself else None

    def __del__(self) -> None:
        busy()


def busy() -> None:
    for _ in range(200):
        pass


def finalizers() -> None:
    Busy()


def callbacks() -> None:
    things = [threading.Event() for _ in range(5)]
    references = [weakref.ref(each, lambda _: busy()) for each in things]
    del things
    assert not any(reference() for reference in references)


def cycles() -> None:
    for _ in range(3):
        Busy(itself=True)
    gc.collect(0)


class Sender(threading.Thread):
    """Sends this process one SIGTERM, so many seconds after it may.

    sent   when, once it has
    """

    def __init__(self, delay: float) -> None:
        super().__init__()
        self._delay, self.sent, self.may_send = delay, math.inf, threading.Event()

    def run(self) -> None:
        self.may_send.wait()
        time.sleep(self._delay)
        os.kill(os.getpid(), signal.SIGTERM)
        self.sent = time.monotonic()


def attack(rounds: int, seed: int, seconds: float) -> int:
    """In how many of so many rounds the signal ended what went on, and nothing came after it."""
    import torch

    from phalanx.errors import RankStopped
    from phalanx.launch.worker import _Stop
    from phalanx.transport.shm.segments import Arena, Segment

    draw, right = random.Random(seed), 0
    arena = Arena(Segment.create(1 << 20), 0, lambda number, segment: None)

    def tensors() -> None:
        for _ in range(5):
            arena.empty((100,), torch.float32)

    ways = [finalizers, callbacks, cycles, tensors]
    for number in range(rounds):
        sender = Sender(draw.random() * 0.02)
        sender.start()  # before the handler is there: what it raises would break this, too
        stop, way, told, in_time = _Stop(), ways[number % len(ways)], 0, False
        try:
            sender.may_send.set()
            while time.monotonic() < sender.sent + seconds:
                way()
            sender.join()
        except RankStopped:
            told, in_time = told + 1, time.monotonic() < sender.sent + seconds
            try:  # clean up, in peace
                for _ in range(3):
                    way()
                    os.kill(os.getpid(), signal.SIGTERM)
            except RankStopped:
                told += 1
        sender.join()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        del stop
        right += told == 1 and in_time
    return right


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seconds", type=float, default=10.0, help="in which it has to be told")
    parser.add_argument("--seed", type=int, default=26)
    options = parser.parse_args()
    rounds = options.rounds or (60 if options.short else 500)
    right = attack(rounds, options.seed, options.seconds)
    print(f"signals: {right} of {rounds}")
    return int(right < rounds)


if __name__ == "__main__":
    sys.exit(main())
