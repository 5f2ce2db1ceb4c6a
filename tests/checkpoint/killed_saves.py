"""Saves that are killed at every STRIDE-th of their calls: in it, or half way through a write.

    python killed_saves.py FOLDER STRIDE

Each save is a fork of this process, of two simulated ranks, and kills itself (SIGKILL); what it
leaves is loaded here. Prints how many were killed, or fails.
"""

from __future__ import annotations

import itertools
import shutil
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from checkpoint_runs import assert_same, load_plain, plain_after, save_sharded, small
from file_operations import in_a_fork, killing, watched

import phalanx
from phalanx.checkpoint.storage import committed, numbered

RANKS = 2


def killed_at(folder: Path, number: int, steps: int) -> bool:
    """A save whose call of this number is its last; whether it came so far."""

    def act() -> None:
        with watched(str(folder), killing(number, str(folder))):
            phalanx.simulate(save_sharded(folder, steps, make=small, keep=1), RANKS)

    status = in_a_fork(act)
    assert status in (0, signal.SIGKILL), f"the save ended with status {status}"
    return status != 0


def check(folder: Path, stride: int) -> str:
    """Kill saves under `folder`; in words, how many were killed."""
    torch.set_num_threads(1)
    expected = [plain_after(steps, make=small) for steps in range(2)]
    before, saved = folder / "before", folder / "saved"
    phalanx.simulate(save_sharded(before, 0, make=small, keep=1), RANKS)
    leftover = before / "000002-step-9"
    leftover.mkdir()
    (leftover / "begun").touch()
    old = new = 0
    for number in itertools.count(0, stride):
        shutil.rmtree(saved, ignore_errors=True)
        shutil.copytree(before, saved)
        killed = killed_at(saved, number, 1)
        found = committed(str(saved))
        for each in found:
            assert_same(load_plain(Path(each.path), make=small), expected[each.step])
        if not killed:
            break
        old, new = old + (found[-1].step == 0), new + (found[-1].step == 1)
    assert [each.is_committed for each in numbered(str(saved))] == [True]
    assert old > 60 / stride
    assert new > 15 / stride
    return f"{old + new} killed saves: {old} left the old checkpoint, {new} the new one"


if __name__ == "__main__":
    print(check(Path(sys.argv[1]), int(sys.argv[2])))
