"""Windows of text: which are trained on, which are held out, and which rank sees which, when.

text      |  chunk 0  |  chunk 1  | ... |  chunk 5  | ...        50 chunks; every tenth
           train       train             held out                is never trained on
window    [ context + 1 bytes ]   inputs: all but the last; targets: all but the first

step      [ rank 0's | rank 1's | rank 2's ]   the next batch x ranks of an epoch's order
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import phalanx as px
from language_model.text import InputError

CHUNKS = 50
HELD_OUT_EVERY = 10


@dataclass(frozen=True)
class Windows:
    """Some windows of a text: where each of them starts."""

    text: Tensor  # [bytes], uint8
    starts: Tensor  # [windows], int64
    context: int

    def __len__(self) -> int:
        return len(self.starts)

    def take(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """(inputs, targets) of the windows of these numbers: [len(numbers), context], int64."""
        places = self.starts[numbers].unsqueeze(1) + torch.arange(self.context + 1)
        rows = self.text[places].long()
        return rows[:, :-1], rows[:, 1:]


def split_text(content: bytes, context: int) -> tuple[Windows, Windows]:
    """The training and the held-out windows: of chunks of their own, so that none overlap.

    `InputError` if the text is too short for one window in each chunk.
    """
    chunk = len(content) // CHUNKS
    per_chunk = (chunk - 1) // context
    if per_chunk < 1:
        raise InputError(
            f"the text has {len(content):,} bytes, and a context of {context} needs at least "
            f"{CHUNKS * (context + 1):,}: give more text, or a smaller --context"
        )
    text = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    in_chunk = torch.arange(per_chunk) * context
    starts = torch.arange(CHUNKS).unsqueeze(1) * chunk + in_chunk
    held_out = torch.arange(CHUNKS) % HELD_OUT_EVERY == HELD_OUT_EVERY // 2
    return (
        Windows(text, starts[~held_out].flatten(), context),
        Windows(text, starts[held_out].flatten(), context),
    )


def make_sampler(windows: int, batch_size: int, seed: int, backend: px.Backend) -> px.BatchSampler:
    """Which windows a rank trains on: `batch_size` at each step. Every rank calls this.

    Windows that do not fill a step are left out of an epoch, others each time. What all ranks
    together see at a step depends on batch_size x ranks only: two ranks see what one does with
    twice the batch.
    """
    return px.BatchSampler(
        windows, backend, batch_size=batch_size, per_rank=True, drop_last=True, seed=seed
    )


def batches(windows: Windows, sampler: px.BatchSampler) -> Iterator[tuple[Tensor, Tensor]]:
    """(inputs, targets) of this rank, epoch after epoch, from the sampler's place on."""
    while True:
        for numbers in sampler.track(sampler):
            yield windows.take(torch.tensor(numbers))


def check_enough(windows: Windows, held_out: Windows, batch_size: int, ranks: int) -> None:
    """`InputError` if there are too few windows for a single step, or to look at."""
    if len(windows) < batch_size * ranks or len(held_out) < ranks:
        raise InputError(
            f"the text has {len(windows)} windows to train on and {len(held_out)} that are held "
            f"out, and a step takes {batch_size} on each of {ranks} ranks: give more text, or a "
            "smaller --batch-size or --context"
        )
