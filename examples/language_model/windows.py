"""Windows of text: which are trained on, which are held out, and which rank sees which, when.

text      |  chunk 0  |  chunk 1  | ... |  chunk 5  | ...        50 chunks; every tenth
           train       train             held out                is never trained on
window    [ context + 1 bytes ]   inputs: all but the last; targets: all but the first

epoch     a permutation of all training windows, from the seed and the epoch's number
step      [ rank 0's | rank 1's | rank 2's ]   the next batch x ranks of them
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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


@dataclass(frozen=True)
class Sampler:
    """Which windows a rank trains on at a step. It keeps no state: a resumed run just goes on.

    In an epoch no window comes twice, on any rank; the few that do not fill a step are left out,
    others each time. What all ranks together see at a step depends on batch_size x world_size
    only: two ranks see what one does with twice the batch.
    """

    windows: int
    batch_size: int
    rank: int
    world_size: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """How often every rank gets a whole batch before all windows are used up."""
        return self.windows // (self.batch_size * self.world_size)

    def numbers(self, step: int) -> Tensor:
        """The numbers of this rank's windows at a step, counted from 0: [batch_size]."""
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        first = (step_in_epoch * self.world_size + self.rank) * self.batch_size
        return self._order(epoch)[first : first + self.batch_size]

    def check(self) -> None:
        """`InputError` if there are too few windows for a single step."""
        if self.steps_per_epoch < 1:
            raise InputError(
                f"the text has {self.windows} windows to train on, and a step takes "
                f"{self.batch_size} on each of {self.world_size} ranks: give more text, or a "
                "smaller --batch-size or --context"
            )

    def _order(self, epoch: int) -> Tensor:
        """The same on every rank."""
        random = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        return torch.randperm(self.windows, generator=random)
