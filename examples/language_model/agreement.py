"""What the ranks have to agree on before they train: that all can, and on what."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

import phalanx as px
from language_model.text import InputError


@contextmanager
def all_can(backend: px.Backend, *, hint: str = "") -> Iterator[None]:
    """What is done in here works on every rank, or all of them end and one says why.

    Every rank has to come here. Inside no rank waits for others, or what it does with them fails on
    all, as saving and loading a checkpoint do. The `hint` is for those.
    """
    problem: str = ""
    try:
        yield
    except InputError as error:
        problem = str(error)
    except px.CheckpointError as error:
        problem = f"{error}{hint and '; '}{hint}"
    failed = px.all_gather(torch.tensor([bool(problem)]), backend).nonzero()
    if len(failed) == 0:
        return
    if backend.rank == int(failed[0]):
        sys.stdout.flush()
        sys.stderr.write(f"error: {problem}\n")
        sys.stderr.flush()
    backend.barrier()  # the message is out before any rank ends
    raise SystemExit(2)


def gather_fingerprints(content: bytes, backend: px.Backend) -> list[int]:
    """A number for each rank's `content`: the same for the same bytes."""
    digest = hashlib.blake2b(content, digest_size=7).digest()
    return px.all_gather(torch.tensor([int.from_bytes(digest, "little")]), backend).tolist()


def check_same_text(fingerprints: list[int]) -> None:
    """`InputError` unless all ranks have read the same."""
    for rank, fingerprint in enumerate(fingerprints):
        if fingerprint != fingerprints[0]:
            raise InputError(f"rank {rank} has read another text than rank 0: give all the same")
