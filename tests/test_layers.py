"""The layers of docs/design.md: imports point down, without circles, and nothing is global."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import phalanx

PACKAGE = Path(phalanx.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

LAYERS = [  # from the lowest to the highest; the parts of one layer never import each other
    ["errors", "files"],
    ["wire"],
    ["core"],
    ["transport"],
    ["native"],
    ["backends"],
    ["collectives", "compression"],
    ["parallel"],
    ["parallel.ddp", "parallel.local_sgd", "fsdp", "tensor", "aggregation"],
    ["parallel.__init__", "pipeline"],
    ["checkpoint", "training"],
    ["launch"],
    ["tools", "torch_backend"],
    ["integrations"],
    ["cli", "__init__"],
]
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}
# What torch calls in every program is where it finds it soonest; the package's name registers, too.
OF_THE_STUB = "phalanx.torch_backend.__init__", "phalanx.__init__"
WITH_DDP = {"parallel.reducer", "parallel.uneven", "parallel.naive_ddp"}


def module_of(path: Path) -> str:
    """Such as `phalanx.core.engine` or `phalanx.core.__init__`."""
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)


MODULES = {module_of(path) for path in FILES}


@cache
def trees() -> dict[Path, ast.Module]:
    """All of the package; not when this file is imported, which every worker of the tests does."""
    return {path: ast.parse(path.read_text()) for path in FILES}


def imports_of(tree: ast.Module) -> set[str]:
    """The modules of the package that a file imports, anywhere in it, for types too."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                is_module = {whole, f"{whole}.__init__"} & MODULES
                names.add(whole if is_module else str(node.module))
    return {found for name in names for found in (name, f"{name}.__init__") if found in MODULES}


@cache
def imports() -> dict[str, set[str]]:
    return {module_of(path): imports_of(tree) for path, tree in trees().items()}


def part_of(module: str) -> str:
    """The part of the package that a module is in: the longest one that `LAYERS` names."""
    name = module.removeprefix("phalanx.")
    if name in WITH_DDP:
        return "parallel.ddp"
    fitting = [part for part in LEVEL if f"{name}.".startswith(f"{part}.")]
    assert fitting, f"{module} has no layer"
    return max(fitting, key=len)


def test_imports_point_down() -> None:
    wrong = [
        f"{module} imports {imported}"
        for module, others in imports().items()
        for imported in others
        if part_of(imported) != part_of(module)
        and LEVEL[part_of(imported)] >= LEVEL[part_of(module)]
        and (module, imported) != OF_THE_STUB
    ]
    assert not wrong


def test_no_import_goes_in_a_circle() -> None:
    try:
        TopologicalSorter(imports()).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_no_two_classes_have_one_name() -> None:
    modules = defaultdict(list)
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                modules[node.name].append(module_of(path))
    assert {name: where for name, where in modules.items() if len(where) > 1} == {}


def test_there_is_no_module_level_mutable_state() -> None:
    """Many ranks live in one process: a table may be global, something that changes may not."""
    for path, tree in trees().items():
        assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Global)], path
        for node in tree.body:
            value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
            names = [t.id for t in getattr(node, "targets", []) if isinstance(t, ast.Name)]
            where = f"{path}:{node.lineno}"
            if isinstance(value, (ast.List, ast.Set)):
                assert names == ["__all__"], f"{where}: make it a tuple or a frozenset"
            if isinstance(value, ast.Dict):
                assert value.keys, f"{where}: an empty table is one that gets filled"


def test_no_pickle_outside_of_spawn() -> None:
    importing = {
        path.name
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Import) and "pickle" in [alias.name for alias in node.names]
    }
    assert importing <= {"spawn.py", "worker.py", "report.py"}
