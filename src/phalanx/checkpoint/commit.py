"""A save, as rank 0 begins and ends it.

    lock, leftovers removed             |
    mkdir 000007-step-120, fsync ..     |   all ranks: see the folder, write their files,
    begun                               |   fsync each, fsync the folder, say so
    all files seen, manifest, fsync     |
    commit.json.unfinished, fsync, fsync of the folder
    rename to commit.json, fsync of the folder      from here on it is a checkpoint
    those beyond the last `keep` removed, unlock

Up to the rename the folder is a leftover, of which every file is safe by then; the checkpoints
before it have not been touched.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress

from phalanx.checkpoint.disk import read_file, size_of, sync_folder, write_file
from phalanx.checkpoint.folders import (
    BEGUN,
    COMMIT,
    MANIFEST,
    UNFINISHED,
    Numbered,
    committed,
    make_next,
    make_parents,
    numbered,
    remove,
)
from phalanx.checkpoint.lock import FolderLock
from phalanx.checkpoint.manifest import FileRecord, Manifest, commit_of, encode
from phalanx.errors import CheckpointIOError

log = logging.getLogger("phalanx")


class NewCheckpoint:
    """A checkpoint that rank 0 is making in `folder`, and the lock on that; OSErrors name files.

    patience   seconds to wait for another save there
    last       the checkpoint before this one, "" if there is none
    word       a random one, which is in the new folder for all ranks to see
    """

    def __init__(self, folder: str, step: int, patience: float) -> None:
        make_parents(folder)
        self._folder = folder
        self._lock = FolderLock(folder, patience)
        self._made: Numbered | None = None
        self.word = secrets.token_hex(16)
        self.committed = False
        try:
            _remove_leftovers(folder)
            before = committed(folder)
            self.last = before[-1].path if before else ""
            self._made = make_next(folder, step)
            write_file(os.path.join(self.path, BEGUN), self.word.encode())
        except BaseException:
            self.abandon()
            raise

    @property
    def path(self) -> str:
        """Its own folder."""
        assert self._made is not None
        return self._made.path

    def commit(self, manifest: Manifest) -> None:
        """Make it a checkpoint. Every file of the manifest has to be safe."""
        for file in manifest.files:
            _check_seen(self.path, file)
        content = encode(manifest)
        write_file(os.path.join(self.path, MANIFEST), content)
        unfinished = os.path.join(self.path, UNFINISHED)
        write_file(unfinished, encode(commit_of(manifest, content)))
        sync_folder(self.path)
        os.rename(unfinished, os.path.join(self.path, COMMIT))
        sync_folder(self.path)
        self.committed = True

    def end(self, keep: int | None) -> None:
        """Remove all but the last `keep` checkpoints, and unlock. Trouble goes to the log."""
        try:
            for old in committed(self._folder)[: -keep if keep is not None else 0]:
                _try_to_remove(old)
        except OSError as error:
            log.warning("%s: cannot look for old checkpoints to remove: %s", self._folder, error)
        finally:
            self._lock.release()

    def abandon(self) -> None:
        """Remove what there is of it, unless it is a checkpoint by now, and unlock."""
        try:
            if self._made is not None and not self.committed:
                _try_to_remove(self._made)
        finally:
            self._lock.release()


def check_shared(path: str, word: str) -> None:
    """Raise `CheckpointIOError` unless this rank sees the folder that rank 0 has made."""
    seen = b""
    with suppress(FileNotFoundError, NotADirectoryError):
        seen = read_file(os.path.join(path, BEGUN))
    if seen != word.encode():
        raise CheckpointIOError(
            f"{path}, which rank 0 has just made, cannot be seen from here: give every rank the "
            "same folder, on a file system that all of them share"
        )


def _check_seen(path: str, file: FileRecord) -> None:
    """Raise `CheckpointIOError` unless rank 0 sees the file that another rank has written."""
    try:
        size = size_of(os.path.join(path, file.name))
    except FileNotFoundError:
        size = -1
    if size != file.bytes:
        what = "cannot be seen" if size < 0 else f"has {size} bytes"
        rank = int(file.name.split("-")[1])
        raise CheckpointIOError(
            f"{os.path.join(path, file.name)}, {file.bytes} bytes that rank {rank} has written, "
            f"{what} from rank 0: is the folder on a file system that all ranks share?"
        )


def _remove_leftovers(folder: str) -> None:
    """What saves that were killed have left, and removals. The lock says that none is under way."""
    for each in numbered(folder):
        if not each.is_committed:
            _try_to_remove(each)


def _try_to_remove(folder: Numbered) -> None:
    try:
        remove(folder)
    except OSError as error:
        log.warning("%s cannot be removed; the next save will try again: %s", folder.path, error)


def files_in_order(reports: Sequence[object], names: Sequence[str]) -> list[FileRecord]:
    """The files that the ranks say they have written, in the order of their names in the plan."""
    by_name = {}
    for report in reports:
        for name, size, block, checksums in report:  # type: ignore[attr-defined]
            by_name[name] = FileRecord(name, size, block, checksums)
    return [by_name[name] for name in names]
