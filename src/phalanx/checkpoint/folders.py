"""The numbered folders of a run, and what makes one of them a checkpoint.

    runs/a/.phalanx-lock                     held (flock) by rank 0 of a save, while it lasts
    runs/a/000007-step-120/                  the seventh save, after step 120
        begun                                a random word: do all ranks see this folder?
        model-00000-of-00002.safetensors     one of each for each rank that has something to write
        state-00000-of-00002.safetensors
        manifest.json                        what is where, and the checksums of all files
        commit.json                          the checksum of the manifest: with it, it counts

A folder without commit.json is what a save left that did not come to its end, or a removal. The
next save removes it: only files that saves make, so what others put there stays.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from typing import NamedTuple

from phalanx.checkpoint.disk import sync_folder
from phalanx.checkpoint.manifest import FILE_NAME

BEGUN = "begun"
MANIFEST = "manifest.json"
COMMIT = "commit.json"
UNFINISHED = "commit.json.unfinished"
_FOLDER = re.compile(r"(\d{6,})-step-(\d+)", re.ASCII)


class Numbered(NamedTuple):
    """A numbered folder; the greater the number, the later it was begun."""

    number: int
    step: int
    path: str

    @property
    def is_committed(self) -> bool:
        """Whether it is a checkpoint."""
        return os.path.lexists(os.path.join(self.path, COMMIT))


def numbered(folder: str) -> list[Numbered]:
    """All numbered folders in a folder, checkpoints or not, in the order of their numbers."""
    found = []
    for name in os.listdir(folder):
        parsed = parse(os.path.join(folder, name))
        if parsed is not None and os.path.isdir(parsed.path):
            found.append(parsed)
    return sorted(found)


def parse(path: str) -> Numbered | None:
    """What the name of a folder says; None if it is not numbered."""
    match = _FOLDER.fullmatch(os.path.basename(path))
    return Numbered(int(match[1]), int(match[2]), path) if match else None


def committed(folder: str) -> list[Numbered]:
    """The checkpoints in a folder, in the order of their numbers."""
    return [each for each in numbered(folder) if each.is_committed]


def make_next(folder: str, step: int) -> Numbered:
    """A new folder with a number above all others, whose name is safe."""
    number = max((each.number for each in numbered(folder)), default=0)
    while True:
        number += 1
        path = os.path.join(folder, f"{number:06}-step-{step}")
        with suppress(FileExistsError):
            os.mkdir(path)
            break
    sync_folder(folder)
    return Numbered(number, step, path)


def make_parents(folder: str) -> None:
    """Make a folder and those around it, as far as they are missing, with names that are safe."""
    missing = []
    path = os.path.abspath(folder)
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for path in reversed(missing):
        with suppress(FileExistsError):
            os.mkdir(path)
        sync_folder(os.path.dirname(path))


def remove(folder: Numbered) -> None:
    """Remove a checkpoint, or what is left of one.

    First, and safely, what makes it a checkpoint: killed at any point, it is whole or it is none.
    Files that no save makes stay, and the folder with them; so does what a link leads to.
    """
    if os.path.islink(folder.path):
        return
    with suppress(FileNotFoundError):
        os.unlink(os.path.join(folder.path, COMMIT))
    sync_folder(folder.path)  # in any case: whoever was killed may have unlinked it and no more
    for name in os.listdir(folder.path):
        if name in {BEGUN, MANIFEST, UNFINISHED} or FILE_NAME.fullmatch(name):
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(folder.path, name))
    with suppress(OSError):  # not empty: somebody keeps something in it
        os.rmdir(folder.path)
    sync_folder(os.path.dirname(folder.path))
