"""A rank says which descriptors its peers are to open: nothing else is opened, mapped or written.

What it may say is memory that Phalanx has made and sealed, and the pipe of that very rank, both of
a process of this user, and of this job.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from users import OTHER, as_root, other_user

from phalanx.transport.shm.domain import HostDomain
from phalanx.transport.shm.segments import MEMORY, PIPE, Piece, Segment, open_of
from phalanx.wire.control import Address

ME = os.getpid()
SIZE = 1 << 16

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs a memfd")


@pytest.fixture
def files() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def kept(files: ExitStack, fd: int) -> int:
    files.callback(os.close, fd)
    return fd


def on_disk(files: ExitStack, path: Path) -> int:
    fd = kept(files, os.open(path / "secret", os.O_RDWR | os.O_CREAT, 0o600))
    os.write(fd, b"S" * SIZE)
    return fd


def removed(files: ExitStack, path: Path) -> int:
    fd = on_disk(files, path)
    (path / "secret").unlink()
    return fd


def called_like_memory(files: ExitStack, path: Path) -> int:
    fd = kept(files, os.open(path / "memfd:phalanx (deleted)", os.O_RDWR | os.O_CREAT))
    os.ftruncate(fd, SIZE)
    return fd


def unsealed(files: ExitStack, path: Path) -> int:
    fd = kept(files, os.memfd_create("phalanx", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    os.ftruncate(fd, SIZE)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)  # but it may be cut off
    return fd


def of_another_program(files: ExitStack, path: Path) -> int:
    fd = kept(files, os.memfd_create("phalanxes", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    os.ftruncate(fd, SIZE)
    seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def a_pipe(files: ExitStack, path: Path) -> int:
    here, there = os.pipe()
    kept(files, here)
    return kept(files, there)


def a_named_pipe(files: ExitStack, path: Path) -> int:
    os.mkfifo(path / "pipe")
    return kept(files, os.open(path / "pipe", os.O_RDWR))


def a_device(files: ExitStack, path: Path) -> int:
    return kept(files, os.open("/dev/zero", os.O_RDWR))


def a_folder(files: ExitStack, path: Path) -> int:
    return kept(files, os.open(path, os.O_RDONLY))


Make = Callable[[ExitStack, Path], int]
FILES: list[Make] = [on_disk, removed, called_like_memory, a_named_pipe, a_device, a_folder]


@pytest.mark.parametrize("make", [*FILES, unsealed, of_another_program, a_pipe])
def test_no_other_file_is_taken_for_memory(make: Make, files: ExitStack, tmp_path: Path) -> None:
    fd = make(files, tmp_path)
    with pytest.raises(PermissionError, match=rf"descriptor {fd} of process {ME} is none of"):
        Segment.attach(ME, fd, SIZE)
    with pytest.raises(PermissionError, match="is none of Phalanx's"):
        Piece().attach((ME, fd, os.fstat(fd).st_ino), SIZE)


@pytest.mark.parametrize("make", [*FILES, unsealed, of_another_program])
def test_no_other_file_is_taken_for_a_wakeup_pipe(
    make: Make, files: ExitStack, tmp_path: Path
) -> None:
    with pytest.raises(PermissionError, match="is none of Phalanx's"):
        open_of(ME, make(files, tmp_path), PIPE)


def test_memory_keeps_its_size(files: ExitStack) -> None:
    """Who reads what a peer has cut off would die of SIGBUS."""
    segment = Segment.create(SIZE)
    files.callback(segment.close)
    there = kept(files, open_of(ME, segment.fd, MEMORY))
    for fd in (segment.fd, there):
        for size in (0, SIZE - 1, SIZE + 1):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    with mmap.mmap(there, SIZE) as seen:
        segment.map[:5] = b"hello"
        assert seen[:5] == b"hello"


def test_a_process_that_is_another_users_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    segment = Segment.create(SIZE)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    if owner:
        with pytest.raises(PermissionError, match=f"process {ME} is user {owner}'s"):
            Segment.attach(ME, segment.fd, SIZE)
    monkeypatch.undo()
    segment.close()


@as_root
def test_roots_ranks_attach_no_memory_of_another_user() -> None:
    with (
        other_user(lambda: Segment.create(SIZE).fd) as (process, fd),
        pytest.raises(PermissionError, match=f"process {process} is user {OTHER}'s"),
    ):
        Segment.attach(process, int(fd), SIZE)


# ------------------------------------------------------------------------------
# What a rank says in the rendezvous.


@pytest.fixture
def ranks(files: ExitStack) -> list[HostDomain]:
    """Ranks 0 and 1 of one job, and rank 1 of another one of this user."""
    made = [
        HostDomain(0, 2, b"one job."),
        HostDomain(1, 2, b"one job."),
        HostDomain(1, 2, b"2nd job."),
    ]
    for one in made:
        files.callback(one.close)
    return made


def said(memory: int, wakeup: int) -> list[Address]:
    return [
        Address("127.0.0.1", 1, "here", ME, memory=m, wakeup=w)
        for m, w in ((-1, -1), (memory, wakeup))
    ]


def test_ranks_of_one_job_attach_each_other(ranks: list[HostDomain]) -> None:
    mine, peer, _ = ranks
    assert mine.attach(said(peer.memory, peer.wakeup_end), one_host=True) == ""
    mine.local_peers[1].wake()
    assert os.read(peer.wakeup, 9) == b"!"


def test_memory_of_another_job_of_this_user_is_not_attached(ranks: list[HostDomain]) -> None:
    mine, _, other = ranks
    why = mine.attach(said(other.memory, other.wakeup_end), one_host=True)
    assert "memory of rank 1" in why
    assert f"process {ME} is no such rank of this job" in why
    assert not mine.local_peers


def test_another_pipe_of_that_process_is_not_written(
    ranks: list[HostDomain], files: ExitStack, tmp_path: Path
) -> None:
    mine, peer, other = ranks
    for pipe in (a_pipe(files, tmp_path), other.wakeup_end, on_disk(files, tmp_path)):
        assert "no such rank of this job" in mine.attach(said(peer.memory, pipe), one_host=True)
    assert not mine.local_peers


def test_a_file_in_place_of_memory_stays_as_it_is(
    ranks: list[HostDomain], files: ExitStack, tmp_path: Path
) -> None:
    mine, peer, _ = ranks
    fd = on_disk(files, tmp_path)
    why = mine.attach(said(fd, peer.wakeup_end), one_host=True)
    assert f"descriptor {fd} of process {ME} is none of Phalanx's, but {tmp_path}" in why
    assert (tmp_path / "secret").read_bytes() == b"S" * SIZE
    small = Segment.create(SIZE)
    files.callback(small.close)
    assert "is gone" in mine.attach(said(small.fd, peer.wakeup_end), one_host=True)
