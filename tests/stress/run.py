"""Thousands of random programs on every kind of backend: `python tests/stress/run.py --help`.

    python tests/stress/run.py                          everything; minutes
    python tests/stress/run.py --programs 50            the same in short
    python tests/stress/run.py --seed 123 --cluster tcp one program; prints it if it fails
    python tests/stress/run.py --seed 123 --show        what a seed's program is

A program that fails is printed with its seed, and made smaller for as long as it still fails. The
exit code is 0 if all results were right.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from time import monotonic

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "multiprocess"))

from stress_generate import generate
from stress_places import PLACES, PROCESSES, TIMEOUT, run, run_in_processes
from stress_program import Program
from stress_shrink import shrunk

BATCH = 100  # programs that one set of processes runs, one after the other
SHRINK_TIMEOUT = 3.0  # seconds, for each attempt to find a smaller program that fails


def main() -> int:
    """Run what is asked for; 0 if all results were right."""
    options = _options()
    seeds = _seeds(options)
    if options.show:
        for seed in seeds:
            print(generate(seed))
        return 0
    places = options.cluster or PLACES
    failed = [place for place in places if not _all_right(place, seeds)]  # all of them are tried
    return 1 if failed else 0


def _all_right(place: str, seeds: range) -> bool:
    """Run the programs of these seeds in one place. A line that grows, and then says how many."""
    began = monotonic()
    right = 0
    for done, program, error in _outcomes(place, seeds):
        if error is None or done < 0:
            right += done
        if error is not None:
            print(f"\n{place}: seed {program.seed} fails:")
            traceback.print_exception(error, file=sys.stdout)
            _explain(program, place)
        if sys.stdout.isatty():
            print(f"\r{place}: {right} of {len(seeds)} programs right", end="", flush=True)
    print(
        f"\r{place}: {right} of {len(seeds)} programs right, {monotonic() - began:.0f} s",
        flush=True,
    )
    return right == len(seeds)


def _outcomes(place: str, seeds: range) -> Iterator[tuple[int, Program, BaseException | None]]:
    """(how many programs, the last of them, what went wrong) for one program or batch at a time."""
    if place not in PROCESSES or len(seeds) == 1:
        for seed in seeds:
            program = generate(seed)
            yield 1, program, _error_of(lambda program=program: run(program, place))
        return
    by_size = sorted(map(generate, seeds), key=lambda program: program.size)
    for _, programs in groupby(by_size, key=lambda program: program.size):
        many = list(programs)
        for start in range(0, len(many), BATCH):
            batch = many[start : start + BATCH]
            failed = _error_of(lambda batch=batch: run_in_processes(batch, place))
            if failed is None:
                yield len(batch), batch[-1], None
                continue
            errors = []
            for program in batch:  # each alone, to know which
                errors.append(_error_of(lambda program=program: run_in_processes([program], place)))
                yield 1, program, errors[-1]
            if not any(errors):
                yield -len(batch), batch[-1], failed  # right alone, but not one after the other


def _error_of(call: object) -> BaseException | None:
    try:
        call()  # type: ignore[operator]
    except Exception as error:
        return error
    return None


def _explain(program: Program, place: str) -> None:
    """Print the program, as small as it can be made, and how to run it again."""

    def fails(smaller: Program) -> bool:
        return _error_of(lambda: run(smaller, place, timeout=SHRINK_TIMEOUT)) is not None

    smallest = shrunk(program, fails)
    if smallest is program:
        print("it does not fail every time, or cannot be made smaller; the whole program:")
    else:
        print("the smallest program found that still fails:")
    print(smallest)
    print(f"to run it again: python {sys.argv[0]} --seed {program.seed} --cluster {place}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Random programs on every kind of backend, compared with a plain reference.",
        epilog=f"Backends wait {TIMEOUT:g} seconds at most.",
    )
    parser.add_argument("--cluster", action="append", choices=PLACES, help="only there")
    parser.add_argument("--programs", type=int, default=1000, help="how many in each place")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--show", action="store_true", help="print the programs instead")
    return parser.parse_args()


def _seeds(options: argparse.Namespace) -> range:
    if options.seed is not None:
        return range(options.seed, options.seed + 1)
    return range(options.first, options.first + options.programs)


if __name__ == "__main__":
    sys.exit(main())
