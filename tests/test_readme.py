"""The README's promises: its code runs, its commands exist, its diff is a training loop."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import phalanx
from phalanx.cli.app import app

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


COMMANDS = [line for block in blocks("console") for line in block.splitlines()]


@pytest.mark.parametrize("source", blocks("python"))
def test_the_python_in_the_readme_runs(source: str) -> None:
    exec(compile(source, "README.md", "exec"), {"__name__": "readme"})


@pytest.mark.parametrize("diff", blocks("diff"), ids=["to DDP", "to FSDP"])
def test_a_diff_in_the_readme_trains_before_and_after(
    diff: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # it saves a checkpoint
    after = "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("-"))
    before = "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("+"))

    def run(source: str, backend: phalanx.Backend) -> float:
        rows = [(torch.ones(2, 3) * i, torch.ones(2, 1) * i) for i in range(4)]
        scope = {
            "torch": torch,
            "phalanx": phalanx,
            "Model": lambda: nn.Sequential(nn.Linear(3, 1)),
            "Block": nn.Linear,
            "criterion": nn.functional.mse_loss,
            "data": rows,
            "batches": iter,
            "backend": backend,
        }
        exec(compile(source.replace("phalanx.init()", "backend"), "README.md", "exec"), scope)
        loss = scope["loss"]
        assert isinstance(loss, torch.Tensor)
        return loss.item()

    for source, ranks in ((before, 1), (after, 2)):
        assert len(phalanx.simulate(partial(run, source), ranks)) == ranks


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("make ")])
def test_the_make_targets_in_the_readme_exist(command: str) -> None:
    subprocess.run([*shlex.split(command), "-n"], cwd=ROOT, check=True, capture_output=True)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("phalanx run ")])
def test_the_launcher_understands_the_commands_in_the_readme(command: str, tmp_path: Path) -> None:
    """Each is given a script that is not there: it is read to the end, and nothing is started."""
    program = [sys.executable, "-m", "phalanx.cli", *shlex.split(command)[1:]]
    ended = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode != 0
    assert "train.py" in ended.stderr
    assert "No such option" not in ended.stderr


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("phalanx bench")])
def test_the_benchmarks_in_the_readme_are_understood(command: str) -> None:
    """Each is asked for too few ranks: it is read to the end, and nothing is started."""
    result = CliRunner().invoke(app, [*shlex.split(command)[1:], "--ranks", "1"])
    assert isinstance(result.exception, phalanx.InvalidWorldSizeError), result.output


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README))))
def test_what_the_readme_links_to_is_there_and_examples_are_short(target: str) -> None:
    assert (ROOT / target).exists()
    if target.startswith("examples/") and target != "examples/train_language_model.py":
        assert len((ROOT / target).read_text().splitlines()) < 60


def test_make_demo_and_make_test_are_the_two_commands() -> None:
    assert blocks("console")[0].split("\n")[:2] == ["make demo", "make test"]


def test_every_part_that_the_readme_names_is_there() -> None:
    for name in re.findall(r"`phalanx\.(\w+)", README):
        assert hasattr(phalanx, name), name
    for name in re.findall(
        r"`(\w+Backend|DDP|FSDP|\w+_checkpoint|all_\w+|reduce_scatter|sendrecv)\b", README
    ):
        assert hasattr(phalanx, name), name
