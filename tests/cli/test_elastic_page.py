"""docs/elastic.md: the launcher understands the commands of its recipes, which others run.

Kubernetes: tests/clients/test_kubernetes_schemas.py. SLURM: tests/clients/test_slurm_elastic.py.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml
from documents import PAGES, blocks
from typer.testing import CliRunner

import phalanx
from phalanx.cli.app import app

PAGE = PAGES["docs/elastic.md"]


def of_kubernetes() -> list[str]:
    (manifest,) = blocks("yaml", PAGE)
    (container,) = yaml.safe_load(manifest)["spec"]["template"]["spec"]["containers"]
    return [str(word) for word in container["command"]]


def of_slurm() -> list[str]:
    (script,) = blocks("bash", PAGE)
    script = script.replace("\\\n", " ").replace("$SLURM_ARRAY_JOB_ID", "812")
    (line,) = (line for line in script.splitlines() if line.startswith("srun "))
    return shlex.split(line)[1:]


@pytest.mark.parametrize("recipe", [of_kubernetes, of_slurm])
def test_the_launcher_understands_a_recipe(
    recipe: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is given a script that is not there: it is read to the end, and nothing is started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PHALANX_TOKEN", "a token of many letters")
    assert callable(recipe)
    name, *words = recipe()
    assert name == "phalanx"
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, phalanx.MisuseError), result.output
    assert "train.py is not there" in str(result.exception)
