"""Notices to leave, to random ranks at random moments.

    python tests/scripts/notices.py [--times N] [--seed S] [--ranks N]

`phalanx run` trains a small model, with momentum and random inputs. At a random moment one rank is
sent SIGTERM or SIGUSR1, or the launcher is, which passes it on. Then all ranks have to end with
exit code 75 and the launcher, too; they have written one checkpoint more, of the step that each of
them printed; and the launcher has restarted nothing. The same command goes on from there, and is
told to leave again. After some notices it comes to its end: the weights have to be those of a run
that was never interrupted, bit for bit.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NOTICES = 5  # until a run comes to its end
PATIENCE = 120.0
PROGRAM = """
import os, pathlib, signal, sys, time
import torch
import phalanx

folder, pids, steps, pause = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
torch.set_num_threads(1)
with phalanx.init() as backend:
    torch.manual_seed(backend.rank)  # ranks draw inputs of their own
    model = phalanx.DDP(torch.nn.Linear(8, 8), backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    first = 0
    if phalanx.latest_checkpoint(folder) is not None:
        first = phalanx.load_checkpoint(folder, model=model, optimizer=optimizer).step
    with phalanx.Notice(backend, signals=[signal.SIGTERM, signal.SIGUSR1]) as notice:
        for step in range(first, steps):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().sum().backward()
            optimizer.step()
            time.sleep(float(pause))
            if step == first:
                pathlib.Path(pids, f"{backend.rank}.part").write_text(str(os.getpid()))
                pathlib.Path(pids, f"{backend.rank}.part").rename(f"{pids}/{backend.rank}")
            if notice.given():
                phalanx.save_checkpoint(
                    folder, model=model, optimizer=optimizer, step=step + 1, keep=None
                )
                print("left at step", step + 1, flush=True)
                break
    if not notice.exit_code and backend.rank == 0:
        torch.save(model.state_dict(), folder / "weights")
sys.exit(notice.exit_code)
"""


def start(folder: Path, ranks: int, steps: int, pause: float) -> subprocess.Popen[str]:
    pids = folder / "pids"
    pids.mkdir(exist_ok=True)
    for path in pids.iterdir():
        path.unlink()
    (folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "phalanx", "run", "-n", str(ranks), "--max-restarts", "3"]
    words = [str(folder / "program.py"), str(folder), str(pids), str(steps), str(pause)]
    pipe = subprocess.PIPE
    return subprocess.Popen([*command, *words], stdout=pipe, stderr=pipe, text=True)


def steps_saved(folder: Path) -> list[int]:
    return sorted(int(path.parent.name.split("-")[-1]) for path in folder.glob("*/commit.json"))


def notify(folder: Path, ranks: int, steps: int, draw: random.Random) -> str:
    """Start a run, and tell it to leave; what was told, and to whom. AssertionError if wrong."""
    before = steps_saved(folder)
    with start(folder, ranks, steps, 0.004) as launcher:
        deadline = time.monotonic() + PATIENCE
        while len([path for path in (folder / "pids").iterdir() if not path.suffix]) < ranks:
            assert launcher.poll() is None, launcher.communicate()
            assert time.monotonic() < deadline, "the ranks do not come"
            time.sleep(0.01)
        pids = [int((folder / "pids" / str(rank)).read_text()) for rank in range(ranks)]
        signum = draw.choice([signal.SIGTERM, signal.SIGUSR1])
        told = draw.randrange(-1, ranks)
        time.sleep(draw.uniform(0, 0.5))
        os.kill(launcher.pid if told < 0 else pids[told], signum)
        out, err = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == os.EX_TEMPFAIL, f"exit code {launcher.returncode}: {out}{err}"
    assert "restarting" not in err, err
    after = steps_saved(folder)
    assert after[: len(before)] == before
    assert len(after) == len(before) + 1, f"saved {before}, then {after}"
    left = sorted(re.findall(r"\[rank (\d+)\] left at step (\d+)", out))
    assert left == [(str(rank), str(after[-1])) for rank in range(ranks)], out
    return f"{signum.name} to {'the launcher' if told < 0 else f'rank {told}'}: step {after[-1]}"


def finish(folder: Path, ranks: int, steps: int) -> bytes:
    """Run to the end; the bytes of the weights."""
    with start(folder, ranks, steps, 0.0) as launcher:
        out, err = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 0, f"exit code {launcher.returncode}: {out}{err}"
    return (folder / "weights").read_bytes()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=50, help="notices (default 50)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments, ranks and signals")
    parser.add_argument("--ranks", type=int, default=2, help="of each run (default 2)")
    options = parser.parse_args()
    draw = random.Random(options.seed)
    began, good, same, runs = time.monotonic(), 0, 0, 0
    left = options.times
    steps = 1000
    with tempfile.TemporaryDirectory() as name:
        whole = Path(name, "whole")
        whole.mkdir()
        expected = finish(whole, options.ranks, steps)
        while left > 0:
            folder = Path(name, str(runs))
            folder.mkdir()
            try:
                for _ in range(min(left, NOTICES)):
                    left -= 1
                    print(f"    {notify(folder, options.ranks, steps, draw)}", flush=True)
                    good += 1
                same += finish(folder, options.ranks, steps) == expected
            except AssertionError as error:
                print(f"    {error}", flush=True)
            runs += 1
    print(f"told to leave: one checkpoint, exit code 75     {good} of {options.times}")
    print(f"the run that goes on has the same weights       {same} of {runs}")
    print(f"{time.monotonic() - began:.0f} s")
    return 0 if good == options.times and same == runs else 1


if __name__ == "__main__":
    sys.exit(main())
