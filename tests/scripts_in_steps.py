"""Pages about a script that changes in steps: its diffs, its commands, and what these print.

runs_of(page)[command]            what the page says that a command prints
difference(before, after)         the lines that change from one script to the next
picture_of_ranks(trained, 2, 8)   what each rank has
"""

from __future__ import annotations

import ast
import difflib
import re
import shlex
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from documents import ROOT
from forms import LONG
from processes import run_job, run_python
from torch import Tensor, nn

import phalanx

PROMPT = r"^```console\n([^\n]+)\n```\n\n```text\n(.*?)^```"
EPOCH = re.compile(r"epoch (\d+)  loss (\d\.\d{3})  (?:held-out|accuracy) (\d\.\d{3})")

History = list[tuple[float, float]]


def runs_of(page: str) -> dict[str, str]:
    """What each command of a page prints."""
    return dict(re.findall(PROMPT, page, flags=re.DOTALL | re.MULTILINE))


def same(found: History, expected: History) -> bool:
    return torch.tensor(found).shape == torch.tensor(expected).shape and torch.allclose(
        torch.tensor(found), torch.tensor(expected), rtol=1e-8, atol=0
    )


def code(step: ModuleType) -> list[str]:
    """The lines of a script after its docstring, which says how it is called."""
    source = Path(step.__file__ or "").read_text()
    return source.splitlines()[ast.parse(source).body[1].lineno - 1 :]


def difference(before: ModuleType, after: ModuleType) -> str:
    """What changes from one script to the next, with a line around it and ... between places."""
    lines = [*difflib.unified_diff(code(before), code(after), n=1, lineterm="")][3:]
    return "".join(f"{' ...' if line.startswith('@@') else line.rstrip()}\n" for line in lines)


def words_of(command: str) -> tuple[int, list[str]]:
    """The number of ranks, and the script with its arguments."""
    match shlex.split(command):
        case ["python", *words]:
            ranks = 1
        case ["phalanx", "run", "-n", number, *words]:
            ranks = int(number)
        case _:
            raise AssertionError(command)
    return ranks, [str(ROOT / words[0]), *words[1:]]


def epochs(output: str) -> list[tuple[float, ...]]:
    return [tuple(map(float, found)) for found in EPOCH.findall(output)]


def assert_shown(output: str, shown: str) -> None:
    """The page has the last lines; their numbers may differ by rounding in single precision."""
    lines = epochs(shown)
    assert lines
    assert [line[0] for line in epochs(output)][-len(lines) :] == [line[0] for line in lines]
    for found, line in zip(epochs(output)[-len(lines) :], lines, strict=True):
        assert found == pytest.approx(line, abs=0.01), output


def run_command(command: str, folder: Path) -> list[subprocess.CompletedProcess[str]]:
    """Run a command of a page, on all its ranks, without an error."""
    ranks, words = words_of(command)
    if command.startswith("python"):
        done = [run_python(words, folder=folder)]
    else:
        done = run_job(words, ranks, folder=folder)
    assert [each.returncode for each in done] == [0] * ranks, done
    return done


def assert_prints(command: str, runs: dict[str, str], folder: Path) -> None:
    """A command prints what the page says, on its first rank.

    One that ends as another one before it is run for one epoch in the short form: its numbers are
    compared, in double precision, by the tests of the scripts.
    """
    shown = runs[command]
    before = [*runs.values()][: [*runs].index(command)]
    again = not LONG and any(
        epochs(other)[-1] == pytest.approx(epochs(shown)[-1], abs=0.01) for other in before
    )
    first, *others = run_command(command + " --epochs 1" * again, folder)
    assert not any(epochs(each.stdout) for each in others)
    if again:
        assert [line[0] for line in epochs(first.stdout)] == [0]
    else:
        assert_shown(first.stdout, shown)


# Pictures ---------------------------------------------------------------------------------------

Held = dict[str, tuple[int, int]]
"""The elements of each kind that a rank has, and how many there are."""


def picture_of_ranks(trained: Callable[[phalanx.Backend], Held], ranks: int, marks: int) -> str:
    """Draw what each rank has after `trained`.

             parameters   optimizer
    rank 0   ###...       ###...
    rank 1   ...###       ...###
    """
    held = phalanx.simulate(trained, ranks)
    rows = ["".ljust(9) + "".join(kind.ljust(len(kind) + 3) for kind in held[0])]
    for rank, own in enumerate(held):
        row = f"rank {rank}   "
        for kind, (has, every) in own.items():
            before = sum(round(marks * held[earlier][kind][0] / every) for earlier in range(rank))
            part = "." * before + "#" * round(marks * has / every)
            row += (part.ljust(marks, ".") if has < every else "#" * marks).ljust(len(kind) + 3)
        rows.append(row)
    return "".join(f" {row.rstrip()}\n" for row in rows)


def elements(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def held_by(model: nn.Module, optimizer: torch.optim.Optimizer, every: int, states: int) -> Held:
    """What this rank has of `every` parameter, its gradient, and its `states` in the optimizer."""
    own = list(model.parameters())
    state = [t for each in optimizer.state.values() for t in each.values() if t.dim()]
    return {
        "parameters": (elements(own), every),
        "gradients": (elements(p.grad for p in own if p.grad is not None), every),
        "optimizer": (elements(state), states * every),
    }
