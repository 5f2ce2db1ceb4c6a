"""The promises of README and docs/: their code runs, their commands exist, their diffs train."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from documents import PAGES, ROOT, blocks
from torch import nn
from typer.testing import CliRunner

import phalanx
from phalanx.cli.app import app

README = PAGES["README.md"]
ALONE = (
    "README.md",
    "docs/index.md",
    "docs/testing.md",
    "docs/getting-started.md",
)  # the others: parts of a script
INSIDE = ("CONTRIBUTING.md", "docs/design.md", "docs/main-path.md")  # these name what is inside
OF_SCRIPTS = (
    "docs/your-script.md",
    "docs/your-script-vision.md",
)  # tests/examples/test_first_hour*.py
LONG_EXAMPLES = ("examples/train_language_model.py",)


def all_blocks(language: str) -> list[str]:
    return [block for page in PAGES.values() for block in blocks(language, page)]


COMMANDS = sorted({line for block in all_blocks("console") for line in block.splitlines()})


def new_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 1))


def scope_of(backend: phalanx.Backend) -> dict[str, object]:
    """What a training script has before it does anything with ranks."""
    model = new_model()
    return {
        "__name__": "document",
        "torch": torch,
        "nn": nn,
        "phalanx": phalanx,
        "Model": new_model,
        "Block": nn.Linear,
        "criterion": nn.functional.mse_loss,
        "data": [(torch.ones(2, 3) * i, torch.ones(2, 1) * i) for i in range(4)],
        "batches": iter,
        "backend": backend,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "step": 1,
    }


@pytest.mark.parametrize(
    ("page", "number"),
    [(name, n) for name in ALONE for n in range(len(blocks("python", PAGES[name])))],
)
def test_the_python_in_a_document_runs_by_itself(page: str, number: int) -> None:
    source = blocks("python", PAGES[page])[number]
    exec(compile(source, f"<{page}>", "exec"), {"__name__": "document"})


def test_the_program_of_the_home_page_prints_on_two_ranks_what_the_page_shows(
    tmp_path: Path,
) -> None:
    (program,) = blocks("python", PAGES["docs/index.md"])
    (tmp_path / "train.py").write_text(program)
    command = [sys.executable, "-m", "phalanx", "run", "-n", "2", "train.py"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert [run.stdout] == blocks("text", PAGES["docs/index.md"])


@pytest.mark.parametrize(
    "page", [name for name in PAGES if name not in ALONE and blocks("python", PAGES[name])]
)
def test_the_python_of_a_guide_runs_on_two_ranks(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One block after the other, as parts of one script."""
    monkeypatch.chdir(tmp_path)  # some save checkpoints

    def run(backend: phalanx.Backend) -> None:
        scope = scope_of(backend)
        for source in blocks("python", PAGES[page]):
            exec(compile(source, f"<{page}>", "exec"), scope)

    assert len(phalanx.simulate(run, 2)) == 2


# Those of docs/coming-from.md and OF_SCRIPTS are of whole scripts, which their tests run.
DIFFS = [diff for page in ("README.md", "docs/sharded.md") for diff in blocks("diff", PAGES[page])]


def test_every_diff_in_a_document_is_run() -> None:
    pages = ("docs/coming-from.md", *OF_SCRIPTS)
    elsewhere = [diff for page in pages for diff in blocks("diff", PAGES[page])]
    assert sorted(all_blocks("diff")) == sorted([*DIFFS, *elsewhere])


@pytest.mark.parametrize("diff", DIFFS, ids=["to DDP", "to FSDP"])
def test_a_diff_in_a_document_trains_before_and_after(
    diff: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # it saves a checkpoint
    after = "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("-"))
    before = "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("+"))

    def run(source: str, backend: phalanx.Backend) -> float:
        scope = scope_of(backend)
        exec(compile(source.replace("phalanx.init()", "backend"), "document", "exec"), scope)
        loss = scope["loss"]
        assert isinstance(loss, torch.Tensor)
        return loss.item()

    for source, ranks in ((before, 1), (after, 2)):
        assert len(phalanx.simulate(partial(run, source), ranks)) == ranks


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("make ")])
def test_the_make_targets_in_the_documents_exist(command: str) -> None:
    subprocess.run([*shlex.split(command), "-n"], cwd=ROOT, check=True, capture_output=True)


@pytest.mark.parametrize(
    "command", [c for c in COMMANDS if c.startswith("phalanx run ") and "train.py" in c]
)
def test_the_launcher_understands_the_commands_in_the_documents(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is given a script that is not there: it is read to the end, and nothing is started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PHALANX_TOKEN", "a token of many letters")
    result = CliRunner().invoke(app, shlex.split(command)[1:])
    assert isinstance(result.exception, phalanx.MisuseError), result.output
    assert "train.py is not there" in str(result.exception)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("phalanx bench")])
def test_the_benchmarks_in_the_documents_are_understood(command: str) -> None:
    """Each is asked for too few ranks: it is read to the end, and nothing is started."""
    result = CliRunner().invoke(app, [*shlex.split(command)[1:], "--ranks", "1"])
    assert isinstance(result.exception, phalanx.InvalidWorldSizeError), result.output


@pytest.mark.parametrize("page", PAGES)
def test_what_a_document_links_to_is_there(page: str) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", PAGES[page]):
        assert ((ROOT / page).parent / target).exists(), target


@pytest.mark.parametrize(
    "target", sorted(set(re.findall(r"\bexamples/\w+\.py", "".join(PAGES.values()))))
)
def test_the_examples_that_documents_name_are_there_and_short(target: str) -> None:
    assert (ROOT / target).exists()
    if target not in LONG_EXAMPLES:
        assert len((ROOT / target).read_text().splitlines()) <= 60


def test_the_documents_name_every_example() -> None:
    examples = {f"examples/{path.name}" for path in (ROOT / "examples").glob("*.py")}
    assert not {name for name in examples if name not in PAGES["docs/getting-started.md"]}


def test_make_demo_and_make_test_are_the_two_commands() -> None:
    assert blocks("console", README)[0].split("\n")[:2] == ["make demo", "make test"]


@pytest.mark.parametrize("page", PAGES)
def test_every_part_that_a_document_names_is_there(page: str) -> None:
    for path in re.findall(r"`phalanx\.(\w+(?:\.\w+)*)", PAGES[page]):
        assert is_there(f"phalanx.{path}"), path
    names = r"`(\w+Backend|DDP|FSDP|\w+_checkpoint|all_\w+|reduce_scatter|sendrecv)\b"
    for name in re.findall(names, PAGES[page] if page not in INSIDE else ""):
        assert hasattr(phalanx, name), name


def is_there(path: str) -> bool:
    """Whether it is a module of the package, or a name in one; or the key of a checkpoint."""
    parent, _, name = path.rpartition(".")
    if path == "phalanx.parts":  # safetensors' metadata
        return True
    if importlib.util.find_spec(parent) is None:
        return False
    return hasattr(importlib.import_module(parent), name) or bool(importlib.util.find_spec(path))


# The API reference ------------------------------------------------------------------------------

SHOWN = re.findall(r"^::: (phalanx[\w.]*)", "".join(PAGES.values()), flags=re.MULTILINE)


def test_every_public_name_is_in_the_reference_once() -> None:
    """Also those that have left the top level, by the package that they are in."""
    names = [path.rpartition(".")[2] for path in SHOWN]
    assert len(set(names)) == len(names)
    assert set(phalanx.__all__) <= set(names)


def test_what_the_reference_shows_is_there_and_has_a_docstring() -> None:
    for path in SHOWN:
        assert is_there(path), path
        parent, _, name = path.rpartition(".")
        assert getattr(importlib.import_module(parent), name).__doc__, path
