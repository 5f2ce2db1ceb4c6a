"""The library does without `phalanx.ops` and the commands; `make fence` runs its own tests so."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launchers import environ_without_launcher

import phalanx

PACKAGE = Path(phalanx.__file__).parent
TESTS = Path(__file__).parent
AROUND = ("ops", "cli")  # what is left out
NOT_OF_THE_LIBRARY = {*AROUND, "attacks", "benchmarks", "clients", "combinations", "examples"}
NAMES = re.compile(r"phalanx\.(ops|cli)\b")

TRAIN = """
import sys
import torch
import phalanx

def train(backend):
    torch.manual_seed(0)
    model = phalanx.FSDP(torch.nn.Linear(4, 4), backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoint = phalanx.latest_checkpoint(sys.argv[1])
    if checkpoint is not None:
        phalanx.load_checkpoint(checkpoint, model=model, optimizer=optimizer)
    with phalanx.Scalars(backend, every=1) as scalars:
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        optimizer.step()
        scalars.log(0, loss=loss)
    phalanx.save_checkpoint(sys.argv[1], model=model, optimizer=optimizer, step=1)
    try:
        phalanx.Scalars(backend, [f"jsonl:{sys.argv[1]}/x"])
    except phalanx.MisuseError as error:
        return f"{loss.item():.4f} {error}"

if __name__ == "__main__":
    with phalanx.init() as backend:
        print(train(backend) if "spawn" not in sys.argv else backend)
    if "spawn" in sys.argv:
        print(phalanx.spawn(train, 1)[0])
    assert not [name for name in sys.modules if name.startswith(("phalanx.ops", "phalanx.cli"))]
"""


def copy_library(folder: Path) -> None:
    """Put the package there, without what is around the library."""
    left_out = shutil.ignore_patterns("__pycache__", *AROUND)
    shutil.copytree(PACKAGE, folder / "phalanx", ignore=left_out)


def own_tests() -> list[Path]:
    """The folders of the library's tests."""
    folders = sorted({path.parent for path in TESTS.glob("*/test_*.py")})
    return [folder for folder in folders if folder.name not in NOT_OF_THE_LIBRARY]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that has the package, and not what is around the library."""
    folder = tmp_path_factory.mktemp("library")
    copy_library(folder)
    return folder


def run(library: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        env={**environ_without_launcher(), "PYTHONPATH": str(library), **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_it_trains_launches_saves_and_loads(library: Path, tmp_path: Path) -> None:
    script, runs = tmp_path / "train.py", str(tmp_path / "runs")
    script.write_text(TRAIN)
    first = run(library, "-m", "phalanx.launch", "-n", "2", str(script), runs)
    assert first.returncode == 0, first.stderr
    losses = {line.split()[2] for line in first.stdout.splitlines()}
    assert len(losses) == 1  # both have the same batch
    again = run(library, str(script), runs, "spawn")
    assert again.returncode == 0, again.stderr
    alone, loaded = again.stdout.splitlines()
    assert "1" in alone
    assert {loaded.split()[0]} != losses  # it has gone on
    for line in [*first.stdout.splitlines(), loaded]:
        assert "Scalars(to=['jsonl:" in line
        assert line.endswith("install the whole package, or leave it out")


OBSERVED = ("PHALANX_METRICS", "PHALANX_WATCH")
ALONE = """
import os, sys, phalanx
for variable in sys.argv[1:]:
    os.environ[variable] = "127.0.0.1:9400"
    try:
        phalanx.init()
    except phalanx.DistributedError as error:
        print(error)
    del os.environ[variable]
"""


def test_what_is_asked_for_and_missing_is_refused_before_ranks_start(
    library: Path, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(ALONE)
    alone = run(library, str(script), *OBSERVED)
    for variable, said in zip(OBSERVED, alone.stdout.splitlines(), strict=True):
        words = f"{variable}=127.0.0.1:9400 needs phalanx.ops"
        assert words in said
        start = ["-m", "phalanx.launch", "-n", "2", str(script)]
        launched = run(library, *start, **{variable: "127.0.0.1:9400"})
        assert (launched.returncode, launched.stdout) == (2, "")
        assert words in launched.stderr


def test_one_file_of_the_library_names_what_it_starts_of_ops_and_one_is_the_command() -> None:
    naming = [
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).parts[0] not in AROUND and NAMES.search(path.read_text())
    ]
    assert sorted(naming) == ["__main__.py", "hooks.py"]


def test_tests_of_the_library_do_not_need_what_is_around_it() -> None:
    naming = [
        path.relative_to(TESTS).as_posix()
        for folder in own_tests()
        for path in folder.rglob("*.py")
        if path.name != "make_fixtures.py"  # a program, for whoever makes them
        and NAMES.search(path.read_text())
    ]
    assert naming == []
