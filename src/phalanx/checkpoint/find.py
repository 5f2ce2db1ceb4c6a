"""Which checkpoint to load, and which one instead if that is damaged."""

from __future__ import annotations

import os
from pathlib import Path

from phalanx.checkpoint.disk import read_file, size_of
from phalanx.checkpoint.folders import (
    COMMIT,
    MANIFEST,
    Numbered,
    committed,
    numbered,
    parse,
)
from phalanx.checkpoint.manifest import Manifest, decode_commit, decode_manifest
from phalanx.errors import CheckpointDamagedError, CheckpointError, CheckpointNotFoundError


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """The folder of the newest checkpoint in `folder`; None if there is none, or no such folder.

    Its files are not looked at. Nothing is sent: the answer is this rank's.
    """
    try:
        found = committed(os.fspath(folder))
    except FileNotFoundError:
        return None
    return Path(found[-1].path) if found else None


def find(folder: str, step: int | None) -> str:
    """The folder of a checkpoint: `folder` itself, or the newest one in it, or that of a step.

    Raises `CheckpointNotFoundError`.
    """
    if os.path.lexists(os.path.join(folder, COMMIT)):
        own = parse(folder)
        if step is None or own is None or own.step == step:
            return folder
    try:
        found = committed(folder)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointNotFoundError(f"there is no folder {folder}") from None
    if step is not None:
        steps = sorted({each.step for each in found})
        found = [each for each in found if each.step == step]
        if not found:
            have = f"those of steps {', '.join(map(str, steps))}" if steps else "none"
            raise CheckpointNotFoundError(
                f"there is no checkpoint of step {step} in {folder}, which has {have}"
            )
    if not found:
        left = numbered(folder)
        hint = f": {left[-1].path} was never committed" if left else ""
        raise CheckpointNotFoundError(f"there is no checkpoint in {folder}{hint}")
    return found[-1].path


def read_manifest(path: str) -> tuple[bytes, bytes]:
    """The commit record and the manifest of a checkpoint, as they are.

    Raises `CheckpointDamagedError` if one is missing, or not as it was written.
    """
    contents = []
    for name in (COMMIT, MANIFEST):
        file = os.path.join(path, name)
        try:
            contents.append(read_file(file))
        except FileNotFoundError:
            raise CheckpointDamagedError(f"{file} is missing") from None
    commit, manifest = contents
    decoded(path, commit, manifest)
    return commit, manifest


def decoded(path: str, commit: bytes, manifest: bytes) -> Manifest:
    """What these two say."""
    record = decode_commit(commit, os.path.join(path, COMMIT))
    return decode_manifest(manifest, record, os.path.join(path, MANIFEST))


def instead_of(path: str) -> str:
    """A sentence that offers the checkpoint before a damaged one, if its files are all there.

    Or says that this one is none any more: whoever saves in the folder keeps only so many.
    """
    folder, bad = os.path.dirname(os.path.abspath(path)), parse(os.path.abspath(path))
    try:
        others = [each for each in committed(folder) if bad is None or each.number != bad.number]
    except OSError:
        others = []
    if not os.path.lexists(os.path.join(path, COMMIT)):
        return ". It was removed while it was being read: load the one that is the newest now"
    before = [each for each in others if bad is not None and each.number < bad.number]
    after = [each for each in others if each not in before]
    for other in (*reversed(before), *after):
        if _looks_whole(other):
            which = "previous" if other in before else "next"
            return (
                f". The {which} checkpoint, of step {other.step}, is all there: load it with "
                f'load_checkpoint("{other.path}", ...)'
            )
    return f". No other checkpoint in {folder} is all there"


def _looks_whole(folder: Numbered) -> bool:
    try:
        manifest = decoded(folder.path, *read_manifest(folder.path))
        return all(
            size_of(os.path.join(folder.path, file.name)) == file.bytes for file in manifest.files
        )
    except (OSError, CheckpointError):
        return False
