"""The way of a training step through the package, counted and shown: `make main-path`.

Two ranks take warm DDP steps: two layers of 512 x 512, whose gradients are one bucket of 2 MiB.
Every entry of rank 0 into a function of the package is counted, from the forward pass until the
optimizer has stepped. The entry may be by any of its threads (`sys.setprofile` and
`threading.setprofile`):

- **functions**: how many different ones. A lambda, a comprehension and a generator expression
  belong to the function that they are written in.
- **files**: how many different ones these are in.
- **changes of file**: how often an entry is into another file than the entry before it, in the
  same thread. So often a reader who follows the way opens another file.
- **entries**: how many; calls, and resumptions of generators.

How long ranks wait for each other, and which of two threads moves bytes, differs from step to
step. So the least of a hundred steps is shown: the one with the fewest entries.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch
from gate_processes import variables_by_hand
from torch import nn

import phalanx

PACKAGE = str(Path(phalanx.__file__).parent) + os.sep
BACKENDS = ("tcp", "shm")
WARM, STEPS = 10, 100
WIDTH, BATCH = 512, 4  # two layers: 2 MiB of gradients, one bucket


class Entry(NamedTuple):
    """Into which function a thread has come."""

    thread: str
    file: str
    function: str
    depth: int  # how many entries of the package are below it on the stack


class Recorder:
    """Notes entries into the package while it is `on`; installed before any thread is started."""

    def __init__(self) -> None:
        self.on = False
        self.entries: list[Entry] = []
        threading.setprofile(self)
        sys.setprofile(self)

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """A profile function."""
        if not (self.on and event == "call"):
            return
        file, function = place(frame)
        if file and not function.endswith(">"):
            depth, below = 0, frame.f_back
            while below is not None:
                depth += bool(place(below)[0])
                below = below.f_back
            self.entries.append(Entry(threading.current_thread().name, file, function, depth))


def place(frame: FrameType) -> tuple[str, str]:
    """The file inside the package, and the function; without a file where it is another's."""
    code = frame.f_code
    inside = code.co_filename.startswith(PACKAGE)
    file = code.co_filename[len(PACKAGE) :].replace(os.sep, "/") if inside else ""
    return file, getattr(code, "co_qualname", code.co_name).replace(".<locals>", "")


class Figures(NamedTuple):
    """What is counted of a step."""

    functions: int
    files: int
    changes: int
    entries: int


def count(entries: Sequence[Entry]) -> Figures:
    """The figures of one step."""
    last: dict[str, str] = {}
    changes = 0
    for entry in entries:
        changes += last.get(entry.thread, entry.file) != entry.file
        last[entry.thread] = entry.file
    functions = {(entry.file, entry.function) for entry in entries}
    return Figures(len(functions), len({file for file, _ in functions}), changes, len(entries))


def least(steps: Sequence[Sequence[Entry]]) -> Sequence[Entry]:
    """The step with the fewest entries, and of these the one with the fewest changes of file."""
    return min(steps, key=lambda entries: (len(entries), count(entries).changes))


def way(entries: Sequence[Entry]) -> list[str]:
    """Each function where a thread first comes into it, further right the deeper it is then.

    parallel/ddp.py        DDP.forward
                             DDP.begin
    parallel/reducer.py        Reducer.begin
    """
    first: dict[tuple[str, str, str], int] = {}
    for entry in entries:
        first.setdefault(entry[:3], entry.depth)
    wide = max(len(file) for _, file, _ in first)
    lines = []
    for among in dict.fromkeys(thread for thread, _, _ in first):
        lines += ["", f"thread {among}"]
        before = ""
        for (thread, file, function), depth in first.items():
            if thread == among:
                shown = "" if file == before else file
                lines.append(f"{shown:{wide}}  {'  ' * depth}{function}")
                before = file
    return lines[1:]


def page(found: Mapping[str, Sequence[Entry]]) -> str:
    """The document."""
    figures = (f"| {name} | {' | '.join(map(str, count(one)))} |" for name, one in found.items())
    text = [
        *("# The main path, counted", "", str(__doc__).split("\n\n", 1)[1]),
        "| backend | functions | files | changes of file | entries |",
        *("|---|---:|---:|---:|---:|", *figures, ""),
        "Below is each function at the place at which a thread first enters it. The deeper that is",
        "in calls of the package, the further right it stands.",
    ]
    for backend, entries in found.items():
        text += ["", f"## {backend}", "", "```text", *way(entries), "```"]
    return "\n".join(text)


def trace(backend_name: str, variables: Mapping[str, str]) -> list[list[Entry]]:
    """One rank's part; what it has recorded of each step."""
    os.environ.update(variables)
    recorder = Recorder()
    torch.set_num_threads(1)
    steps = []
    with phalanx.init(backend_name) as backend:
        layers = nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)
        model = phalanx.DDP(nn.Sequential(*layers), backend)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        inputs = torch.ones(BATCH, WIDTH)
        for step in range(WARM + STEPS):
            optimizer.zero_grad()
            recorder.entries = []
            recorder.on = backend.rank == 0 and step >= WARM
            model(inputs).square().mean().backward()
            optimizer.step()
            recorder.on = False
            steps.append(recorder.entries)
    return steps[WARM:]


def least_over(backend: str) -> Sequence[Entry]:
    """The least step of rank 0 of two, which are fresh processes."""
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        ranks = [pool.submit(trace, backend, variables) for variables in variables_by_hand(2)]
        return least(ranks[0].result())


if __name__ == "__main__":
    print(page({backend: least_over(backend) for backend in BACKENDS}))
