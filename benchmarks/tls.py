"""What TLS costs between two hosts: one stream, small messages, a handshake. Needs root.

    python benchmarks/tls.py [--rounds 15] [--mebibytes 256]

Two network namespaces on this machine, a rank in each. In interleaved rounds one sends the other
messages of 16 MiB, with TLS, without it, and as OpenSSL alone does (`ssl.SSLSocket`, both ends
blocking); every message is checked. Then messages of 8 bytes there and back, and handshakes:
from the call until the caller is let in. Prints medians as a Markdown table.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from time import perf_counter

import torch
from linked_hosts import LinkedHosts, NoLinkError

from phalanx import TcpBackend
from phalanx.transport.tcp.admission import Acceptor, speak
from phalanx.transport.tcp.loop import Reactor
from phalanx.transport.tcp.tls import Tls
from phalanx.wire.handshake import DialerHandshake, Identity

TOKEN = "the token of the benchmark"
SIZE = 16 << 20
TLS, PLAIN, ALONE = "TLS", "plain", "OpenSSL alone"
HANDSHAKES, PINGS = 50, 300


class Off(Tls):
    """`PHALANX_TLS=off`."""

    def __init__(self, token: bytes) -> None:
        super().__init__(token, {"PHALANX_TLS": "off"})


class PlainTcp(TcpBackend):
    security = Off


class Step:
    """A door that lets its caller in, and hangs up."""

    label, callers, identity = "the step", 1, Identity("step", 0, 0, 2)

    def __init__(self, tls: Tls) -> None:
        self.token, self.tls, self.reactor = TOKEN.encode(), tls, Reactor()
        self.let_in = 0

    def admit(self, peer: int) -> None:
        """Everybody may come in."""

    def link_opened(self, peer: int, sock: socket.socket, surplus: bytes) -> None:
        self.let_in += 1
        sock.close()


def connect(host: str, port: int) -> socket.socket:
    """Call, again and again until somebody listens there."""
    while True:
        with suppress(ConnectionRefusedError):
            return socket.create_connection((host, port))


def between(number: int, port: int) -> socket.socket:
    """One's end of a connection between the two."""
    if number:
        return connect(LinkedHosts.address(0), port)
    with socket.create_server((LinkedHosts.address(0), port)) as listener:
        return listener.accept()[0]


def rank(number: int, rounds: int, count: int) -> None:
    torch.set_num_threads(1)
    backends = {
        name: kind(
            number, 2, f"{LinkedHosts.address(0)}:{29500 + place}", token=TOKEN, timeout=60.0
        )
        for place, (name, kind) in enumerate({TLS: TcpBackend, PLAIN: PlainTcp}.items())
    }
    assert "TLS 1.3" in backends[TLS].describe()
    assert "TLS 1.3" not in backends[PLAIN].describe()
    alone = Tls(TOKEN.encode())._contexts[number == 0]
    del alone.sslsocket_class
    bare = alone.wrap_socket(between(number, 29510), server_side=number == 0)
    bare.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as the others have it
    data = torch.arange(SIZE // 4, dtype=torch.int32)
    into = torch.zeros_like(data)
    bytes_in, bytes_out = (memoryview(each.numpy().data).cast("B") for each in (into, data))

    def through_openssl() -> None:
        if number:
            bare.sendall(bytes_out)
            return
        got = 0
        while got < SIZE:
            got += bare.recv_into(bytes_in[got:])

    def through(backend: TcpBackend) -> Callable[[], object]:
        if number:
            return lambda: backend.send(data, 0)
        return lambda: backend.recv(into, 1)

    ways: dict[str, Callable[[], object]] = {
        name: through(backend) for name, backend in backends.items()
    }
    ways[ALONE] = through_openssl
    gigabytes: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):  # the first one warms up
        for name, move in ways.items():
            into.zero_()
            backends[PLAIN].barrier()
            began = perf_counter()
            for _ in range(count):
                move()
            backends[PLAIN].barrier()
            if turn:
                gigabytes[name].append(count * SIZE / (perf_counter() - began) / 1e9)
            assert number or torch.equal(into, data), name
    small = torch.zeros(2, dtype=torch.int32)
    micros: dict[str, list[float]] = {name: [] for name in backends}
    for _ in range(rounds):
        for name, backend in backends.items():
            began = perf_counter()
            for ping in range(PINGS):
                if number:
                    backend.send(torch.full_like(small, ping), 0)
                    backend.recv(small, 0)
                else:
                    backend.recv(small, 1)
                    backend.send(small, 1)
                assert small.tolist() == [ping, ping]
            micros[name].append((perf_counter() - began) / PINGS / 2 * 1e6)
    shakes = {name: handshakes(number, kind) for name, kind in KINDS.items()}
    for backend in backends.values():
        backend.close()
    if number:
        show(gigabytes, micros, shakes)


KINDS: dict[str, type[Tls]] = {TLS: Tls, PLAIN: Off}


def handshakes(number: int, kind: type[Tls]) -> list[float]:
    """Milliseconds from a call until the caller is let in."""
    tls, address = kind(TOKEN.encode()), (LinkedHosts.address(0), 29520 + (kind is Off))
    found: list[float] = []
    if number == 0:
        step, lock = Step(tls), threading.RLock()
        with lock:
            acceptor = Acceptor(step, socket.create_server(address))
            while step.let_in < HANDSHAKES:
                step.reactor.turn(1.0, lock)
            acceptor.close()
            step.reactor.close()
        return found
    for _ in range(HANDSHAKES):
        began = perf_counter()
        sock = connect(*address)
        caller = DialerHandshake(Step.identity._replace(rank=1), tls._token, 0, tls.offer(sock))
        with speak(sock, caller, caller.start(), 5.0, tls):
            found.append((perf_counter() - began) * 1e3)
    return found


def show(
    gigabytes: dict[str, list[float]],
    micros: dict[str, list[float]],
    shakes: dict[str, list[float]],
) -> None:
    """Print medians as a table."""
    print("| | TLS 1.3 | plain | OpenSSL alone | TLS / OpenSSL |\n|---|---:|---:|---:|---:|")
    middle = {name: statistics.median(values) for name, values in gigabytes.items()}
    share = statistics.median(
        one / other for one, other in zip(gigabytes[TLS], gigabytes[ALONE], strict=True)
    )
    print(
        f"| one stream, GB/s | {middle[TLS]:.2f} | {middle[PLAIN]:.2f} | {middle[ALONE]:.2f} "
        f"| {share:.2f} |"
    )
    for title, found in (("8 bytes, one way, us", micros), ("let in, ms", shakes)):
        tls, plain = (statistics.median(found[name]) for name in (TLS, PLAIN))
        print(f"| {title} | {tls:.2f} | {plain:.2f} | | |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--mebibytes", type=int, default=256, help="sent in a round")
    options = parser.parse_args()
    if "RANK" in os.environ:
        count = max(options.mebibytes * 2**20 // SIZE, 1)
        rank(int(os.environ["RANK"]), options.rounds, count)
        return
    try:
        with LinkedHosts(None) as hosts, hosts.job(sys.executable, *sys.argv) as processes:
            codes = [process.wait() for process in processes]
    except NoLinkError as error:
        raise SystemExit(str(error)) from None
    sys.exit(max(codes))


if __name__ == "__main__":
    main()
