"""What the tests of examples/train_language_model.py share: a tiny text, and tiny runs on it."""

from __future__ import annotations

from pathlib import Path

import torch
from language_model.history import History
from language_model.setup import Run
from train_language_model import run_on

import phalanx as px

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "train_language_model.py"
TINY = [
    "--layers=1",
    "--width=16",
    "--heads=2",
    "--context=16",
    "--sample-bytes=20",
    "--log-every=5",
]


def write_text(folder: Path, repeat: int = 60) -> Path:
    """A file of words that come again and again: easily learned."""
    path = folder / "text.txt"
    path.write_text("one two three four five six seven eight nine ten\n" * repeat)
    return path


def train_on(ranks: int, arguments: list[str]) -> list[Run]:
    """A whole run of the script on simulated ranks; what each of them ends with."""
    return px.simulate(lambda backend: run_on(backend, [*TINY, *arguments]), ranks)


def checkpoints(out: Path) -> list[str]:
    """The names of the checkpoints in the folder of a run, the oldest first."""
    return sorted(path.parent.name for path in (out / "checkpoints").glob("*/commit.json"))


def losses(history: History) -> list[float]:
    """The training loss of each step."""
    return [point.loss for point in history.steps]


def parameters(run: Run) -> torch.Tensor:
    """All parameters in one row."""
    return torch.cat([p.detach().flatten() for p in run.model.parameters()])
