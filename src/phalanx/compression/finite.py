"""Whether values are finite, at the speed of memory."""

from __future__ import annotations

import torch
from torch import Tensor


def is_finite(values: Tensor) -> bool:
    """Whether all are. Their sum tells, unless it is too large itself. Waits for the device."""
    dtype = torch.float32 if values.dtype in (torch.float16, torch.bfloat16) else None
    if values.numel() == 0 or values.sum(dtype=dtype).isfinite():
        return True
    return bool(values.isfinite().all())
