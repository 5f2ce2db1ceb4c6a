"""`phalanx slurm`: the script for sbatch, and the job's folder. tests/clients/ submits it."""

from __future__ import annotations

import os
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from phalanx.cli.app import app
from phalanx.errors import (
    BackendUnavailableError,
    DistributedError,
    InvalidWorldSizeError,
    MisuseError,
)
from phalanx.launch.run import Job
from phalanx.launch.slurm import step_port
from phalanx.ops.clusters.slurm import BatchJob


@pytest.fixture(autouse=True)
def _a_folder_with_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()


def job(*, nodes: int = 2, **options: object) -> BatchJob:
    return BatchJob(Job(2, "train.py", nodes=nodes), **options)  # type: ignore[arg-type]


def comments(script: str) -> dict[str, str]:
    lines = [line.removeprefix("#SBATCH --") for line in script.splitlines() if "#SBATCH" in line]
    return dict(line.partition("=")[::2] for line in lines)


def test_what_sbatch_is_told(tmp_path: Path) -> None:
    made = job(time="1:00:00", partition="gpu", grace=120, options=("--account=physics",))
    assert comments(made.dry_run()) == {
        "job-name": "train",
        "nodes": "2",
        "ntasks-per-node": "2",
        "time": "1:00:00",
        "partition": "gpu",
        "signal": "TERM@120",  # without "B:", so the ranks get it
        "chdir": str(tmp_path),
        "output": f"{tmp_path}/phalanx-train-1/job.log",
        "open-mode": "append",
        "requeue": "",
        "account": "physics",
    }


def test_the_script_is_one_that_bash_reads() -> None:
    script = job().dry_run()
    assert script.startswith("#!/bin/bash\n#SBATCH")
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def run_script(script: str, tmp_path: Path, code: int) -> tuple[list[list[str]], int]:
    """Run a job's script beside programs that stand for Slurm's; return what these were asked."""
    tools = tmp_path / "tools"
    tools.mkdir()
    asked = tmp_path / "asked"
    for name, line in {"srun": f"exit {code}", "scontrol": "echo n5"}.items():
        words = 'for word in "$0" "$@" "$MASTER_ADDR:$MASTER_PORT:$PHALANX_TOKEN_FILE"'
        note = f'{words}; do printf "%s\\n" "$word" >> {asked}; done; echo >> {asked}'
        (tools / name).write_text(f"#!/bin/bash\n{note}\n{line}\nexit 0\n")
        (tools / name).chmod(0o755)
    environ = {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "311",
        "SLURM_NTASKS": "4",
        "SLURM_JOB_NODELIST": "n[5-6]",
    }
    ended = subprocess.run(["bash"], input=script, text=True, env=environ, check=False)
    calls = [call.splitlines() for call in asked.read_text().split("\n\n") if call]
    return [[Path(call[0]).name, *call[1:]] for call in calls], ended.returncode


@pytest.mark.parametrize("code", [0, 1, 143])
def test_the_script_ends_as_the_ranks_did_and_removes_the_token(tmp_path: Path, code: int) -> None:
    script, token = job().dry_run(), tmp_path / "phalanx-train-1" / "token"
    token.parent.mkdir()
    token.touch()
    calls, ended = run_script(script, tmp_path, code)
    assert ended == code
    assert [call[0] for call in calls] == ["scontrol", "srun"]
    assert not token.exists()


def test_code_75_puts_the_job_back_and_leaves_the_token(tmp_path: Path) -> None:
    script, token = job().dry_run(), tmp_path / "phalanx-train-1" / "token"
    token.parent.mkdir()
    token.touch()
    calls, _ = run_script(script, tmp_path, 75)
    assert calls[-1][:3] == ["scontrol", "requeue", "311"]
    assert token.exists()


def test_every_rank_is_told_where_torch_meets_and_runs_the_script_as_given(tmp_path: Path) -> None:
    words = ("--lr", "3 x", "it's", "$HOME", "*")
    script = BatchJob(Job(2, "train.py", words, nodes=2)).dry_run()
    calls, _ = run_script(script, tmp_path, 0)
    srun = calls[-1]
    port = step_port({"SLURM_JOB_ID": "311", "SLURM_STEP_ID": "0"})
    assert srun[-1] == f"n5:{port}:{tmp_path}/phalanx-train-1/token"
    assert f"--output={tmp_path}/phalanx-train-1/rank-%t.log" in srun
    command = srun[srun.index("bash") : -1]
    assert command[-len(words) - 2 :] == [sys.executable, "train.py", *words]
    command[-len(words) - 2 :] = [sys.executable, "-c", "import os; print(os.environ['RANK'])"]
    environ = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "PATH": os.environ["PATH"]}
    said = subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout
    assert said == "3\n"


def test_a_module_is_run_as_one() -> None:
    script = BatchJob(Job(2, "json.tool", ("-m",), module=True, nodes=2)).dry_run()
    assert f"{shlex.quote(sys.executable)} -m json.tool -m\n" in script
    assert "--job-name=json.tool" in script


# The folder -------------------------------------------------------------------------------------


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for sbatch: says what it was given; refuses when there is a file `refuse`."""
    path = tmp_path / "bin" / "sbatch"
    path.parent.mkdir()
    refusal = 'if [ -e refuse ]; then echo "sbatch: error: no such partition" >&2; exit 1; fi'
    path.write_text(f'#!/bin/bash\n{refusal}\necho "Submitted batch job 7"\n')
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(path.parent), prepend=os.pathsep)
    return path


@pytest.mark.usefixtures("sbatch")
def test_each_job_has_a_folder_that_only_its_owner_can_look_into(tmp_path: Path) -> None:
    shown = job().dry_run()
    said, first = job().submit()
    _, second = job().submit()
    assert said == "Submitted batch job 7"
    assert (first, second) == (tmp_path / "phalanx-train-1", tmp_path / "phalanx-train-2")
    assert (first / "job.sh").read_text() == shown
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (first, first / "token")]
    assert modes == [0o700, 0o600]
    assert len((first / "token").read_text().strip()) == 64
    assert (first / "token").read_text() != (second / "token").read_text()


@pytest.mark.usefixtures("sbatch")
def test_what_sbatch_refuses_leaves_no_folder(tmp_path: Path) -> None:
    (tmp_path / "refuse").touch()
    with pytest.raises(BackendUnavailableError, match=r"refused the job: .* no such partition"):
        job().submit()
    assert not (tmp_path / "phalanx-train-1").exists()


@pytest.mark.usefixtures("sbatch")
def test_a_folder_that_is_there_is_not_taken(tmp_path: Path) -> None:
    with pytest.raises(MisuseError, match="is there already"):
        job(folder=tmp_path / "bin").submit()
    with pytest.raises(MisuseError, match="No such file"):
        job(folder=Path("not/there")).submit()


def test_without_sbatch_the_error_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BackendUnavailableError, match=r"sbatch is not installed .* --dry-run"):
        job().submit()
    assert not (tmp_path / "phalanx-train-1").exists()


# The command ------------------------------------------------------------------------------------

WRONG = [
    ("--nodes 0 train.py", InvalidWorldSizeError, "--nodes 0"),
    ("-n 0 train.py", InvalidWorldSizeError, "-n 0"),
    ("gone.py", MisuseError, "gone.py"),
    ("--time 1h train.py", MisuseError, "--time 1h"),
    ("--grace 0 train.py", MisuseError, "--grace 0"),
    ("--sbatch account=x train.py", MisuseError, "--sbatch=--account"),
    ("--partition a%b train.py", MisuseError, "'a%b'"),
]


@pytest.mark.parametrize(("words", "error", "text"), WRONG)
def test_what_makes_no_sense_is_named_before_anything_is_written(
    words: str, error: type[DistributedError], text: str, tmp_path: Path
) -> None:
    result = CliRunner().invoke(app, ["slurm", *words.split()])
    assert isinstance(result.exception, error)
    assert text in str(result.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_a_dry_run_shows_the_script_and_does_nothing(tmp_path: Path) -> None:
    words = "slurm --nodes 2 -n 2 --time 1:00:00 --partition p --dry-run train.py --nodes 7"
    result = CliRunner().invoke(app, words.split())
    assert result.exit_code == 0
    made = BatchJob(Job(2, "train.py", ("--nodes", "7"), nodes=2), "1:00:00", "p")
    assert result.output == made.dry_run()
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.usefixtures("sbatch")
def test_the_command_says_where_the_job_is(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["slurm", "train.py"])
    assert result.output == f"Submitted batch job 7; its folder: {tmp_path}/phalanx-train-1\n"
