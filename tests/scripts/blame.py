"""Who failed, in numbers: `python tests/scripts/blame.py [scenario ...] [--times N]`.

    kills        `kill -9` of one of 4 ranks at random moments: all name it within 1 s
    stops        SIGSTOP: known in 3 s; woken, it learns that it was given up; 1 s harms nothing
    silence      a rank that never calls: all name it at their deadline, by way of others, too
    ends         a rank that raises, exits, crashes, closes, returns early: named within 1 s
    partitions   hosts cut off, one way and both ways; lossy networks (needs root)
    holds        a rank that holds its interpreter on a busy machine: no alarm (remote: needs root)
    closes       close() beside a peer that takes nothing: bounded, and the others are told
    soak         minutes of training on a busy machine: no alarm

Each row says how often it went well, of how many times, and the seconds of the slowest. The exit
code is 0 if always.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from time import monotonic
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent / "multiprocess"))

import blame_closes as closes
import blame_ends as ends
import blame_kills as kills
import blame_partitions as partitions
import blame_silence as silence
import blame_stops as stops
from blame_cast import Verdict
from blame_traffic import TRAFFIC
from networks import Network, why_not
from ranks import KINDS, VARIABLE


class Row(NamedTuple):
    """One thing that may happen, and how often to try it: a share of `--times`."""

    name: str
    once: Callable[[int], Verdict]
    share: float
    needs_network: bool = False


def on_hosts(once: Callable[..., Verdict], hosts: int = 3) -> Callable[[int], Verdict]:
    """Each try gets a network of its own."""

    def with_network(seed: int) -> Verdict:
        with Network(hosts) as network:
            return once(seed, network=network)

    return with_network


def beside(burners: int, once: Callable[[int], Verdict]) -> Callable[[int], Verdict]:
    """Each try has so many busy processes beside it."""

    def on_a_busy_machine(seed: int) -> Verdict:
        with partitions.busy_machine(burners):
            return once(seed)

    return on_a_busy_machine


def rows_of_kills() -> Iterator[Row]:
    for name in TRAFFIC:
        yield Row(f"killed in {name}", partial(kills.kill_in, name), 0.1)
    yield Row("killed while closing", kills.kill_while_closing, 0.1)
    yield Row("killed while meeting", kills.kill_while_meeting, 0.1)
    yield Row("killed, and who hears of it dies, too", kills.kill_and_vanish, 0.1)
    yield Row("killed, and the others go on", kills.kill_and_go_on, 0.1)


def rows_of_stops() -> Iterator[Row]:
    for name in ("all_reduce", "between_calls", "unattended", "large", "subgroups"):
        yield Row(f"stopped in {name}", partial(stops.stop_in, name), 0.05)
    for name in ("all_reduce", "large"):
        far = on_hosts(partial(stops.stop_in, name, ranks=3))
        yield Row(f"stopped in {name}, another host", far, 0.05, True)
    shortly = partial(stops.stop_shortly, "all_reduce")
    yield Row("stopped for 1 s", shortly, 0.05)
    yield Row("stopped for 1 s, another host", on_hosts(shortly), 0.05, True)
    yield Row("all stopped for 5 s", stops.stop_everyone, 0.05)
    far = on_hosts(partial(stops.stop_everyone, ranks=3))
    yield Row("all stopped for 5 s, other hosts", far, 0.05, True)


def rows_of_silence() -> Iterator[Row]:
    for way in silence.WAYS:
        once = partial(silence.never_calls, way)
        yield Row(f"never calls ({way})", once, 0.05)
        holding = partial(once, holding=True)
        yield Row(f"never calls ({way}), holds the interpreter", holding, 0.05)


def rows_of_ends() -> Iterator[Row]:
    for name in ends.ENDS:
        yield Row(f"ends: {name}", partial(ends.end_by, name), 0.1)


def rows_of_partitions() -> Iterator[Row]:
    for direction in partitions.DIRECTIONS:
        for name in ("all_reduce", "between_calls", "large"):
            once = partial(partitions.cut_off, direction, name)
            yield Row(f"cut off {direction}, in {name}", once, 0.05, True)
        once = partial(partitions.cut_off, direction, "all_reduce", ranks=2)
        yield Row(f"cut off {direction}, 2 ranks", once, 0.05, True)
        for seconds in (0.5, 1.2):
            once = partial(partitions.cut_shortly, direction, "all_reduce", seconds=seconds)
            yield Row(f"cut off {direction} for {seconds:g} s", once, 0.05, True)
    between = partial(partitions.cut_between_two, "messages")
    yield Row("cut between two of three", between, 0.1, True)
    yield Row("10 % of packets lost, 10 s", partial(partitions.lose_some, "training"), 0.1, True)
    slow = partial(partitions.slow_down, "training")
    yield Row("20 Mbit/s, with 8 MiB a step, 10 s", slow, 0.02, True)
    full = partial(partitions.full_and_waiting, seconds=12.0)
    yield Row("waits, and is sent more than it keeps", full, 0.02, True)


def rows_of_holds() -> Iterator[Row]:
    hold = partial(stops.hold_in, "training")
    for burners in (0, 2, 4):
        far = beside(burners, on_hosts(partial(hold, seconds=2.0, ranks=3)))
        yield Row(f"holds for 2 s, another host, {burners} burners", far, 0.2, True)
    far = beside(2, on_hosts(partial(hold, seconds=6.0, ranks=3, how="compute")))
    yield Row("computes for 6 s, another host, 2 burners", far, 0.05, True)
    near = beside(2, partial(hold, seconds=8.0))
    yield Row("holds for 8 s, one host, 2 burners", near, 0.05)


def rows_of_closes() -> Iterator[Row]:
    for trouble in ("busy", "stopped", "cut off"):
        once = partial(closes.close_beside, trouble)
        yield Row(f"closes beside one that is {trouble}", once, 0.05, trouble == "cut off")


def rows_of_soak(minutes: float) -> Iterator[Row]:
    train = partial(stops.train_for, 60 * minutes)
    name = f"{minutes:g} min of training, 4 burners"
    yield Row(name, beside(4, train), 0.01)
    yield Row(f"{name}, 4 hosts", beside(4, on_hosts(train, 4)), 0.01, True)


def repeat(row: Row, times: int, first_seed: int) -> bool:
    """Try a row so many times, and say how it went."""
    good, worst = 0, 0.0
    for seed in range(first_seed, first_seed + times):
        if sys.stdout.isatty():
            print(f"{row.name:55} {seed - first_seed} of {times} ...", end="\r", flush=True)
        try:
            wrong, seconds = row.once(seed)
        except AssertionError as error:
            wrong, seconds = str(error), 0.0
        good += not wrong
        worst = max(worst, seconds)
        if wrong:
            print(f"    {row.name}, seed {seed}: {wrong}", flush=True)
    print(f"{row.name:55} {good} of {times}   worst {worst:.2f} s", flush=True)
    return good == times


def main() -> int:
    tables: dict[str, Callable[[], Iterator[Row]]] = {
        "kills": rows_of_kills,
        "stops": rows_of_stops,
        "silence": rows_of_silence,
        "ends": rows_of_ends,
        "partitions": rows_of_partitions,
        "holds": rows_of_holds,
        "closes": rows_of_closes,
        "soak": lambda: rows_of_soak(options.minutes),
    }
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("scenario", nargs="*", help=f"some of {', '.join(tables)}; default all")
    parser.add_argument("--times", type=int, default=100, help="tries; each row takes its share")
    parser.add_argument("--seed", type=int, default=0, help="of the first try")
    parser.add_argument("--backend", choices=KINDS, default="tcp", help="of the ranks")
    parser.add_argument("--only", default="", help="rows whose name has this in it")
    parser.add_argument("--minutes", type=float, default=5.0, help="of the soak")
    options = parser.parse_args()
    os.environ[VARIABLE] = options.backend
    unknown = set(options.scenario) - set(tables)
    if unknown:
        parser.error(f"no such scenario: {', '.join(sorted(unknown))}")
    began, well = monotonic(), []
    for name in options.scenario or tables:
        for row in tables[name]():
            if options.only not in row.name:
                continue
            reason = why_not() or ("one host only" if options.backend == "shm" else "")
            if row.needs_network and reason:
                print(f"{row.name:55} skipped: {reason}")
                continue
            well.append(repeat(row, max(1, round(options.times * row.share)), options.seed))
    print(f"{sum(well)} of {len(well)} rows, {monotonic() - began:.0f} s")
    return 0 if all(well) else 1


if __name__ == "__main__":
    sys.exit(main())
