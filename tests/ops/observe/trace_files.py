"""Traces as ranks write them, made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

EPOCH = 1_700_000_000_000_000.0  # microseconds


class Rank:
    """Writes a trace as the ranks do; times in microseconds after EPOCH."""

    def __init__(self, folder: Path, rank: int, *, of: int = 2, run: int = 0, host: str = "a"):
        self.path = folder / f"rank-{rank}-{100 * run + rank + 1}-0.json"
        self.rank = rank
        self.path.write_text("[\n")
        said = {"rank": rank, "world_size": of, "host": host, "started": EPOCH / 1e6 + run}
        self.line(ph="M", name="process_name", args={"name": f"rank {rank}"})
        self.line(ph="M", name="phalanx", args=said)

    def line(self, **event: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"pid": self.rank, "tid": 0, **event}) + ",\n")

    def did(self, sequence: int, at: float, *, for_: float = 10.0, **more: Any) -> None:
        args = {"sequence": sequence, "bytes": 1 << 20, "group": "world"}
        args |= {"waiting_us": 4.0, "moving_us": 6.0, **more.pop("args", {})}
        event = {"ph": "X", "name": "all_reduce", "cat": "collective", **more}
        self.line(ts=EPOCH + at, dur=for_, **event, args=args)
