"""Small tensors and many ranks: threads inside torch's kernels would only wait for each other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread_a_rank() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True, scope="session")
def _torchs_compiler_is_imported() -> None:
    """The first optimizer does that, for seconds, in which its server answers nobody."""
    torch.optim.SGD([torch.zeros(1)], lr=1)
