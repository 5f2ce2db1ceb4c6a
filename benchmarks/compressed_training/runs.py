"""What came of runs, and the file that keeps them: whole, whenever this process ends."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from language_model.history import replace_file


@dataclass(frozen=True)
class Run:
    """One training run. Losses are nats a byte, means over the ranks; bytes are those of one rank.

    row, what    the row's name, and how it trained (`str` of the row)
    steps        after how many steps it was looked at
    held_out     the losses then, on text that is never trained on
    bytes_sent   how many had been sent then, as what trains the model counts them
    training     the loss of each step
    seconds      a step's, median
    wire         bytes of the messages that the backend was given, from the third step on
    counted      the same bytes as what trains the model counts them
    identical    whether the ranks ended with the same bits
    """

    row: str
    what: str
    seed: int
    steps: list[int]
    held_out: list[float]
    bytes_sent: list[float]
    training: list[float]
    seconds: float
    wire: float
    counted: float
    identical: bool


class OtherRunsError(Exception):
    """The file has runs of another kind; the message says which, and what to do."""


@dataclass
class Runs:
    """Runs with the same settings."""

    settings: dict[str, Any]
    runs: list[Run] = field(default_factory=list)

    def find(self, row: str, what: str, seed: int) -> Run | None:
        """The run of that row and seed, if it was made in that way."""
        for run in self.runs:
            if (run.row, run.what, run.seed) == (row, what, seed):
                return run
        return None

    def put(self, run: Run) -> None:
        """Add a run, in the place of one of that row and seed that was made in another way."""
        self.runs = [r for r in self.runs if (r.row, r.seed) != (run.row, run.seed)] + [run]

    def of(self, row: str) -> list[Run]:
        """All runs of a row, by seed."""
        return sorted((run for run in self.runs if run.row == row), key=lambda run: run.seed)

    def save(self, path: Path) -> None:
        """Write them. A reader never sees half a file."""
        replace_file(path, json.dumps(asdict(self), indent=1).encode())

    @classmethod
    def load(cls, path: Path, settings: dict[str, Any]) -> Runs:
        """Those that a file has. `OtherRunsError` unless they have these settings."""
        plain = json.loads(path.read_text())
        theirs = plain["settings"]
        for name in sorted(settings.keys() | theirs.keys()):
            if settings.get(name) != theirs.get(name):
                raise OtherRunsError(
                    f"{path} has runs with {name} {theirs.get(name)!r}, not "
                    f"{settings.get(name)!r}: ask for the same, or write to another file"
                )
        return cls(theirs, [Run(**run) for run in plain["runs"]])
