"""What averages are short of, read from the keys of all ranks' own states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def lacking(states: Sequence[Mapping[str, Tensor]], sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """By parameter, float64, flat: whatever the strategy that the states were saved with.

    sizes   of the parameters, by name
    """
    total: dict[str, Tensor] = {}
    for state in states:
        for key, left in state.items():
            if not key.startswith("compression@"):
                continue
            whose, kind, name = key.split(".", 2)
            if kind not in ("residual", "owned"):
                continue
            copies = int(whose.split("/")[1].split("x")[0])
            start = 0
            while name not in sizes:  # a piece of it, or a piece of a piece
                span, name = name.split(".", 1)
                start += int(span.split("-")[0])
            whole = total.setdefault(name, torch.zeros(sizes[name], dtype=torch.float64))
            whole[start : start + len(left)] += left.double() / (copies if kind != "owned" else 1)
    return total
