"""The layers of docs/design.md: imports point down, and nothing is global."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import phalanx

PACKAGE = Path(phalanx.__file__).parent

LAYERS = [
    {"errors", "wire"},
    {"core"},
    {"transport"},
    {"native"},
    {"backends"},
    {"collectives"},
    {"compression"},
    {"parallel"},
    {"aggregation", "fsdp", "tensor"},
    {"pipeline"},
    {"checkpoint", "training"},
    {"launch", "tools"},
    {"cli"},
    {"__init__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
FILES = sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    """The folder or file right under the package."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_parts(path: Path) -> Iterator[str]:
    """The parts of Phalanx that a file imports, anywhere in it, for types too."""
    folders = [*path.relative_to(PACKAGE.parent).parent.parts]
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = folders[: len(folders) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "phalanx":
                yield parts[1] if parts[1] in LEVEL else "__init__"


def test_every_part_of_the_package_has_a_layer() -> None:
    assert {part_of(path) for path in FILES} <= LEVEL.keys()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    here = part_of(path)
    allowed_up = {"__init__"} if here == "cli" else set()  # for the version
    upward = {
        part
        for part in imported_parts(path)
        if LEVEL[part] > LEVEL[here] and part not in allowed_up
    }
    assert not upward, f"{here} is below {sorted(upward)}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_there_is_no_module_level_mutable_state(path: Path) -> None:
    """Many ranks live in one process: a table may be global, something that changes may not."""
    tree = ast.parse(path.read_text())
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Global)]
    for node in tree.body:
        value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
        names = [t.id for t in getattr(node, "targets", []) if isinstance(t, ast.Name)]
        if isinstance(value, (ast.List, ast.Set)):
            assert names == ["__all__"], f"line {node.lineno}: make it a tuple or a frozenset"
        if isinstance(value, ast.Dict):
            assert value.keys, f"line {node.lineno}: an empty table is one that gets filled"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_pickle_outside_of_spawn(path: Path) -> None:
    names = {
        alias.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    started_by_spawn = {"spawn.py", "worker.py", "report.py"}
    assert "pickle" not in names or path.name in started_by_spawn
