"""Killed, out of room, or with a disk that fails, at any call: an old checkpoint or the new one.

Two saves of two ranks are recorded, call by call; the second finds a leftover, and a checkpoint too
many, so that all that a save can do is among the calls. Then every beginning of this record is
played again, as a kill leaves it (the page cache survives) and as a crash of the machine does (what
was not fsynced is there, or not, or in part).
"""

from __future__ import annotations

import errno
import functools
import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import killed_saves
import pytest
from checkpoint_runs import MEMORY, assert_same, load_plain, plain_after, save_sharded, small
from file_operations import (
    Disk,
    Operation,
    failing,
    in_a_process_that_may_fork,
    recorded,
    watched,
    write_tree,
)

import phalanx
from phalanx import CheckpointError, CheckpointIOError, CheckpointNotFoundError, latest_checkpoint
from phalanx.checkpoint.storage import committed, numbered

RANKS = 2
SAVES = 2


def save(folder: Path, steps: int) -> None:
    phalanx.simulate(save_sharded(folder, steps, make=small, keep=1), RANKS)


@pytest.fixture(scope="module")
def history() -> Iterator[tuple[list[Operation], list[int]]]:
    """The calls of all saves, and how many there had been when each of them was over."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder, recorded(folder) as operations:
        ends = []
        for steps in range(SAVES):
            save(Path(folder), steps)
            ends.append(len(operations))
            if steps == 0:
                leave_a_leftover(Path(folder))
        yield operations, ends


def leave_a_leftover(folder: Path) -> None:
    """What a save leaves that is killed in the middle; these calls are recorded, too."""
    path = os.path.join(folder, "000002-step-9")
    os.mkdir(path)
    for name in ("begun", "model-00000-of-00002.safetensors"):
        os.close(os.open(os.path.join(path, name), os.O_CREAT | os.O_WRONLY))


@functools.cache
def expected(steps: int) -> Any:
    return plain_after(steps, make=small)


def check_folder(folder: Path, finished: int, *, under_way: bool) -> None:
    """Whatever counts as a checkpoint is whole; the newest one is the last that was finished, or
    the one that was under way.
    """
    for each in committed(str(folder)):
        assert_same(load_plain(Path(each.path), make=small), expected(each.step))
    newest = latest_checkpoint(folder)
    allowed = {finished - 1, finished} if under_way else {finished - 1}
    if newest is None:
        assert -1 in allowed
        with pytest.raises(CheckpointNotFoundError):
            load_plain(folder, make=small)
    else:
        assert committed(str(folder))[-1].step in allowed


def stages(history: tuple[list[Operation], list[int]]) -> Iterator[tuple[int, Disk]]:
    """The disk after each call, and how many saves were over by then."""
    operations, ends = history
    disk = Disk()
    for number, operation in enumerate(operations, start=1):
        disk.do(operation)
        yield sum(number >= end for end in ends), disk


class Places:
    """Folders in which something was left; the same things need not be looked at twice."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: set[object] = set()

    def make(self, found: dict[str, bytes | None], finished: int) -> Path | None:
        """A folder with these files, unless there was one already."""
        key = (finished, *found.items())
        if key in self._seen:
            return None
        self._seen.add(key)
        place = self._folder / str(len(self._seen))
        write_tree(found, str(place))
        return place


def test_a_kill_at_any_call_leaves_the_old_checkpoint_or_the_new_one(
    history: tuple[list[Operation], list[int]], folder: Path
) -> None:
    places, seen = Places(folder), set()
    for finished, disk in stages(history):
        if killed := places.make(disk.now(), finished):
            check_folder(killed, finished, under_way=True)
            seen.add(len(numbered(str(killed))))
    assert seen == {0, 1, 2}


def test_a_crash_at_any_call_leaves_the_old_checkpoint_or_the_new_one(
    history: tuple[list[Operation], list[int]], folder: Path
) -> None:
    draw, places = random.Random(0), Places(folder)
    for finished, disk in stages(history):
        for choose in (lambda: 0.0, draw.random, draw.random):
            if crashed := places.make(disk.crash(choose), finished):
                check_folder(crashed, finished, under_way=True)


def test_the_model_of_a_crash_finds_a_missing_fsync(
    history: tuple[list[Operation], list[int]], folder: Path
) -> None:
    """Or the test above would prove nothing: leave any fsync of a save out, and it fails."""
    operations, ends = history
    found = []
    for left_out, operation in enumerate(operations):
        if operation.name != "fsync":
            continue
        finished = 1 + sum(left_out >= end for end in ends)
        disk = Disk()
        for number, each in enumerate(operations[: ends[finished - 1]]):
            if number != left_out:
                disk.do(each)
        crashed = folder / str(left_out)
        write_tree(disk.crash(lambda: 0.0), str(crashed))
        try:
            check_folder(crashed, finished, under_way=False)
        except (AssertionError, CheckpointError):
            found.append(operation.path)
    names = {Path(path).name for path in found}
    assert {"manifest.json", "commit.json.unfinished", "000002-step-1", ""} <= names
    assert (
        sum(path.startswith("000002") and path.endswith("tensors") for path in found) == 2 * RANKS
    )


def test_the_next_save_removes_what_a_killed_one_left(
    history: tuple[list[Operation], list[int]], folder: Path
) -> None:
    places = Places(folder)
    for number, (finished, disk) in enumerate(stages(history)):
        if number % 9 or not (killed := places.make(disk.now(), finished)):
            continue
        save(killed, 1)
        assert [each.is_committed for each in numbered(str(killed))] == [True]
        assert_same(load_plain(killed, make=small), expected(1))


@pytest.mark.parametrize(("error", "first"), [(errno.ENOSPC, 0), (errno.EIO, 1), (errno.EDQUOT, 2)])
def test_an_error_at_any_call_fails_on_all_ranks_and_leaves_the_old_checkpoint(
    error: int, first: int, folder: Path
) -> None:
    def save_and_tell(backend: phalanx.Backend) -> tuple[int | None, str]:
        try:
            save_sharded(folder, 1, make=small, keep=1)(backend)
        except CheckpointIOError as problem:
            return problem.errno, str(problem)
        return 0, ""

    save(folder, 0)
    with recorded(str(folder)) as operations:
        save(folder, 1)
    assert len(operations) > 100
    failed = 0
    for number in range(first, len(operations), 3):
        before = committed(str(folder))[-1].number
        with watched(str(folder), failing(number, error, str(folder))):
            outcomes = phalanx.simulate(save_and_tell, RANKS)
        assert len(set(outcomes)) == 1, outcomes  # every rank says the same
        number_of_error, text = outcomes[0]
        after = [each.number for each in committed(str(folder))]
        if text:
            assert number_of_error == error
            assert os.strerror(error) in text
            assert str(folder) in text
            assert after[-1] == before
        else:
            assert after[-1] > before
        assert len(numbered(str(folder))) <= 2  # where removing itself failed
        load_plain(folder, make=small)
        failed += bool(text)
    assert failed > len(operations) / 9


def test_a_process_that_is_killed_at_any_call_leaves_the_old_checkpoint_or_the_new_one(
    folder: Path,
) -> None:
    """Real kills: children of that program end themselves in a call, or in the middle of it."""
    assert "killed saves" in in_a_process_that_may_fork(killed_saves.check, folder, 8)
