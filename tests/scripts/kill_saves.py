"""Saves that are killed at random moments, and saves on a disk that is full.

    python tests/scripts/kill_saves.py [--times N] [--seed S] [--only WORDS]

Two ranks, processes of their own, save one checkpoint after the other, every second one in the
background; the values follow from the step. At a random moment both are killed, or one of them (the
other ends with an error by itself). What is loaded then has to be the last checkpoint that a rank
had reported, or the one that was being written, bit for bit; and the next pair goes on from there,
in the same folder.

The same is done at each call that a save makes to the system, and half way through each write.

So are conversions to the formats of others: they leave the whole result, or none.

The full disk is a tmpfs of a few MiB (needs root), filled to leave room for a random part of a
save: the save fails on both ranks, which name the file; the last checkpoint loads; nothing is left
over.
"""

from __future__ import annotations

import argparse
import errno
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "checkpoint"))
sys.path.insert(0, str(Path(__file__).parent.parent / "multiprocess"))

import torch
from flat_shards import FlatShards, step_with
from ranks import Job
from torch import nn
from waiting import wait_until

import phalanx
from phalanx import Backend, CheckpointIOError, PeerLostError, load_checkpoint, save_checkpoint
from phalanx.checkpoint.storage import committed, numbered

RANKS = 2
WIDTH = 100
REPORT = "reported"  # a file of ours in the folder: the last step that was saved
LONGEST = 0.4  # seconds that a pair is left alone, once it saves
FULL = 6 << 20  # bytes of the disk that gets full


def model_of(step: int) -> nn.Module:
    """The model as it is after this step."""
    torch.manual_seed(step)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False))


def save_step(folder: Path, step: int, backend: Backend, *, async_save: bool = False) -> None:
    """Save what follows from the step, AdamW's state as well."""
    model = FlatShards(model_of(step), backend)
    optimizer = torch.optim.AdamW(model.parameters())
    step_with(model, optimizer, step)
    save_checkpoint(
        folder,
        model=model,
        optimizer=optimizer,
        step=step,
        extra=step,
        keep=2,
        async_save=async_save,
    ).wait()


def check_loads(path: Path) -> int:
    """Load a checkpoint on one rank; AssertionError unless all of it is of one step."""
    model = model_of(10**6)
    optimizer = torch.optim.AdamW(model.parameters())
    loaded = load_checkpoint(path, model=model, optimizer=optimizer)
    expected = model_of(loaded.step)
    reference = torch.optim.AdamW(expected.parameters())
    step_with(expected, reference, loaded.step)
    assert loaded.extra == loaded.step
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other), f"a parameter is not of step {loaded.step}"
        for key, value in reference.state[other].items():
            assert torch.equal(optimizer.state[one][key], value), f"{key} is not of that step"
    return loaded.step


def keep_saving(backend: Backend, folder: Path) -> None:
    """What a rank does until it is killed."""
    torch.set_num_threads(1)
    logging.getLogger("phalanx").setLevel(logging.CRITICAL)
    step = load_checkpoint(folder, backend=backend).step if phalanx.latest_checkpoint(folder) else 0
    while True:
        step += 1
        save_step(folder, step, backend, async_save=step % 2 == 0)
        if backend.rank == 0:
            report(folder, step)


def report(folder: Path, step: int) -> None:
    (folder / f"{REPORT}.new").write_text(str(step))
    (folder / f"{REPORT}.new").rename(folder / REPORT)


def reported(folder: Path) -> int:
    try:
        return int((folder / REPORT).read_text())
    except FileNotFoundError:
        return 0


def kill_once(folder: Path, draw: random.Random, victims: tuple[int, ...]) -> str:
    """Start a pair, kill `victims` of it; what was found afterwards: "old" or "new"."""
    before = reported(folder)
    with Job(RANKS, timeout=20.0) as job:
        outcomes = [job.start(rank, keep_saving, folder) for rank in range(RANKS)]
        wait_until(lambda: reported(folder) != before, "the ranks save", pause=0.002)
        time.sleep(draw.uniform(0, LONGEST))
        for rank in victims:
            os.kill(job.processes[rank], signal.SIGKILL)
        for rank, outcome in enumerate(outcomes):
            how, what = outcome()
            if rank in victims:
                assert how == "died", f"rank {rank} {how}: {what}"
            else:
                assert how == "raised", f"rank {rank} {how}"
                assert PeerLostError.__name__ in what, what
    done = reported(folder)
    found = [check_loads(Path(each.path)) for each in committed(str(folder))]
    assert found, "no checkpoint is left"
    assert found[-1] in (done, done + 1), f"{done} was saved, and {found[-1]} is loaded"
    return "old" if found[-1] == done else "new"


def kills(times: int, seed: int) -> bool:
    """Row by row: who is killed, and what was left."""
    well = True
    for victims in ((0, 1), (0,), (1,)):
        share = times // 2 if len(victims) == 2 else times // 4
        draw = random.Random(seed)
        good, counts, leftovers = 0, {"old": 0, "new": 0}, 0
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for _ in range(share):
                try:
                    counts[kill_once(folder, draw, victims)] += 1
                    good += 1
                except AssertionError as error:
                    print(f"    {error}", flush=True)
                leftovers += any(not each.is_committed for each in numbered(name))
        who = "both ranks" if len(victims) == 2 else f"rank {victims[0]}"
        print(
            f"{who + ' killed':32} {good} of {share}   the old one {counts['old']}, the new one "
            f"{counts['new']}; leftovers after {leftovers}",
            flush=True,
        )
        well &= good == share
    return well


@contextmanager
def small_disk() -> Iterator[Path]:
    """A file system of `FULL` bytes."""
    with tempfile.TemporaryDirectory() as name:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={FULL}", "tmpfs", name], check=True)
        try:
            yield Path(name)
        finally:
            subprocess.run(["umount", name], check=True)


def full_disks(times: int, seed: int) -> bool:
    """Saves with room for a random part of them."""
    if os.geteuid() != 0:
        print(f"{'no space left':32} skipped: needs root")
        return True
    draw = random.Random(seed)
    good = failed = 0
    with small_disk() as folder:
        phalanx.simulate(lambda backend: save_step(folder, 0, backend), RANKS)
        needed = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        for step in range(1, times + 1):
            filler = folder / "filler"
            free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_bsize
            filler.write_bytes(b"\1" * max(0, free - draw.randrange(2 * needed)))
            before = committed(str(folder))[-1].step
            try:
                outcomes = phalanx.simulate(tell(folder, step), RANKS)
                assert len(set(outcomes)) == 1, outcomes
                number, text = outcomes[0]
                failed += bool(text)
                assert not text or (number == errno.ENOSPC and str(folder) in text), text
                newest = check_loads(Path(committed(str(folder))[-1].path))
                assert newest == (before if text else step)
                left = [each.path for each in numbered(str(folder)) if not each.is_committed]
                assert not left, left
                good += 1
            except AssertionError as error:
                print(f"    {error}", flush=True)
            filler.unlink()
    print(f"{'no space left':32} {good} of {times}   {failed} failed, on both ranks", flush=True)
    return good == times and failed > 0


def tell(folder: Path, step: int) -> Callable[[Backend], tuple[int | None, str]]:
    """A save; its error, if it fails."""

    def run(backend: Backend) -> tuple[int | None, str]:
        try:
            save_step(folder, step, backend)
        except CheckpointIOError as error:
            return error.errno, error.message
        return None, ""

    return run


def every_call(_times: int, _seed: int) -> bool:
    """A save of two simulated ranks that kills itself in each of its calls to the system."""
    program = Path(__file__).parent.parent / "checkpoint" / "killed_saves.py"
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, str(program), name, "1"]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
    print(f"{'killed at every call':32} {(ended.stdout or ended.stderr).strip()}", flush=True)
    return ended.returncode == 0


def conversions(times: int, _seed: int) -> bool:
    """Conversions that are killed at their calls, and in the middle of their writes."""
    program = Path(__file__).parent.parent / "checkpoint" / "killed_conversions.py"
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, str(program), name, str(times)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
    print((ended.stdout or ended.stderr).strip(), flush=True)
    return ended.returncode == 0


def main() -> int:
    rows = {
        "kills": kills,
        "every call": every_call,
        "full disks": full_disks,
        "conversions": conversions,
    }
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=100, help="saves that are killed, and so on")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--only", default="", help="the part whose name has this in it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    well = [row(options.times, options.seed) for name, row in rows.items() if options.only in name]
    print(f"{time.monotonic() - began:.0f} s")
    return 0 if all(well) else 1


if __name__ == "__main__":
    sys.exit(main())
