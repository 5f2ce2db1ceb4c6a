"""How fast `all_reduce` over TCP is beside Gloo: `python benchmarks/all_reduce.py --help`.

Both libraries run in the same processes, in interleaved rounds, so that what the machine does
besides meets both alike. A round is some calls in a row; a size's figure is the median of its
rounds. Every result is checked.
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
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import phalanx
from phalanx import Backend

DEFAULT_SIZES = "8,1K,4K,64K,1M,16M,64M"
WIDTH = 100  # columns that the table needs, also when it goes to a file
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_size(text: str) -> int:
    """`"64K"` -> 65536."""
    unit = UNITS.get(text[-1:].upper(), 1)
    return int(text[:-1] if unit > 1 else text) * unit


def calls_in_a_round(count: int) -> int:
    """Enough that a round of small messages can be timed, few enough that large ones end."""
    return max(1, min(100, (4 << 20) // count))


def measure(backend: Backend, sizes: list[int], rounds: int, port: int) -> list[dict[str, float]]:
    """One rank's part: medians in seconds, for each size and library."""
    torch.set_num_threads(1)
    rank, world_size = backend.rank, backend.world_size
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size
    )
    libraries: dict[str, Callable[[torch.Tensor], object]] = {
        "phalanx": lambda tensor: phalanx.all_reduce_(tensor, backend),
        "gloo": dist.all_reduce,
    }
    rows = []
    for size in sizes:
        tensor = torch.empty(max(1, size // 4))
        calls = calls_in_a_round(size)
        seconds: dict[str, list[float]] = {name: [] for name in libraries}
        for number in range(rounds + 1):  # the first round warms up
            for name, all_reduce in libraries.items():
                tensor.fill_(1.0)
                backend.barrier()
                began = perf_counter()
                for _ in range(calls):
                    all_reduce(tensor)
                elapsed = (perf_counter() - began) / calls
                expected = float(world_size) ** calls
                if expected < 2**24 and not bool((tensor == expected).all()):
                    raise AssertionError(f"{name} summed {size} bytes wrongly")
                if number:
                    seconds[name].append(elapsed)
        row = {"bytes": float(size), "ranks": float(world_size)}
        for name, values in seconds.items():
            row[name] = statistics.median(values)
            row[name + "_low"], row[name + "_high"] = min(values), max(values)
        rows.append(row)
    dist.destroy_process_group()
    return rows


def benchmark_rank(backend: Backend) -> list[dict[str, float]]:
    """What each spawned process runs; its options come through the environment."""
    options = json.loads(os.environ["PHALANX_BENCHMARK"])
    return measure(backend, options["sizes"], options["rounds"], options["port"])


def show(rows: list[dict[str, float]], console: Console) -> None:
    """The table."""
    table = Table(title="all_reduce, float32 sum, in place; median us of a call (lowest-highest)")
    for heading in ("ranks", "bytes", "phalanx tcp", "gloo", "gloo / phalanx", "bus GB/s"):
        table.add_column(heading, justify="right")
    for row in rows:
        ranks = int(row["ranks"])
        bus = 2 * (ranks - 1) / ranks * row["bytes"] / row["phalanx"] / 1e9
        table.add_row(
            str(ranks),
            f"{int(row['bytes']):,}",
            *(
                f"{row[name] * 1e6:,.0f} ({row[name + '_low'] * 1e6:,.0f}"
                f"-{row[name + '_high'] * 1e6:,.0f})"
                for name in ("phalanx", "gloo")
            ),
            f"{row['gloo'] / row['phalanx']:.2f}",
            f"{bus:.2f}",
        )
    console.print(table)


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="2", help="numbers of ranks, such as 2,4")
    parser.add_argument("--sizes", default=DEFAULT_SIZES, help="bytes, such as 8,64K,16M")
    parser.add_argument("--rounds", type=int, default=11, help="rounds that count")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    options = parser.parse_args()
    sizes = [parse_size(text) for text in options.sizes.split(",")]
    rows: list[dict[str, float]] = []
    for ranks in (int(text) for text in options.ranks.split(",")):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        os.environ["PHALANX_BENCHMARK"] = json.dumps(
            {"sizes": sizes, "rounds": options.rounds, "port": port}
        )
        rows += phalanx.spawn(benchmark_rank, ranks, "tcp")[0]
    show(rows, Console(width=max(WIDTH, Console().width)))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
