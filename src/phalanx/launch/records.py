"""The file in which a failed rank of `phalanx run` leaves its story, for its launcher to tell.

It is the error file of torch's elastic agent, in its format, with what `phalanx run` adds.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Record", "read_record", "write_record"]


@dataclass(frozen=True)
class Record:
    """What a rank says about its own failure."""

    summary: str
    """One line: the error, or the call that ended the rank."""
    traceback: str
    """The whole traceback as text; "" where it says no more than the summary."""
    follows: bool
    """Whether another rank's failure led to this one."""
    time: float
    """Seconds since the epoch."""


def write_record(path: str, *, summary: str, traceback: str, follows: bool) -> None:
    """Write the story of this rank, whole or not at all."""
    now = time.time()
    story = {
        "message": {
            "message": summary,
            "extraInfo": {"py_callstack": traceback or summary, "timestamp": str(int(now))},
        },
        "phalanx": {"traceback": traceback, "follows": follows, "time": now},
    }
    part = f"{path}.part"
    Path(part).write_text(json.dumps(story), encoding="utf-8")
    os.replace(part, path)


def read_record(path: str) -> Record | None:
    """Return the story in `path`, or None where no rank has left one that can be read."""
    try:
        story = json.loads(Path(path).read_text(encoding="utf-8"))
        added = story["phalanx"]
        return Record(
            summary=str(story["message"]["message"]),
            traceback=str(added["traceback"]),
            follows=bool(added["follows"]),
            time=float(added["time"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
