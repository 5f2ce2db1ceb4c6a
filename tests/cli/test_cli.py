from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from phalanx.cli.app import app
from phalanx.errors import DistributedError, InvalidRankError, InvalidWorldSizeError, MisuseError
from phalanx.launch.run import Job


def test_everything_after_the_script_is_the_scripts(asked: list[Job]) -> None:
    words = ["-n", "7", "--help", "--", "-m", "--lr=1", "$HOME", ""]
    result = CliRunner().invoke(app, ["run", "-n", "2", "train.py", *words])
    assert result.exit_code == 5
    assert asked == [Job(ranks=2, target="train.py", args=tuple(words))]


def test_a_module_takes_its_options_too(asked: list[Job]) -> None:
    CliRunner().invoke(app, ["run", "-n", "2", "-m", "pkg.train", "-m", "x"])
    assert asked == [Job(ranks=2, target="pkg.train", args=("-m", "x"), module=True)]


def test_several_hosts(asked: list[Job]) -> None:
    words = "run -n 4 --nnodes 2 --node-rank 1 --master [fd00::1]:29500 --max-restarts 3 t.py"
    CliRunner().invoke(app, words.split())
    assert asked == [Job(4, "t.py", nodes=2, node_rank=1, master="[fd00::1]:29500", max_restarts=3)]


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"], ["--version"]])
def test_help_and_version(words: list[str], tmp_path: Path) -> None:
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0
    assert "phalanx" in result.output


@pytest.fixture
def job(tmp_path: Path) -> Job:
    script = tmp_path / "train.py"
    script.write_text("")
    return Job(ranks=2, target=str(script))


def test_a_script_a_folder_and_a_module_can_be_run(job: Job, tmp_path: Path) -> None:
    (tmp_path / "__main__.py").write_text("")
    for target, module in ((job.target, False), (str(tmp_path), False), ("json.tool", True)):
        replace(job, target=target, module=module).check()
    replace(job, nodes=2, node_rank=1, master="node1:29500", insecure=True).check()
    replace(job, nodes=2, node_rank=1, master="127.0.0.1:29500").check()
    with pytest.raises(MisuseError, match=r"--nnodes 2 needs a token.* phalanx token > FILE"):
        replace(job, nodes=2, node_rank=1, master="node1:29500").check()


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"ranks": 0}, InvalidWorldSizeError, "at least one"),
        ({"nodes": 0}, InvalidWorldSizeError, "at least one"),
        ({"nodes": 2, "node_rank": 2, "master": "a:1"}, InvalidRankError, "--node-rank 2"),
        ({"nodes": 2}, MisuseError, "--master"),
        ({"nodes": 2, "master": "node1"}, MisuseError, "host:port"),
        (
            {"nodes": 2, "master": "a..b:29500"},
            MisuseError,
            r"--master a\.\.b:29500: .*label empty",
        ),
        ({"max_restarts": -1}, MisuseError, "--max-restarts"),
        ({"target": "missing.py"}, MisuseError, "missing.py is not there"),
        ({"target": "missing"}, MisuseError, "add -m"),
        ({"target": "no_such_module.sub", "module": True}, MisuseError, "no_such_module"),
    ],
)
def test_what_cannot_run_is_said_before_anything_starts(
    job: Job, changes: dict[str, object], error: type[DistributedError], words: str
) -> None:
    with pytest.raises(error, match=words):
        replace(job, **changes).check()  # type: ignore[arg-type]
