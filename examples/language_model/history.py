"""What has been measured in a run: a point for each step, and for each held-out loss."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class TrainPoint:
    """One step of training, over all ranks."""

    step: int  # how many are done, this one among them
    loss: float  # nats a byte, mean over the ranks
    learning_rate: float
    tokens_per_second: float  # of all ranks together
    communication: float  # the share of the step spent waiting for others, mean over the ranks


@dataclass(frozen=True)
class HeldOutPoint:
    """The loss on text that is never trained on, in nats a byte."""

    step: int
    loss: float

    @property
    def bits(self) -> float:
        """The same in bits a byte."""
        return self.loss / math.log(2)


@dataclass
class History:
    """All points of a run so far, and how long it has trained (held-out losses not counted)."""

    steps: list[TrainPoint] = field(default_factory=list)
    held_out: list[HeldOutPoint] = field(default_factory=list)
    seconds: float = 0.0

    def last(self, count: int) -> TrainPoint:
        """The last points as one: their mean, weighed by time where it is about time."""
        points = self.steps[-count:]
        seconds = [1 / point.tokens_per_second for point in points]  # up to a common factor
        waited = sum(p.communication * s for p, s in zip(points, seconds, strict=True))
        return TrainPoint(
            step=points[-1].step,
            loss=sum(point.loss for point in points) / len(points),
            learning_rate=points[-1].learning_rate,
            tokens_per_second=len(points) / sum(seconds),
            communication=waited / sum(seconds),
        )

    def as_json(self) -> dict[str, Any]:
        """Plain lists and dictionaries."""
        held_out = [{**asdict(point), "bits_per_byte": point.bits} for point in self.held_out]
        steps = [asdict(point) for point in self.steps]
        return {"seconds": self.seconds, "held_out": held_out, "steps": steps}

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> History:
        """What `as_json` was made from."""
        return cls(
            [TrainPoint(**point) for point in plain["steps"]],
            [HeldOutPoint(point["step"], point["loss"]) for point in plain["held_out"]],
            plain["seconds"],
        )


def write_log(path: Path, run: dict[str, Any], history: History) -> None:
    """What the run was, and all points, as JSON. A reader never sees half a file."""
    points = history.as_json()
    final = {"seconds": points.pop("seconds")}
    if history.held_out:
        final["held_out_before"] = history.held_out[0].loss
        final["held_out_after"] = history.held_out[-1].loss
    if history.steps:
        whole = history.last(len(history.steps))
        final["tokens_per_second"] = whole.tokens_per_second
        final["communication"] = whole.communication
    replace_file(path, json.dumps({**run, "final": final, **points}, indent=1).encode())


def replace_file(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, whenever this process ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".unfinished")
    with unfinished.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)
