"""What tests of memory in common share: taking it, and counting what is left of it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor

from phalanx import Backend

having_memory = pytest.mark.requires("memory")


def common(backend: Backend, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    memory = backend.common(count, dtype)
    assert memory is not None
    return memory


def mappings(size: int) -> int:
    """How often memory without a name and of this size is mapped by this process."""
    found = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:phalanx" in line:
            start, stop = line.split()[0].split("-")
            found += int(stop, 16) - int(start, 16) == size
    return found


def files(size: int) -> int:
    """How many files of that kind this process has open."""
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # it was closed meanwhile
            named = "memfd:phalanx" in os.readlink(f"/proc/self/fd/{number}")
            found += named and os.fstat(int(number)).st_size == size
    return found
