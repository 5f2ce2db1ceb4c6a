"""Logs scalars: scalars_program.py TO FIRST STEPS

The loss is the step plus the rank, plus 100 in a run that resumes; NaN on rank 1 in step 2.
"""

from __future__ import annotations

import math
import sys

import torch

import phalanx


def main(to: str, first: int, steps: int) -> None:
    with phalanx.init() as backend, phalanx.Scalars(backend, [to], every=1) as scalars:
        for step in range(first, steps):
            loss = torch.tensor(step + backend.rank + (100 if first else 0.0))
            scalars.log(step, loss=math.nan if step == 2 and backend.rank == 1 else loss)
        if backend.rank == 0:
            print("trained to step", steps)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
