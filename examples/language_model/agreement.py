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
def all_can(backend: px.Backend) -> Iterator[None]:
    """What is done in here works on every rank, or all of them end and one says why.

    Every rank has to come here. No rank waits for others inside.
    """
    problem: InputError | None = None
    try:
        yield
    except InputError as error:
        problem = error
    failed = px.all_gather(torch.tensor([problem is not None]), backend).nonzero()
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


def share_bytes(content: bytes, backend: px.Backend) -> bytes:
    """Rank 0's `content`, on every rank."""
    size = int(px.broadcast(torch.tensor([len(content)]), backend))
    if size == 0:
        return b""
    buffer = bytearray(content if backend.rank == 0 else size)
    px.broadcast_(torch.frombuffer(buffer, dtype=torch.uint8), backend)  # it is buffer's memory
    return bytes(buffer)
