"""The launcher's bad days, many times over: `python tests/scripts/launcher_bad_days.py --help`.

    kill -9      of `phalanx run`, and of a script that spawns, at random moments: nobody lives on
    Ctrl-C       the same, and the launcher says so in one line
    SIGTERM      the same
    restart      a rank is killed at a random moment, and all ranks meet again
    turmoil      ranks with processes of their own die and are restarted, over and over, when one
                 of those signals comes

Each row says how often it went well, of how many times. The exit code is 0 if always.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "multiprocess"))

from commands import PHALANX
from launchers import WAYS_TO_WAIT, Launch, launch

ALLOWED = 2.0  # seconds that a process may outlive its launcher
POLITE = 3.5  # the same after a signal that ranks may answer first: they have two seconds

MEET = """
import os, pathlib, signal, sys
from phalanx.launch.init import init

restart = os.environ['TORCHELASTIC_RESTART_COUNT']
path = pathlib.Path(sys.argv[1], f"{os.environ['RANK']}-{restart}")
path.with_suffix('.part').write_text(str(os.getpid()))
path.with_suffix('.part').rename(path)
with init(timeout=60) as backend:
    backend.barrier()
    if restart == '0':
        signal.pause()
    print('met')
"""


TURMOIL = """
import os, random, signal, subprocess, sys, time
child = 'import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()'
for _ in range(2):
    subprocess.Popen([sys.executable, '-c', child])
time.sleep(random.random())
if random.random() < 0.4:
    os.kill(os.getpid(), signal.SIGKILL)
signal.pause()
"""


@contextmanager
def fresh_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="bad-days-") as folder:
        yield Path(folder)


def disturb(how: str, what: str, signum: int, moment: float) -> tuple[str, float]:
    """Send a signal to a launcher after `moment` seconds; what was wrong, or "", and seconds."""
    with fresh_folder() as folder, launch(how, what, folder, "--grace", "2") as started:
        sleep(moment)
        started.process.send_signal(signum)
        seconds = started.seconds_until_all_have_ended()
        out, err = started.process.communicate()
        allowed = ALLOWED if signum == signal.SIGKILL else POLITE
        wrong = [f"{seconds:.1f} s"] if seconds > allowed else []
        if list(started.temporary.glob("phalanx-*")):
            wrong.append("left its folder")
        if how == "run" and signum != signal.SIGKILL:
            wrong += judge_words(signum, started.process.returncode, out + err)
        return "; ".join(wrong), seconds


def turmoil(signum: int, moment: float) -> tuple[str, float]:
    """The same while four ranks die and are restarted; what they say besides is not looked at."""
    with fresh_folder() as folder:
        script = folder / "turmoil.py"
        script.write_text(TURMOIL)
        words = [*PHALANX, "run", "-n", "4", "--max-restarts", "99", str(script)]
        with Launch(words, folder) as started:
            sleep(moment)
            started.process.send_signal(signum)
            seconds = started.seconds_until_all_have_ended()
            _, err = started.process.communicate()
            wrong = [] if seconds <= (ALLOWED if signum == signal.SIGKILL else POLITE) else ["late"]
            if list(started.temporary.glob("phalanx-*")):
                wrong.append("left its folder")
            told = err.endswith(f"stopped by {signal.Signals(signum).name}\n")
            if signum != signal.SIGKILL and not told:
                wrong.append(f"said {err!r}")
            return "; ".join(wrong), seconds


def judge_words(signum: int, code: int, said: str) -> list[str]:
    """An interpreter that still imports may end by the signal; all else is one line.

    Before `main` has begun, which says nothing of a Ctrl-C, Python shows where it was.
    """
    before_main = said.endswith("\nKeyboardInterrupt\n") and "in main" not in said
    if code == -signum and (not said or before_main):
        return []
    expected = f"stopped by {signal.Signals(signum).name}\n"
    wrong = [] if code == 128 + signum else [f"exit code {code}"]
    return wrong if said == expected else [*wrong, f"said {said!r}"]


def restart(moment: float) -> tuple[str, float]:
    """Kill a rank `moment` seconds after it has begun; seconds until all had met again."""
    with fresh_folder() as folder:
        (folder / "ready").mkdir()
        script = folder / "meet.py"
        script.write_text(MEET)
        words = [*PHALANX, "run", "-n", "2", "--max-restarts", "1", str(script)]
        with Launch([*words, str(folder / "ready")], folder) as started:
            victim = random.choice((0, 1))
            path = folder / "ready" / f"{victim}-0"
            while not path.exists():
                if started.process.poll() is not None:
                    return f"ended early: {started.process.communicate()}", 0.0
                sleep(0.01)
            sleep(moment)
            begin = monotonic()
            os.kill(int(path.read_text()), signal.SIGKILL)
            out, err = started.process.communicate(timeout=90)
            told = f"rank {victim} was killed by signal 9 (SIGKILL); restarting all ranks (1 of 1)"
            met = sorted(out.splitlines()) == ["[rank 0] met", "[rank 1] met"]
            said = [line for line in err.splitlines() if "phalanx: 2 ranks on 1 host" not in line]
            well = started.process.returncode == 0 and met and said == [told]
            wrong = "" if well else f"{started.process.returncode} {out!r} {err!r}"
            return wrong, monotonic() - begin


def repeat(name: str, times: int, once: Callable[[], tuple[str, float]]) -> bool:
    good, worst = 0, 0.0
    for _ in range(times):
        wrong, seconds = once()
        good += not wrong
        worst = max(worst, seconds)
        if wrong:
            print(f"    {name}: {wrong}", flush=True)
    print(f"{name:55} {good} of {times}   worst {worst:.2f} s", flush=True)
    return good == times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--times", type=int, default=10, help="of each row (default 10)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--only", default="", help="rows whose name has this in it")
    options = parser.parse_args()
    random.seed(options.seed)
    rows: list[tuple[str, Callable[[], tuple[str, float]]]] = []
    for signum in (signal.SIGKILL, signal.SIGINT, signal.SIGTERM):
        for how in ("run", "spawn"):
            if how == "spawn" and signum == signal.SIGINT:
                continue  # a script's KeyboardInterrupt is its own business; see test_spawn.py
            for what in WAYS_TO_WAIT:
                rows.append(
                    (
                        f"{signum.name} of {how}, a rank {what}",
                        lambda how=how, what=what, signum=signum: disturb(  # type: ignore[misc]
                            how, what, signum, random.uniform(0, 3)
                        ),
                    )
                )
    for signum in (signal.SIGKILL, signal.SIGINT):
        rows.append(
            (
                f"{signum.name} of run in a turmoil of restarts",
                lambda signum=signum: turmoil(signum, random.uniform(1, 7)),  # type: ignore[misc]
            )
        )
    rows.append(("a rank is killed, all meet again", lambda: restart(random.uniform(0, 3))))
    chosen = [row for row in rows if options.only in row[0]]
    well = [repeat(name, options.times, once) for name, once in chosen]
    return 0 if all(well) else 1


if __name__ == "__main__":
    sys.exit(main())
