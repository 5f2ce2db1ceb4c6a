"""How torch finds "phalanx" without an import, and what that costs and may not break.

Programs here see the package as an installed one: a folder on their path has the entry points that
pyproject.toml says.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import phalanx
from phalanx.torch_backend.process_group import CONTAINS_BACKENDS, VERSION

SOURCE = Path(phalanx.__file__).parent.parent
PROJECT = Path(__file__).parents[2] / "pyproject.toml"


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder with the metadata of an installed phalanx."""
    found = re.findall(r'\[project.entry-points."(.*)"\]\n(.*)', PROJECT.read_text())
    lines = [f"[{group}]\n{re.sub(chr(34), '', line)}\n" for group, line in found]
    metadata = tmp_path / "phalanx-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: phalanx\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    return tmp_path


def program(code: str, folder: Path, **environment: str) -> str:
    """What a Python program prints that is not told of Phalanx."""
    path = os.pathsep.join([str(folder), str(SOURCE)])
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout + ended.stderr


WORLD = """
import torch, torch.distributed as dist
dist.init_process_group({backend}, store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.ones(2)
dist.all_reduce(tensor)
print(dist.get_backend(), tensor.tolist())
"""


def test_the_import_of_torch_imports_a_stub_and_a_program_only_names_it(installed: Path) -> None:
    said = program(
        """
import sys
import torch
ours = sorted(name for name in sys.modules if name.split(".")[0] == "phalanx")
print(ours, "msgspec" in sys.modules)
"""
        + WORLD.format(backend='"phalanx"')
        + """
from phalanx.torch_backend import register
first = torch.distributed.Backend._plugins["PHALANX"]
register(); register()
print(torch.distributed.Backend._plugins["PHALANX"] is first)
print(torch.distributed.Backend.backend_capability["phalanx"])
""",
        installed,
    )
    assert said == "['phalanx'] False\nphalanx [1.0, 1.0]\nTrue\n['cpu']\n"


@pytest.mark.skipif(VERSION < CONTAINS_BACKENDS, reason="torch looks no backend up by its name")
def test_torch_finds_it_by_its_name_where_it_calls_no_extensions(installed: Path) -> None:
    said = program(
        "import sys, torch; print('phalanx' in sys.modules)" + WORLD.format(backend='"phalanx"'),
        installed,
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert said == "False\nphalanx [1.0, 1.0]\n"


def test_it_never_breaks_the_import_of_torch(installed: Path) -> None:
    """Something that the stub needs fails: torch is imported all the same, and the log says why."""
    (installed / "sitecustomize.py").write_text(
        """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "phalanx.torch_backend.instead_of_gloo":
            raise OSError("broken on purpose")
sys.meta_path.insert(0, Finder())
"""
    )
    said = program("import torch; print(torch.ones(1))", installed, PHALANX_INSTEAD_OF_GLOO="1")
    assert said.startswith("tensor([1.])\n")
    assert "broken on purpose" in said


def test_instead_of_gloo(installed: Path) -> None:
    worlds = [WORLD.format(backend=each) for each in ('"gloo"', '"cpu:gloo"', "None")]
    all_worlds = "dist.destroy_process_group()".join(worlds)
    said = program(all_worlds, installed, PHALANX_INSTEAD_OF_GLOO="1")
    assert said.count("phalanx [1.0, 1.0]\n") == 3
    assert said.count("PHALANX_INSTEAD_OF_GLOO") == 3


def test_another_backend_of_that_name_stays(installed: Path) -> None:
    said = program(
        """
import os
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
import torch.distributed as dist
dist.Backend.register_backend("phalanx", lambda *a: 1 / 0, devices=["cpu"])
import phalanx.torch_backend
try:
    dist.init_process_group("phalanx", store=dist.HashStore(), rank=0, world_size=1)
except ZeroDivisionError:
    print("theirs")
""",
        installed,
    )
    assert "theirs" in said
    assert "another backend" in said
