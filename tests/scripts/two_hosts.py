"""Algorithms side by side between hosts: `python tests/scripts/two_hosts.py --help`. Needs root.

Hosts are network namespaces on this machine, with some ranks each, and what each host sends is held
to a rate. Of each all_reduce: the median time of the slowest rank, and the bytes that
left the host that sent most, as the kernel counts them, over the tensor's. `due` is what the
schedule sends; headers, acknowledgements and two barriers come on top. `auto` is told the rate.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent.parent / "multiprocess"))

from hosts_apart import SharedHosts, measure
from networks import why_not

from phalanx import HybridBackend, TcpBackend
from phalanx.collectives.schedules import Send, row_for, schedule

UNITS = {"K": 1 << 10, "M": 1 << 20}
KINDS = {"tcp": TcpBackend, "hybrid": HybridBackend}
ALGORITHMS = ["ring", "direct", "tree", "halving_doubling", "star", "two_level"]


def parse_size(text: str) -> int:
    """`"64K"` -> 65536."""
    unit = UNITS.get(text[-1:].upper(), 1)
    return int(text[:-1] if unit > 1 else text) * unit


def due(algorithm: str, hosts: tuple[int, ...]) -> float:
    """The share of the tensor that leaves the host that sends most."""
    out: Counter[int] = Counter()
    for rank in range(len(hosts)):
        for steps in schedule("all_reduce", algorithm, rank, len(hosts), hosts=hosts):
            for step in steps:
                if isinstance(step, Send) and hosts[step.peer] != hosts[rank]:
                    out[hosts[rank]] += step.count
    return max(out.values()) / row_for("all_reduce", algorithm, hosts).chunks(len(hosts))


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="on each host")
    parser.add_argument("--backend", choices=KINDS, default="hybrid")
    parser.add_argument("--megabits", type=int, default=1000, help="a second; 0: not held back")
    parser.add_argument("--sizes", default="64K,256K,1M,4M,16M", help="bytes, such as 64K,16M")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count")
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS))
    options = parser.parse_args()
    if why_not():
        raise SystemExit(why_not())
    megabits = options.megabits or None
    names = [*options.algorithms.split(","), "auto"]
    console, kind = Console(width=110), KINDS[options.backend]
    rate = f"{megabits} Mbit/s" if megabits else "any rate"
    where = f"{options.hosts} hosts of {options.ranks} ranks, {rate} out of each"
    title = f"all_reduce over {options.backend}, float32: {where}"
    table = Table(title=title)
    for heading in ("bytes", "algorithm", "ms", "estimated ms", "left a host / bytes", "due"):
        table.add_column(heading, justify="right")
    for text in options.sizes.split(","):
        count = parse_size(text)
        with SharedHosts(options.hosts, options.ranks, megabits=megabits) as network:
            reports = measure(network, count, names, options.rounds, megabits, kind)
        hosts, _, choice = reports[0]
        for name in names:
            figures = [report[1][name] for report in reports]
            taken = choice.algorithm if name == "auto" else name
            table.add_row(
                text if name == names[0] else "",
                f"auto: {taken}" if name == "auto" else name,
                f"{max(each.seconds for each in figures) * 1e3:.2f}",
                f"{choice.estimates[taken] * 1e3:.2f}",
                f"{max(each.sent for each in figures) / count:.2f}",
                f"{due(taken, hosts):.2f}",
                end_section=name == "auto",
            )
    console.print(table)


if __name__ == "__main__":
    main()
