"""How fast a message over TCP is beside a bare socket: `benchmarks/point_to_point.py --help`.

One rank sends, the other receives and says that it has it. Beside `send` and `recv` the same is
done over a socket of its own between the same two processes, with blocking `sendall` and
`recv_into`, which is about what the kernel can do. Rounds of both are interleaved, so that what
the machine does besides meets both alike; a size's figure is the median of its rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch
from rich.console import Console
from rich.table import Table

import phalanx
from phalanx import Backend
from phalanx.backends.memory import tensor_bytes

DEFAULT_SIZES = "64K,1M,16M,64M,256M"
WIDTH = 100  # columns that the table needs, also when it goes to a file
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_size(text: str) -> int:
    """`"64K"` -> 65536."""
    unit = UNITS.get(text[-1:].upper(), 1)
    return int(text[:-1] if unit > 1 else text) * unit


def messages_in_a_round(count: int) -> int:
    """Enough that a round of small messages can be timed, few enough that large ones end."""
    return max(1, min(100, (16 << 20) // count))


def bare_socket(backend: Backend) -> socket.socket:
    """A connection of its own between the two ranks."""
    port = torch.zeros(1, dtype=torch.int64)
    if backend.rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port[0] = listener.getsockname()[1]
            backend.send(port, 1)
            sock, _ = listener.accept()
    else:
        backend.recv(port, 0)
        sock = socket.create_connection(("127.0.0.1", int(port)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def ways(
    backend: Backend, sock: socket.socket, tensor: torch.Tensor
) -> dict[str, Callable[[], None]]:
    """What one rank does for one message, for each way to send it."""
    view, said = tensor_bytes(tensor), bytearray(1)
    other = 1 - backend.rank

    def send_bare() -> None:
        sock.sendall(view)
        sock.recv_into(said)

    def receive_bare() -> None:
        place = 0
        while place < len(view):
            place += sock.recv_into(view[place:])
        sock.sendall(said)

    def send() -> None:
        backend.send(tensor, other)
        backend.recv(said, other)

    def receive() -> None:
        backend.recv(tensor, other)
        backend.send(said, other)

    if backend.rank == 0:
        return {"phalanx": send, "socket": send_bare}
    return {"phalanx": receive, "socket": receive_bare}


def measure(backend: Backend, sizes: list[int], rounds: int) -> list[dict[str, float]]:
    """One rank's part: medians in seconds, for each size and way; every message is checked."""
    torch.set_num_threads(1)
    rows = []
    with bare_socket(backend) as sock:
        for size in sizes:
            tensor = torch.empty(size, dtype=torch.uint8)
            messages = messages_in_a_round(size)
            seconds: dict[str, list[float]] = {"phalanx": [], "socket": []}
            for number in range(rounds + 1):  # the first round warms up
                for name, carry in ways(backend, sock, tensor).items():
                    tensor.fill_(number % 100 + 1 if backend.rank == 0 else 0)
                    backend.barrier()
                    began = perf_counter()
                    for _ in range(messages):
                        carry()
                    elapsed = (perf_counter() - began) / messages
                    if not bool((tensor == number % 100 + 1).all()):
                        raise AssertionError(f"{name}: {size} bytes did not come as they were sent")
                    if number:
                        seconds[name].append(elapsed)
            row = {"bytes": float(size)}
            for name, values in seconds.items():
                row[name] = statistics.median(values)
                row[name + "_low"], row[name + "_high"] = min(values), max(values)
            rows.append(row)
    return rows


def benchmark_rank(backend: Backend) -> list[dict[str, float]]:
    """What each spawned process runs; its options come through the environment."""
    options = json.loads(os.environ["PHALANX_BENCHMARK"])
    return measure(backend, options["sizes"], options["rounds"])


def show(rows: list[dict[str, float]], console: Console) -> None:
    """The table."""
    table = Table(title="send and recv; median us of a message, with its answer (lowest-highest)")
    for heading in ("bytes", "phalanx tcp", "socket", "socket / phalanx", "GB/s"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            f"{int(row['bytes']):,}",
            *(
                f"{row[name] * 1e6:,.0f} ({row[name + '_low'] * 1e6:,.0f}"
                f"-{row[name + '_high'] * 1e6:,.0f})"
                for name in ("phalanx", "socket")
            ),
            f"{row['socket'] / row['phalanx']:.2f}",
            f"{row['bytes'] / row['phalanx'] / 1e9:.2f}",
        )
    console.print(table)


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default=DEFAULT_SIZES, help="bytes, such as 64K,16M")
    parser.add_argument("--rounds", type=int, default=11, help="rounds that count")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    options = parser.parse_args()
    sizes = [parse_size(text) for text in options.sizes.split(",")]
    os.environ["PHALANX_BENCHMARK"] = json.dumps({"sizes": sizes, "rounds": options.rounds})
    rows = phalanx.spawn(benchmark_rank, 2, "tcp")[0]
    show(rows, Console(width=max(WIDTH, Console().width)))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
