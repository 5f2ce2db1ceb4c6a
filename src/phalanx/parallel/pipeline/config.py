"""`PipelineParallelConfig`: how a model is cut into a pipeline, and what its ranks do when."""

from __future__ import annotations

import msgspec

from .schedules import SCHEDULES

__all__ = ["PipelineParallelConfig"]

MOST_PASSES = 2**29  # for each there is a tag


class PipelineParallelConfig(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True
):
    """How a model is cut into a pipeline, and what its ranks do when. The same on every rank.

    num_stages         p, how many ranks share the layers: the world size of the pipeline's backend
    num_micro_batches  m, how many parts a batch is cut into. The bubble's share shrinks with it;
                       4 * num_stages is a good start
    schedule           `gpipe`, `1f1b` or `interleaved_1f1b`; `schedules.py` compares them
    num_chunks         v, how many runs of layers each rank has: for `interleaved_1f1b` 2 or more,
                       by default 2; for the others 1

    Raises ValueError, or TypeError for a number that is none.
    """

    num_stages: int
    num_micro_batches: int
    schedule: str = "1f1b"
    num_chunks: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_stages", "num_micro_batches", "num_chunks"):
            value = getattr(self, name)
            if value is None and name == "num_chunks":
                continue
            if type(value) is not int:
                raise TypeError(f"{name} has to be a whole number, not {value!r}")
            if value < 1:
                raise ValueError(f"{name} has to be 1 or more, not {value}")
        if self.schedule not in SCHEDULES:
            known = ", ".join(SCHEDULES)
            raise ValueError(f"there is no schedule {self.schedule!r}; there are {known}")
        interleaved = SCHEDULES[self.schedule].interleaved
        if interleaved and self.num_chunks == 1:
            raise ValueError("interleaved_1f1b needs 2 chunks or more; with 1 it is 1f1b")
        if not interleaved and self.num_chunks not in (None, 1):
            raise ValueError(
                f"{self.schedule} has 1 chunk on each rank, not {self.num_chunks}; "
                "interleaved_1f1b has more"
            )
        if self.chunks * self.num_stages * self.num_micro_batches > MOST_PASSES:
            raise ValueError(f"stages x chunks x micro-batches may be {MOST_PASSES:,} at most")

    @property
    def chunks(self) -> int:
        """How many runs of layers each rank has: `num_chunks`, or what the schedule makes of it."""
        return self.num_chunks or (2 if SCHEDULES[self.schedule].interleaved else 1)

    @property
    def bubble(self) -> float:
        """The share of the time in which ranks wait, in theory: (p-1) / (v m + p-1).

        For m >= p, with stages that take equally long and messages that take no time.
        """
        row = SCHEDULES[self.schedule]
        return row.bubble(self.num_stages, self.num_micro_batches, self.chunks)

    def to_json(self) -> str:
        """As JSON; what has its default is left out."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> PipelineParallelConfig:
        """From JSON. Raises ValueError for text that is none, and for what a config cannot be."""
        return msgspec.json.decode(text, type=cls)
