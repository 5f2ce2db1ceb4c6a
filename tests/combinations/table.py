"""What goes together, tried out: every wrapper with every feature, and with every two of them.

    run.py                        all of it
    run.py --pairs --backend shm  each wrapper with each feature, there
    run.py --only DDP --features no_sync,Adam
    run.py --pairs --write-docs   and write the table of docs/combinations.md
    run.py --faults               planted faults: are they found?

The exit code is 0 if each cell is right, or refused as `expected.py` says.
"""

from __future__ import annotations

import argparse
import logging
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from time import monotonic

import torch
from cells import RIGHT, WRONG, Verdict
from covering import Cell, pairs, triples
from faults import FAULTS
from feature import Feature
from features import FEATURES
from page import PAGE, write_page
from places import Place, place_of
from wrappers import BY_NAME, WAYS, Way

PLACES = ["simulated", "shm", "tcp"]
EVERY = 120  # seconds between lines that say how far it is, where there is no terminal


def smallest(
    place: Place, way: Way, chosen: tuple[Feature, ...], verdict: Verdict
) -> tuple[Feature, ...]:
    """Of a cell that is wrong, the fewest features that are; not of one that has no end."""
    if verdict.words.startswith("TimeoutError"):
        return chosen
    for count in (1, 2):
        for some in combinations(chosen, count):
            if len(some) < len(chosen) and place.run(way, some).status == WRONG:
                return some
    return chosen


def run(place: Place, cells: Sequence[Cell], what: str, *, verbose: bool) -> dict[Cell, Verdict]:
    """Run cells in one place; print those that are wrong, and how many are not."""
    began = told = monotonic()
    found: dict[Cell, Verdict] = {}
    known: set[Cell] = set()
    for done, (way, chosen) in enumerate(cells):
        since = monotonic()
        if sys.stdout.isatty():
            _say(f"{place.name}: {done} of {len(cells)} {what}", end="")
        elif since > told + EVERY:
            _say(f"{place.name}: {done} of {len(cells)} {what} after {since - began:.0f} s")
            told = since
        verdict = found[way, chosen] = place.run(way, chosen)
        names = " x ".join([way.name, *map(str, chosen)])
        if verdict.status == WRONG and len(chosen) > 1:
            fewer = smallest(place, way, chosen, verdict)
            if (way, fewer) in known:
                continue
            known.add((way, fewer))
            if fewer != chosen:
                names = " x ".join([way.name, *map(str, fewer)]) + f"  (found in {names})"
                verdict = place.run(way, fewer)
        if verdict.status == WRONG or verbose:
            took = monotonic() - since
            _say(f"{place.name}: {names}: {verdict.status} {verdict.words[:400]} ({took:.2f} s)")
    right = sum(verdict.status != WRONG for verdict in found.values())
    took = monotonic() - began
    _say(f"{place.name}: {right} of {len(found)} {what} right or refused, {took:.0f} s")
    return found


def _say(text: str, end: str = "\n") -> None:
    """Print it; in a terminal in the place of how far the cells have come."""
    erase = "\r\033[K" if sys.stdout.isatty() else ""
    print(erase + text, end=end, flush=True)


def find_faults() -> int:
    """Plant each fault, and run the cell that is to find it; 0 if all are found."""
    place, found = place_of("simulated"), 0
    by_name = {one.name: one for one in FEATURES}
    for fault in FAULTS:
        cell = BY_NAME[fault.way], (by_name[fault.feature],)
        without = place.run(*cell)
        with fault.planted():
            planted = place.run(*cell)
        is_found = without.status == RIGHT and planted.status == WRONG
        found += is_found
        said = planted.words[:120] if is_found else f"NOT FOUND {without} {planted}"
        print(f"{fault.name}: {fault.way} x {fault.feature}: {said}", flush=True)
    print(f"{found} of {len(FAULTS)} planted faults found")
    return int(found < len(FAULTS))


def main() -> int:
    """Run what is asked for; 0 if nothing is wrong."""
    options = _options()
    torch.set_num_threads(1)
    torch._logging.set_logs(dynamo=logging.ERROR)  # not where each of the models is recompiled
    if options.faults:
        return find_faults()
    names = options.backend or PLACES
    results = {names[0]: _run_in(names[0], options)} if len(names) == 1 else _at_once(names)
    if options.results:
        Path(options.results).write_bytes(pickle.dumps(_by_name(results[names[0]])))
    if options.write_docs:
        write_page(results)
    if not any(results.values()) and not options.results:
        print("no cell was run: the wrappers lack these features, or no two of them fit together")
        return 2
    return int(any(v.status == WRONG for found in results.values() for v in found.values()))


def _run_in(name: str, options: argparse.Namespace) -> dict[Cell, Verdict]:
    """Run what is asked for in one place."""
    ways = [way for way in WAYS if way.name in options.only]
    features = [one for one in FEATURES if one.name in options.features]
    features = [one for one in features if not (options.fast and one.slow)]
    both = not options.pairs and not options.triples
    part, parts = options.part
    place, found = place_of(name), {}
    try:
        if options.pairs or both:
            cells = list(pairs(ways, features))[part::parts]
            found |= run(place, cells, "pairs", verbose=options.verbose)
        if options.triples or both:
            wrong = {(way, one[0]) for (way, one), v in found.items() if v.status == WRONG}
            sets = list(triples(ways, features, options.width, options.seed, wrong))
            if name != "simulated":  # half of them each, of those that do not take seconds
                quick = [cell for cell in sets if not any(one.slow for one in cell[1])]
                sets = quick[PLACES.index(name) - 1 :: 2]
            sets = sets[part::parts]
            found |= run(place, sets, "sets of features", verbose=options.verbose)
    finally:
        place.close()
    return found


def _at_once(names: Sequence[str]) -> dict[str, dict[Cell, Verdict]]:
    """The same command in each place, as a process for each; as two for simulated ranks, which are
    on one processor and take most of the time.
    """
    features = {one.name: one for one in FEATURES}
    shares = [(name, n, 2) for name in names if name == "simulated" for n in range(2)]
    shares += [(name, 0, 1) for name in names if name != "simulated"]
    found: dict[str, dict[Cell, Verdict]] = {name: {} for name in names}
    with tempfile.TemporaryDirectory() as folder:
        given = [word for word in sys.argv[1:] if word not in ("--write-docs", *names, "--backend")]
        begun = []
        for name, part, parts in shares:
            file = Path(folder, f"{name}-{part}")
            words = ["--backend", name, "--part", str(part), str(parts), "--results", str(file)]
            process = subprocess.Popen([sys.executable, sys.argv[0], *given, *words])
            begun.append((process, name, file))
        for process, name, file in begun:
            process.wait()
            found[name] |= {
                (BY_NAME[way], tuple(features[one] for one in chosen)): verdict
                for way, chosen, verdict in pickle.loads(file.read_bytes())
            }
    return found


def _by_name(found: dict[Cell, Verdict]) -> list[tuple[str, list[str], Verdict]]:
    return [(way.name, [one.name for one in some], v) for (way, some), v in found.items()]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", action="store_true", help="each wrapper with each feature")
    parser.add_argument("--triples", action="store_true", help="each wrapper with every two")
    parser.add_argument("--backend", action="append", choices=PLACES, help="only there")
    parser.add_argument("--only", default="", help="these wrappers, with commas between them")
    parser.add_argument("--features", default="", help="these features, with commas between them")
    parser.add_argument("--width", type=int, default=5, help="features in a set (default 5)")
    parser.add_argument("--seed", type=int, default=0, help="of the sets")
    parser.add_argument("--faults", action="store_true", help="plant faults: are they found?")
    parser.add_argument("--write-docs", action="store_true", help=f"write the table of {PAGE.name}")
    parser.add_argument("--fast", action="store_true", help="without features that take seconds")
    parser.add_argument("--results", default="", help=argparse.SUPPRESS)
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), help=argparse.SUPPRESS)
    parser.add_argument("--verbose", action="store_true", help="print each cell")
    options = parser.parse_args()
    options.only = names_in(parser, "--only", options.only, [way.name for way in WAYS])
    options.features = names_in(parser, "--features", options.features, [f.name for f in FEATURES])
    return options


def names_in(
    parser: argparse.ArgumentParser, option: str, given: str, known: Sequence[str]
) -> list[str]:
    """The names in an option, of which some have commas themselves; all if there are none."""
    found: list[str] = []
    left = given.strip()
    while left:
        fitting = [name for name in known if f"{left},".startswith(f"{name},")]
        if not fitting:
            parser.error(f"{option}: nothing is named {left!r}; there is: {'; '.join(known)}")
        found.append(max(fitting, key=len))
        left = left.removeprefix(found[-1]).removeprefix(",").strip()
    return found or list(known)
