"""Processes of the tests are forks of one server, which has imported what takes seconds."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

PRELOADED = (
    "pytest",
    "phalanx.backends",
    "phalanx.checkpoint",
    "phalanx.fsdp",
    "phalanx.torch_backend.creation",
    "torch._dynamo",  # which the first optimizer of a process imports
    "torch.distributed.fsdp",
)


def fork_server() -> ForkServerContext:
    """The context whose server all tests of this process share, whichever asks first."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED])
    return context
