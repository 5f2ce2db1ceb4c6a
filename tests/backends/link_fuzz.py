"""A rank that holds the right token and sends what no rank should.

    python tests/backends/link_fuzz.py [--seconds 60] [--seed N] [--first ROUND]

In each round a real rank 0 meets a peer that the test plays, which sends a stream of frames, some
well formed and all of them uncalled for, damaged or not, and hangs up. Rank 0 is in a call, or
comes to one, while they arrive. Whatever it was: the call ends, with an error of Phalanx that names
rank 1, and rank 0 can be closed. Prints the seed first, and N of N at the end.
"""

from __future__ import annotations

import argparse
import logging
import random
import secrets
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch

import phalanx
from phalanx import DistributedError, TcpBackend
from phalanx.wire import control
from phalanx.wire.frame import MAX_CONTROL, MAX_PAYLOAD, Channel, Kind, pack_header

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "wire"))

from raw_peer import WORLD, rank_0_and_a_raw_peer
from wire_fuzz import SIZES, damaged, value

CALLS: tuple[Any, ...] = (
    lambda backend: phalanx.all_reduce(torch.ones(1000), backend, algorithm="ring"),
    lambda backend: phalanx.broadcast(torch.ones(7), backend, root=1),
    lambda backend: backend.recv(bytearray(40), 1),
    lambda backend: phalanx.async_all_reduce(torch.ones(3), backend).wait(),
)
FORMS = {
    Kind.FAILURE: control.FailureNotice,
    Kind.ASK: control.Ask,
    Kind.ANSWER: control.Answer,
    Kind.ADDRESS: control.Address,
    Kind.TABLE: control.Table,
    Kind.MEMORY: control.Attached,
    Kind.NEWS: control.News,
}


def _control(rng: random.Random, kind: Kind) -> bytes:
    """What a frame of that kind holds, of values that make sense and of others."""
    form = FORMS.get(kind)
    if form is None:
        return b""
    message = value(rng, form)
    if isinstance(message, control.FailureNotice):
        ranks = {"culprit": rng.choice((1, 1, -1, 2**40)), "reporter": rng.choice((1, 1, 0, 2**40))}
        message = msgspec.structs.replace(message, **ranks)
    return control.encode(message)


def frame(rng: random.Random) -> bytes:
    """A frame, well formed, that rank 0 has not asked for."""
    kind = rng.choice(list(Kind))
    group = rng.choice((WORLD, WORLD, WORLD, 7, 2**64 - 1))
    number = rng.choice((0, 0, 1, 2, -1, 2**62))
    payload = rng.randbytes(rng.choice(SIZES))
    before = behind = 0
    if kind >= Kind.CANCEL:
        payload = _control(rng, kind) if rng.random() < 0.8 else payload
    elif rng.random() < 0.4:
        before = rng.choice((0, 0, 1, 2**40))
        behind = rng.choice((0, 1, MAX_PAYLOAD, 2**40, 2**62))
    header = pack_header(
        Channel(group, kind, number),
        fingerprint=rng.choice((0, rng.getrandbits(64))),
        length=len(payload),
        total=before + len(payload) + behind,
        offset=before,
    )
    assert len(payload) <= MAX_CONTROL
    return header + payload


def fuzz_link(rng: random.Random) -> None:
    """One round."""
    stream = b"".join(frame(rng) for _ in range(rng.choice((1, 2, 5, 20))))
    if rng.random() < 0.5:
        stream = damaged(rng, stream)
    call = rng.choice(CALLS)
    with rank_0_and_a_raw_peer() as (backend, peer):
        with suppress(OSError):
            peer.sock.sendall(stream)
            if rng.random() < 0.8:
                peer.sock.shutdown(socket.SHUT_WR)
            else:
                peer.sock.close()
        _ends_well(backend, call)


def _ends_well(backend: TcpBackend, call: Any) -> None:
    error: DistributedError | None = None
    for each in (call, lambda backend: backend.barrier()):  # the first may have got what it wants
        try:
            each(backend)
        except DistributedError as caught:
            error = caught
    assert error is not None, "nobody can have taken part in this barrier"
    # Damage may turn word of a failure of rank 1 into one of rank 0: that is no nonsense.
    assert error.peer in (0, 1) or "rank 1" in str(error), repr(error)
    assert not isinstance(error, TimeoutError), repr(error)


def fuzz(seed: int, *, rounds: int | None = None, seconds: float = 0.0, first: int = 0) -> int:
    """So many rounds, or for so long; returns how many there were."""
    number = first
    end = time.monotonic() + seconds
    while number - first < rounds if rounds is not None else time.monotonic() < end:
        try:
            fuzz_link(random.Random(seed * 2**40 + number))
        except BaseException:
            print(f"violated: --seed {seed} --first {number}", file=sys.stderr)
            raise
        number += 1
    return number - first


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--first", type=int, default=0, help="round to begin with")
    options = parser.parse_args(arguments)
    logging.getLogger("phalanx").setLevel(logging.CRITICAL)
    print(f"--seed {options.seed}", flush=True)
    count = fuzz(options.seed, seconds=options.seconds, first=options.first)
    print(f"links: {count:,} of {count:,} rounds ended with an error that names the culprit")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
