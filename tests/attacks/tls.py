"""TLS between hosts, attacked by who is on the way. Root: hosts are network namespaces.

    python tests/attacks/tls.py [--short] [NAME ...]

    captured     what crosses the wire, by an AF_PACKET socket on the switch between two hosts: none
                 of the tensors that were sent is in it (with PHALANX_TLS=off, all of them are)
    flipped      a relay between two ranks changes one byte of what one says within TLS: the
                 other's connection ends, and its error says so by name
    downgraded   a relay changes what HELLO or CHALLENGE says about TLS, in every way: nobody is in
    plain        a peer that agrees on TLS and goes on in plain text is refused by name

Prints `NAME: K of N`; exit code 1 if K < N.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import random
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from time import sleep
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "multiprocess"))
sys.path.insert(0, str(Path(__file__).parents[1] / "backends"))

import torch
from clusters import loopback_listener
from networks import Network, enter, why_not
from ranks import Job
from test_tcp_tls import FarBackend, OffTls, call_in_plain_text

from phalanx import Backend, PeerLostError, TcpBackend
from phalanx.wire.handshake import CHALLENGE, HELLO

TOKEN = "the token of the tests"
ETH_P_ALL = 3
SECONDS = 3.0  # for a rank that is not let in


# captured ---------------------------------------------------------------------------------------


def tensors(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2**62, (32 + n % 900,), generator=generator) for n in range(count)]


def exchange(backend: Backend, count: int) -> bool:
    """Send what is known one way, and sum it up the other way."""
    for tensor in tensors(count):
        if backend.rank == 0:
            backend.send(tensor, 1)
        else:
            into = torch.empty_like(tensor)
            backend.recv(into, 0)
            assert torch.equal(into, tensor)
    return True


def capture(switch: str, pipe: Any) -> None:
    """Keep every packet at a port of the switch until told to stop; send what they held."""
    enter(switch)
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL)) as sock:
        sock.setsockopt(socket.SOL_SOCKET, 33, 256 << 20)  # SO_RCVBUFFORCE
        sock.bind(("port1", 0))
        sock.settimeout(0.2)
        pipe.send("listens")
        held: list[bytes] = []
        while not pipe.poll():
            with suppress(TimeoutError):
                while True:
                    held.append(sock.recv(1 << 17))
        pipe.send(held)


def seen(count: int, mode: str) -> tuple[int, int]:
    """How many of the tensors stand on the wire, by 64 bytes of each; and how many bytes crossed"""
    context = multiprocessing.get_context("fork")
    with Network(2) as network:
        ours, theirs = context.Pipe()
        args = (network._switch, theirs)
        process = context.Process(target=capture, args=args, daemon=True)
        process.start()
        assert ours.recv() == "listens"
        with Job(2, network=network, kind=KINDS[mode]) as job:
            outcomes = [job.start(rank, exchange, count, token=TOKEN) for rank in (0, 1)]
            assert [outcome() for outcome in outcomes] == [("returned", True)] * 2
        sleep(0.3)
        ours.send("stop")
        held = ours.recv()
        process.join()
    whole = b"".join(held)
    found = 0
    for tensor in tensors(count):
        data = bytes(tensor.numpy().tobytes())
        found += data[64:128] in whole or data[:64] in whole
    return found, len(whole)


class OffBackend(TcpBackend):
    """As with `PHALANX_TLS=off`; the processes' environment is that of their fork server."""

    security = OffTls


KINDS: dict[str, type[TcpBackend]] = {"on": TcpBackend, "off": OffBackend}


def attack_captured(short: bool) -> tuple[int, int]:
    count = 100 if short else 1000
    plainly, _ = seen(count, "off")
    if plainly < count * 0.95:
        print(f"captured: without TLS only {plainly} of {count} tensors were seen")
        return 0, count
    found, size = seen(count, "on")
    assert size > 8 * sum(map(len, tensors(count))), "not all of it was captured"
    return count - found, count


# A relay between two ranks of this process, whose connections count as leading to another host ----


class Relay:
    """Passes on what two say to each other; `change(side, data, before)` may change some of it."""

    def __init__(self, target: tuple[str, int], change: Callable[[int, bytes, int], bytes]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._target, self._change = target, change
        self._open = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                ends = [self._listener.accept()[0]]
                ends.append(socket.create_connection(self._target))
                self._open += ends
                for side in (0, 1):
                    args = (ends[side], ends[1 - side], side)
                    threading.Thread(target=self._carry, args=args, daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket, side: int) -> None:
        before = 0
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(self._change(side, data, before))
                before += len(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for sock in self._open:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


def ends(
    change: Callable[[int, bytes, int], bytes], fn: Callable[[Backend], None], timeout: float
) -> list[str]:
    """What becomes of rank 0 and of rank 1, which reaches it by way of a relay: errors, or ""."""
    listener = loopback_listener()
    port = listener.getsockname()[1]
    relay = Relay(("127.0.0.1", port), change)

    def rank(number: int) -> str:
        address = relay.address if number else f"127.0.0.1:{port}"
        try:
            mine = None if number else listener
            backend = FarBackend(number, 2, address, token=TOKEN, timeout=timeout, listener=mine)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        try:
            fn(backend)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            backend.abort()
        return ""

    try:
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(rank, (0, 1)))
    finally:
        relay.close()


def attack_flipped(short: bool) -> tuple[int, int]:
    rounds, rng, good = 10 if short else 100, random.Random(7), 0

    def talk(backend: Backend) -> None:
        other, tensor = 1 - backend.rank, torch.arange(5000)
        for _ in range(200):
            into = torch.empty_like(tensor)
            backend.sendrecv(tensor, other, into, other)
            assert torch.equal(into, tensor), "a changed byte was let through"

    for _ in range(rounds):
        victim, at, bit = rng.randrange(2), rng.randrange(3_000, 2_000_000), 1 << rng.randrange(8)

        def flip(
            side: int, data: bytes, before: int, victim: int = victim, at: int = at, bit: int = bit
        ) -> bytes:
            if side == victim and before <= at < before + len(data):
                changed = bytearray(data)
                changed[at - before] ^= bit
                return bytes(changed)
            return data

        outcomes = ends(flip, talk, 20.0)
        hears = outcomes[victim]  # side 0 is what rank 1, the dialer, says to rank 0
        named = f"rank {1 - victim} was lost: its bytes were changed on the way (TLS"
        if hears.startswith(PeerLostError.__name__) and named in hears and outcomes[1 - victim]:
            good += 1
        else:
            print(f"flipped: byte {at} of side {victim}: {outcomes}")
    return good, rounds


def attack_downgraded(short: bool) -> tuple[int, int]:
    """Bytes of the offer in HELLO (its 35th), and of the masked one in CHALLENGE (its 5th)."""
    good = total = 0
    for kind, place in ((HELLO, 7 + 34), (CHALLENGE, 7 + 4)):
        for value in (0x80, 0x81, 0x00, 0x02) if short else (*range(0, 256, 8), 0x80, 0x81, 2):

            def rewrite(
                side: int, data: bytes, before: int, kind: int = kind, place: int = place,
                value: int = value,
            ) -> bytes:  # fmt: skip
                if before == 0 and side == (kind == CHALLENGE) and len(data) > place:
                    wanted = value if kind == HELLO else data[place] ^ (value or 1)
                    return data[:place] + bytes([wanted]) + data[place + 1 :]
                return data

            total += 1
            outcomes = ends(rewrite, lambda backend: backend.barrier(), 1.0)
            if all(outcomes) and "AuthenticationError" in outcomes[1]:
                good += 1
            else:
                print(f"downgraded: {kind} {value:#x}: {outcomes}")
    return good, total


def attack_plain(short: bool) -> tuple[int, int]:
    """Who agrees on TLS and goes on in plain text, beside a rank that comes as it should."""
    records: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    logging.getLogger("phalanx").addHandler(Keep())
    said = [
        b"PHLX" + bytes(60),
        b"PHX?\x06\x20\x00" + bytes(32),
        b"PHX?\x04\x00\x00",
        b"GET / HTTP",
    ]
    good = 0
    for words in said:
        records.clear()
        listener = loopback_listener()
        place = listener.getsockname()
        address = f"127.0.0.1:{place[1]}"
        with ThreadPoolExecutor(1) as pool:
            zero = pool.submit(
                FarBackend, 0, 2, address, token=TOKEN, timeout=20.0, listener=listener
            )
            with call_in_plain_text(place, words) as sock, suppress(ConnectionError):
                while sock.recv(100):
                    pass
            one = FarBackend(1, 2, address, token=TOKEN, timeout=20.0)
            one.close()
            zero.result().close()
        named = "turned away 127.0.0.1, as rank 1: it speaks plain text where TLS was agreed"
        good += any(named in line for line in records)
    return good, len(said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    torch.set_num_threads(1)
    failed = False
    attacks = [attack_flipped, attack_downgraded, attack_plain]
    if why_not():
        print(f"captured: left out: {why_not()}")
    else:
        attacks.insert(0, attack_captured)
    for attack in attacks:
        name = attack.__name__.removeprefix("attack_")
        if options.names and name not in options.names:
            continue
        good, total = attack(options.short)
        print(f"{name}: {good} of {total}", flush=True)
        failed |= good < total
    sys.exit(failed)


if __name__ == "__main__":
    logging.getLogger("phalanx").addHandler(logging.NullHandler())
    main()
