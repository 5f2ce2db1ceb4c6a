"""`phalanx slurm`: a batch script for Slurm that runs a Python script on the nodes of a job.

    phalanx slurm --nodes 2 -n 2 --time 1:00:00 train.py --lr 3

    phalanx-train-1/        the job's folder, in the working folder, which the nodes share
        job.sh              the script for sbatch
        token               the job's token (0600)
        job.log             the output of the script itself and of Slurm
        rank-0.log ...      the output of each rank, of all starts

The ranks get SIGTERM before the time is over (--signal without "B:" goes to the job's steps, not to
its script). A step that ends with `AGAIN` asks to be started again: the script puts the job back
into the queue, with the same folder and token, and another SLURM_RESTART_COUNT.
"""

from __future__ import annotations

import re
import secrets
import shlex
import shutil
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from phalanx.errors import BackendUnavailableError, InvalidWorldSizeError, MisuseError
from phalanx.files import write
from phalanx.launch.report import AGAIN
from phalanx.launch.run import Job
from phalanx.launch.slurm import FIRST_PORT, PORTS, STEPS

_WAIT = 300  # seconds

# Minutes, minutes:seconds, hours:minutes:seconds, days-hours, ...: the forms of sbatch.
_TIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}|UNLIMITED|INFINITE", re.IGNORECASE)


@dataclass(frozen=True)
class BatchJob:
    """A job of `run.nodes` nodes with `run.ranks` ranks on each."""

    run: Job
    time: str = ""  # as sbatch takes it, as `partition` is; "": the cluster's default
    partition: str = ""
    grace: int = 60  # seconds before the end of `time` at which the ranks get SIGTERM
    options: tuple[str, ...] = ()  # more options of sbatch, as "--account=physics"
    folder: Path | None = None  # the job's; None: a new one in the working folder

    def check(self) -> None:
        """Raise `InvalidWorldSizeError` or `MisuseError` for wrong options."""
        if self.run.nodes < 1:
            raise InvalidWorldSizeError(f"--nodes {self.run.nodes}: it takes at least one")
        replace(self.run, nodes=1).check()
        if self.time and not _TIME.fullmatch(self.time):
            raise MisuseError(
                f"--time {self.time}: it is minutes, hours:minutes:seconds, or "
                "days-hours:minutes:seconds, such as 1:00:00"
            )
        if not 0 < self.grace < 65536:
            raise MisuseError(f"--grace {self.grace}: it is seconds, from 1 to 65535")
        for option in self.options:
            if not option.startswith("-") or "\n" in option:
                raise MisuseError(
                    f"--sbatch {option!r}: it is one option of sbatch with its dashes, such as "
                    "--sbatch=--account=physics"
                )
        for text in (self.partition, str(Path.cwd()), str(self._place())):
            if re.search(r"[\n\"'\\%]", text):  # sbatch reads its comments in its own way
                raise MisuseError(f"{text!r}: sbatch takes no quotes, percent signs or line ends")

    def dry_run(self) -> str:
        """Return the script that `submit` would write now."""
        return self._script(self._place())

    def submit(self) -> tuple[str, Path]:
        """Write the folder and give the script to sbatch; return its output, and the folder.

        `BackendUnavailableError` if sbatch is missing or refuses; the folder is gone then.
        """
        if shutil.which("sbatch") is None:
            raise BackendUnavailableError(
                "sbatch is not installed here: run this on a host from which jobs of Slurm are "
                "submitted, or look at the script with --dry-run"
            )
        with ExitStack() as undo:
            folder = self._make_folder()
            undo.callback(shutil.rmtree, folder, ignore_errors=True)
            write(str(folder / "token"), f"{secrets.token_hex(32)}\n".encode(), 0o600)
            write(str(folder / "job.sh"), self._script(folder).encode(), 0o600)
            ended = subprocess.run(
                ["sbatch", str(folder / "job.sh")], capture_output=True, text=True, check=False
            )
            if ended.returncode:
                raise BackendUnavailableError(f"sbatch refused the job: {ended.stderr.strip()}")
            undo.pop_all()
        return ended.stdout.strip(), folder

    def _make_folder(self) -> Path:
        """Make the job's folder: a new one, which only this user may look into."""
        while True:
            place = self._place()
            try:
                place.mkdir(mode=0o700)
            except FileExistsError:
                if self.folder is not None:
                    raise MisuseError(
                        f"--folder {place} is there already: each job has a folder of its own"
                    ) from None
            except OSError as error:
                raise MisuseError(f"the job's folder {place}: {error.strerror}") from None
            else:
                return place

    def _place(self) -> Path:
        if self.folder is not None:
            return self.folder.absolute()
        number = 1
        while (place := Path.cwd() / f"phalanx-{self._name()}-{number}").exists():
            number += 1
        return place

    def _name(self) -> str:
        target = self.run.target
        return re.sub(r"[^\w.-]", "_", target if self.run.module else Path(target).stem)

    def _script(self, folder: Path) -> str:
        run = self.run
        chosen = {"time": self.time, "partition": self.partition}
        options = {
            "job-name": self._name(),
            "nodes": run.nodes,
            "ntasks-per-node": run.ranks,
            **{name: value for name, value in chosen.items() if value},
            "signal": f"TERM@{self.grace}",
            "chdir": Path.cwd(),
            "output": folder / "job.log",
            "open-mode": "append",
        }
        lines = [f"--{name}={value}" for name, value in options.items()]
        comments = "\n".join(f"#SBATCH {line}" for line in [*lines, "--requeue", *self.options])
        words = [sys.executable, *(["-m"] if run.module else []), run.target, *run.args]
        token, logs = shlex.quote(str(folder / "token")), shlex.quote(str(folder / "rank-%t.log"))
        return f"""\
#!/bin/bash
{comments}

export PHALANX_TOKEN_FILE={token}
export PYTHONUNBUFFERED=1
[ -n "$SLURM_CPUS_PER_TASK" ] && export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-${{SLURM_CPUS_PER_TASK:-1}}}}

# For torch.distributed; phalanx.init() would read all this from Slurm's own variables.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$(({FIRST_PORT} + SLURM_JOB_ID * {STEPS} % {PORTS}))
export MASTER_ADDR MASTER_PORT WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE={run.ranks}
as_rank='RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec "$@"'

# A rank that fails ends the others by way of Phalanx, which names it. srun waits {_WAIT} s for the
# rest after the first has ended: of a slurmstepd that was killed it hears nothing.
srun --kill-on-bad-exit=0 --wait={_WAIT} --open-mode=append --output={logs} \\
    bash -c "$as_rank" rank {shlex.join(words)}
code=$?
echo "job $SLURM_JOB_ID, start ${{SLURM_RESTART_COUNT:-0}}: the ranks ended with exit code $code"
if [ $code -eq {AGAIN} ]; then
    scontrol requeue "$SLURM_JOB_ID" && exit 0
fi
rm -f {token}
exit $code
"""
