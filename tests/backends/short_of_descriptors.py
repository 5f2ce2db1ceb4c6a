"""A program: rank 0 of three, in a process that has few file descriptors left.

    PHALANX_TOKEN=... python short_of_descriptors.py SPARE

Prints its port, waits for a line, and meets the others with SPARE descriptors; then prints, as
JSON, the `sum` over the ranks or the error, and how often the acceptor `asked` for a caller.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import sys

import torch

import phalanx
from phalanx import TcpBackend


class Counting(socket.socket):
    """A listener that counts how often it is asked."""

    asked = 0

    def accept(self) -> tuple[socket.socket, object]:
        Counting.asked += 1
        return super().accept()


def main(spare: int) -> None:
    listener = Counting()
    listener.bind(("127.0.0.1", 0))
    listener.listen(4096)
    port = listener.getsockname()[1]
    print(port, flush=True)
    sys.stdin.readline()
    used = max(map(int, os.listdir("/proc/self/fd"))) + 1
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + spare, hard))
    total: object
    try:
        with TcpBackend(0, 3, f"127.0.0.1:{port}", timeout=20, listener=listener) as backend:
            total = phalanx.all_reduce(torch.ones(1), backend).item()
    except Exception as error:
        total = f"{type(error).__name__}: {error}"
    print(json.dumps({"sum": total, "asked": Counting.asked}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
