"""The text to learn from: a file, a folder of text files, or Python's own standard library."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

LIBRARY_BYTES = 4_000_000
"""How much of the standard library is read at most."""

NOT_PROSE = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
)
"""Folders of the standard library that are left out: others' code, tests, tables."""


class InputError(Exception):
    """The user asked for something that cannot be; the message says what, and what to do."""


@dataclass(frozen=True)
class Text:
    """Bytes, and where they come from, for people."""

    content: bytes
    source: str


def read_text(path: str | None) -> Text:
    """The bytes of a file, or of all text files under a folder in the order of their paths.

    None is the standard library's source. `InputError` if there is nothing to read.
    """
    if path is None:
        return standard_library()
    place = Path(path).expanduser()
    if not place.exists():
        raise InputError(f"--data {path}: there is no such file or folder")
    try:
        text = _folder(place) if place.is_dir() else Text(place.read_bytes(), str(place))
    except OSError as error:
        raise InputError(f"--data {path}: {error.strerror}") from error
    if not text.content:
        nothing = "holds no text files (UTF-8)" if place.is_dir() else "is empty"
        raise InputError(f"--data {path} {nothing}: give a file or folder with text in it")
    return text


def standard_library() -> Text:
    """The source of this Python's standard library, the same each time, a few megabytes of it."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = (
        file
        for file in [*sorted(root.glob("*.py")), *sorted(root.glob("*/**/*.py"))]
        if NOT_PROSE.isdisjoint(file.relative_to(root).parts)
    )
    parts: list[bytes] = []
    for content in _texts(files):
        if sum(map(len, parts)) + len(content) > LIBRARY_BYTES:
            break
        parts.append(content)
    if not parts:
        raise InputError(f"no source of the standard library in {root}: give --data FILE_OR_FOLDER")
    return Text(b"".join(parts), f"{len(parts)} files of the Python standard library")


def _folder(root: Path) -> Text:
    files = (
        file
        for file in sorted(root.rglob("*"))
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(root).parts)
    )
    parts = list(_texts(files))
    return Text(b"".join(parts), f"{len(parts)} text files in {root}")


def _texts(files: Iterable[Path]) -> Iterator[bytes]:
    """The contents of those files that are text."""
    for file in files:
        content = file.read_bytes()
        if content and _is_text(content):
            yield content


def _is_text(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return b"\0" not in content


def make_folder(path: Path) -> None:
    """Make a folder, if it is not there. `InputError` if it cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {path}: {error.strerror}") from error
