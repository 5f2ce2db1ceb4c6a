"""What a column of the table is: something that a program does with a wrapped model.

A feature has methods for the points of the program where it does something else (`job.Job`), on
ranks and in one process alike. `lacks` says why there is nothing to ask of a way to split a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from expected import torch_refuses
from job import Job
from torch import nn
from wrappers import Way

Inner = Callable[..., Any]
PIPELINE = "a pipeline calls its layers, and goes back, by itself"
NO_DATA = "no rank has a part of a batch for itself"
BY_ITSELF = "ranks train by themselves between two syncs"


class Feature:
    """What a program does beside the plainest one.

    tolerance   relative and absolute, of what is compared; 1e-9 where arithmetic is exact
    joined      one process computes the joined batch at once, and not part by part
    rounds      what is compared may be off by 4 times as much as the rounding of this feature
                moves what one process comes to
    of_change   if not 0: what is compared may be off by this share of what training has changed
    fails       it ends in an error: one rank's own, and one on the others that names that rank
    traced      ranks write traces
    free        ranks have threads of their own, which `phalanx.simulate` does not let wait
    tags        features with one in common do not fit together; nor does one `against` a tag
    slow        takes seconds
    """

    name: str = ""
    section: str = ""
    tolerance: ClassVar[tuple[float, float]] = (1e-9, 1e-10)
    rounds: ClassVar[bool] = False
    of_change: ClassVar[float] = 0.0
    joined: ClassVar[bool] = False
    fails: ClassVar[bool] = False
    traced: ClassVar[bool] = False
    free: ClassVar[bool] = False
    slow: ClassVar[bool] = False
    tags: frozenset[str] = frozenset()
    against: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return self.name

    def lacks(self, way: Way) -> str:
        """Why there is nothing to ask of this way; "" if there is."""
        return ""

    def prepare(self, job: Job) -> None:
        """Before the model is built."""

    def layers(self, job: Job, layers: dict[str, nn.Module]) -> None:
        """Add layers to the model, or change some."""

    def training(self, job: Job) -> Any:
        """A context around all steps."""
        return nothing()

    def has_batch(self, job: Job, part: int) -> bool:
        """Whether a part has a batch in this step."""
        return True


@contextmanager
def nothing() -> Iterator[None]:
    yield


FEATURES: list[Feature] = []


def feature(name: str, section: str, *, tags: str = "", against: str = "") -> Callable[[Any], Any]:
    """Put a feature into the table; of a class with arguments, call it for each row."""

    def put(kind: Any) -> Any:
        one = kind()
        one.name, one.section = name, section
        one.tags, one.against = frozenset(tags.split()), frozenset(against.split())
        FEATURES.append(one)
        return kind

    return put


def fits(one: Feature, other: Feature) -> bool:
    """Whether a program can do both."""
    if one is other or one.tags & other.tags or torch_refuses((one, other)):
        return False
    return not (one.against & other.tags or other.against & one.tags)
