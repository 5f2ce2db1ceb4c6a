"""The layers of docs/design.md: imports point down, without circles, and nothing is global.

And the meter: each package has a budget. Whoever needs more raises the number here, in the commit
that needs it, and says why in its message. So growth is a decision.
"""

from __future__ import annotations

import ast
import gc
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import phalanx

PACKAGE = Path(phalanx.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

LAYERS = [  # from the lowest to the highest; the parts of one layer never import each other
    ["errors", "files", "torch_internals"],
    ["hooks"],
    ["wire"],
    ["core"],
    ["transport"],
    ["native"],
    ["backends"],
    ["collectives", "compression"],
    ["parallel"],
    ["parallel.ddp", "parallel.local_sgd", "fsdp", "tensor", "aggregation", "optim"],
    ["parallel.__init__", "pipeline"],
    ["checkpoint", "training"],
    ["launch"],
    ["elastic", "torch_backend"],
    ["ops"],
    ["cli", "__init__"],
    ["__main__"],
]
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}
# What torch calls in every program is where it finds it soonest; the package's name registers, too.
OF_THE_STUB = "phalanx.torch_backend.__init__", "phalanx.__init__"
WITH_DDP = {
    "parallel.reducer",
    "parallel.naive_ddp",
    "parallel.naive_local_sgd",
}

BUDGETS = {  # of each package: lines, files
    ".": (943, 7),  # the package's own files
    "aggregation": (1_819, 7),
    "checkpoint": (3_659, 14),
    "cli": (1_053, 6),
    "collectives": (5_202, 24),
    "compression": (1_761, 7),
    "core": (5_643, 21),
    "elastic": (4_007, 15),
    "fsdp": (2_873, 10),
    "launch": (4_761, 22),
    "native": (2_307, 8),
    "ops": (716, 3),  # without its packages
    "ops.bench": (2_231, 8),
    "ops.clusters": (840, 5),
    "ops.interop": (905, 4),
    "ops.observe": (3_753, 18),
    "optim": (431, 3),
    "parallel": (5_156, 23),
    "pipeline": (2_102, 8),
    "tensor": (1_682, 9),
    "torch_backend": (1_858, 9),
    "training": (1_607, 8),
    "transport": (1_056, 6),  # without its packages
    "transport.shm": (1_603, 9),
    "transport.tcp": (3_722, 13),
    "wire": (1_338, 6),
}
LONGEST_BODY = 45  # lines of a function, without signature and docstring
OVER_40 = 4  # functions that have more than 40


@pytest.fixture(autouse=True, scope="module")
def _trees_are_let_go() -> Iterator[None]:
    """They have no cycles, and so many nodes that the garbage collector would take a second."""
    gc.disable()
    yield
    nodes.cache_clear()
    trees.cache_clear()
    gc.enable()


def module_of(path: Path) -> str:
    """Such as `phalanx.core.engine` or `phalanx.core.__init__`."""
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)


MODULES = {module_of(path) for path in FILES}


@cache
def trees() -> dict[Path, ast.Module]:
    """All of the package; not when this file is imported, which every worker of the tests does."""
    return {path: ast.parse(path.read_text()) for path in FILES}


@cache
def nodes() -> dict[Path, list[ast.AST]]:
    """Of each file, every node of its tree."""
    return {path: list(ast.walk(tree)) for path, tree in trees().items()}


def imports_of(found: Iterable[ast.AST]) -> set[str]:
    """The modules of the package that these nodes of a file import."""
    names: set[str] = set()
    for node in found:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                is_module = {whole, f"{whole}.__init__"} & MODULES
                names.add(whole if is_module else str(node.module))
    return {found for name in names for found in (name, f"{name}.__init__") if found in MODULES}


def without_typing(found: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """Those outside of the blocks that only a type checker reads."""
    blocks = [node for node in found if isinstance(node, ast.If)]
    only = [each for each in blocks if getattr(each.test, "id", "") == "TYPE_CHECKING"]
    skipped = {node for block in only for node in ast.walk(block)}
    return (node for node in found if node not in skipped)


@cache
def imports() -> dict[str, set[str]]:
    return {module_of(path): imports_of(found) for path, found in nodes().items()}


@cache
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
    """Types of one package may refer to each other."""
    real = {}
    for path, found in nodes().items():
        module = module_of(path)
        package, running = module.rpartition(".")[0], imports_of(without_typing(found))
        others = (each for each in imports()[module] if each.rpartition(".")[0] != package)
        real[module] = running.union(others)
    try:
        TopologicalSorter(real).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_no_two_classes_have_one_name() -> None:
    modules = defaultdict(list)
    for path, found in nodes().items():
        for node in found:
            if isinstance(node, ast.ClassDef):
                modules[node.name].append(module_of(path))
    assert {name: where for name, where in modules.items() if len(where) > 1} == {}


def test_there_is_no_module_level_mutable_state() -> None:
    """Many ranks live in one process: a table may be global, something that changes may not."""
    for path, tree in trees().items():
        assert not [node.lineno for node in nodes()[path] if isinstance(node, ast.Global)], path
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
        for path, found in nodes().items()
        for node in found
        if isinstance(node, ast.Import) and "pickle" in [alias.name for alias in node.names]
    }
    assert importing <= {"spawn.py", "worker.py", "report.py"}


# The meter ------------------------------------------------------------------------------------


def test_no_package_is_larger_than_its_budget() -> None:
    files = defaultdict(list)
    for path in FILES:
        folder = ".".join(path.parent.relative_to(PACKAGE).parts) or "."
        fitting = [name for name in BUDGETS if f"{folder}.".startswith(f"{name}.")]
        assert fitting, f"{path} has no budget"
        files[max(fitting, key=len)].append(path)
    size = {
        name: (sum(len(path.read_text().splitlines()) for path in paths), len(paths))
        for name, paths in files.items()
    }
    beyond = [
        f"{name}: {lines} lines in {count} files, of {BUDGETS[name]}"
        for name, (lines, count) in size.items()
        if lines > BUDGETS[name][0] or count > BUDGETS[name][1]
    ]
    assert not beyond
    assert size.keys() == BUDGETS.keys()


def lines_of_bodies() -> dict[str, int]:
    """Of each function of the package."""
    found = {}
    for path, those in nodes().items():
        for node in those:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                body = node.body[1:] if ast.get_docstring(node) is not None else node.body
                lines = node.end_lineno - body[0].lineno + 1 if body else 0
                found[f"{path.relative_to(PACKAGE)}:{node.lineno} {node.name}"] = lines
    return found


def test_no_function_is_longer_than_the_longest_of_today() -> None:
    bodies = lines_of_bodies()
    assert not [name for name, lines in bodies.items() if lines > LONGEST_BODY]
    long = [f"{name}: {lines}" for name, lines in bodies.items() if lines > 40]
    assert len(long) <= OVER_40, long


def test_no_docstring_says_less_than_five_words() -> None:
    """One that says less than the name is left out."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    short = [
        f"{path.relative_to(PACKAGE)}: {text!r}"
        for path, found in nodes().items()
        for node in found
        if isinstance(node, kinds) and (text := ast.get_docstring(node)) is not None
        if len(text.split()) < 5
    ]
    assert not short
