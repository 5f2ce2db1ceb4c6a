"""Do the tests notice a wrong line?  `python tests/scripts/mutants.py [core] [fsdp] [--seed N]`

Makes mutants of the package: each has one wrong line. On a copy with that line the tests of its
folder run, up to the first that fails. The mutant is caught if one fails, or hangs. One that
survived lacks a test, or does as well as the original, which only a person can tell. The exit code
is 0 if none has survived. The same seed makes the same mutants of the same source. With `--root`
another working tree is measured, where `--sources` and `--tests` may have other names.

No mutants are made of docstrings, messages, annotations, logging, assertions, functions that return
a text, `__repr__`, and what is outside of functions.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from itertools import chain, pairwise, zip_longest
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

TESTS = {  # below tests/; the fastest and most telling first
    "core": [
        *("backends/test_[hinrw]*.py", "backends/test_simulated_*.py", "backends/test_trace.py"),
        *(f"backends/test_conformance_[{letters}]*.py" for letters in ("!acdft", "ac", "dft")),
        "stress/test_stress_buffered_sends.py",
    ],
    "fsdp": ["parallel/test_fsdp_*.py", "parallel/test_wrapper_[!at]*.py"],
}
SWAPPED = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "in": "not in"}
SWAPPED |= {"not in": "in", "is": "is not", "is not": "is", "and": "or", "or": "and", "+": "-"}
SWAPPED |= {"-": "+", "*": "+", "//": "*", "%": "//", "&": "|", "|": "&"}


class Mutant(NamedTuple):
    kind: str
    path: str
    line: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}  {self.kind}\n  - {self.before}\n  + {self.after}"


class Mutator(ast.NodeVisitor):
    """Makes all mutants of one file."""

    def __init__(self, path: str, source: str) -> None:
        self.path = path
        self.lines = source.splitlines()
        self.mutants: list[Mutant] = []
        self.functions = 0  # around the node that is visited
        self.visit(ast.parse(source))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        returns = ast.unparse(node.returns).strip("'\"") if node.returns is not None else ""
        if node.name in ("__repr__", "__str__", "describe") or returns in ("str", "Iterator[str]"):
            return
        self.functions += 1
        for part in (*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body):
            self.visit(part)
        for statement in node.body[ast.get_docstring(node) is not None : -1]:
            self.replace("early return", statement, "return")
        self.functions -= 1

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Raise(self, node: ast.AST) -> None:
        """Left alone: most of it is a message. Whether it is raised is decided around it."""

    visit_Assert = visit_JoinedStr = visit_Raise

    def visit_Call(self, node: ast.Call) -> None:
        function = ast.unparse(node.func)
        if function.startswith("log.") or function.lower().endswith(("error", "warn", "refuse")):
            return  # a message
        self.generic_visit(node)
        given = [ast.unparse(argument) for argument in node.args]
        if function not in ("isinstance", "min", "max") and len(set(given[:2])) == 2:
            swapped = [given[1], given[0], *given[2:], *map(ast.unparse, node.keywords)]
            self.replace("arguments swapped", node, f"{function}({', '.join(swapped)})")

    def visit_Expr(self, node: ast.Expr) -> None:
        self.visit(node.value)
        if isinstance(node.value, ast.Call) and not ast.unparse(node).startswith("log."):
            self.replace("call deleted", node, "pass")

    def visit_Assign(self, node: ast.Assign | ast.AugAssign) -> None:
        self.visit(node.value)
        self.replace("assignment deleted", node, "pass")

    visit_AugAssign = visit_Assign

    def visit_Break(self, node: ast.stmt) -> None:
        self.replace("loop", node, "continue" if isinstance(node, ast.Break) else "break")

    visit_Continue = visit_Break

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        self.generic_visit(node)
        if isinstance(node.op, ast.Not):
            self.replace("not dropped", node, ast.unparse(node.operand))

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, int):
            new = not node.value if isinstance(node.value, bool) else node.value + 1
            self.replace("constant", node, str(new))

    def visit_Compare(self, node: ast.Compare) -> None:
        self.swap("comparison", node, [node.left, *node.comparators])

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.swap("and/or", node, node.values)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self.swap("arithmetic", node, [node.left, node.right])

    def swap(self, kind: str, node: ast.expr, operands: list[ast.expr]) -> None:
        """Swap each operator that stands between its operands on one line, without parentheses."""
        self.generic_visit(node)
        for left, right in pairwise(operands):
            line, start, stop = left.end_lineno or 0, left.end_col_offset or 0, right.col_offset
            old = self.lines[line - 1].encode()[start:stop].decode().strip()
            if line == right.lineno and old in SWAPPED:
                self.cut(kind, line, start, stop, f" {SWAPPED[old]} ")

    def replace(self, kind: str, node: ast.stmt | ast.expr, text: str) -> None:
        if node.lineno == node.end_lineno:
            self.cut(kind, node.lineno, node.col_offset, node.end_col_offset, text)

    def cut(self, kind: str, line: int, start: int, stop: int | None, text: str) -> None:
        before = self.lines[line - 1].encode()
        after = before[:start] + text.encode() + before[stop:]
        if after != before and self.functions:
            self.mutants.append(Mutant(kind, self.path, line, before.decode(), after.decode()))


def mutants_of(package: Path, sources: list[str], count: int, seed: str) -> list[Mutant]:
    """Of these files and folders: as many of each kind, as far as there are; one of a line."""
    mutants = []
    for path in sorted(path for source in sources for path in package.glob(source)):
        mutants += Mutator(str(path.relative_to(package)), path.read_text()).mutants
    kinds: dict[str, list[Mutant]] = defaultdict(list)
    for mutant in random.Random(seed).sample(mutants, len(mutants)):
        kinds[mutant.kind].append(mutant)
    rows = zip_longest(*(kinds[kind] for kind in sorted(kinds)))
    lines: dict[tuple[str, int], Mutant] = {}
    for mutant in filter(None, chain.from_iterable(rows)):
        lines.setdefault((mutant.path, mutant.line), mutant)
    return list(lines.values())[:count]


class Copy:
    """A copy of a working tree's package, on which its tests run."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root = root
        self.package = Path(shutil.copytree(root / "src/phalanx", folder / "phalanx"))
        self.environment = {**os.environ, "PYTHONPATH": str(folder)}

    def put(self, path: str, line: int, text: str) -> None:
        """Write one line of a file, and drop what was compiled of that."""
        file = self.package / path
        lines = file.read_text().splitlines(keepends=True)
        lines[line - 1] = f"{text}\n"
        file.write_text("".join(lines))
        for compiled in file.parent.glob(f"__pycache__/{file.stem}.*"):
            compiled.unlink()

    def test(self, tests: list[str], limit: float | None = None) -> str:
        """What has noticed that something is wrong, or nothing."""
        files = [str(path) for each in tests for path in sorted(self.root.glob(f"tests/{each}"))]
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *files]
        where: dict[str, Any] = {"cwd": self.root, "env": self.environment}
        with tempfile.TemporaryFile("w+") as output:  # a pipe would wait for what else has it open
            pytest = subprocess.Popen(command, stdout=output, start_new_session=True, **where)
            try:
                code = pytest.wait(limit)
            except BaseException as error:
                os.killpg(pytest.pid, signal.SIGKILL)
                if isinstance(error, subprocess.TimeoutExpired):
                    return "a hang"
                raise
            output.seek(0)
            failed = [line.strip() for line in output if line.startswith(("FAILED", "ERROR"))]
        return [*failed, f"exit code {code}"][0] if code else ""


def try_all(copy: Copy, mutants: list[Mutant], tests: list[str], results: Path) -> list[str]:
    """Try each mutant, unless the results have it; those that survived."""
    known: dict[str, str] = dict(map(json.loads, results.read_text().splitlines()))
    began = monotonic()
    if wrong := copy.test(tests):
        sys.exit(f"the tests fail without any mutant: {wrong}")
    limit = 30 + 3 * (monotonic() - began)
    for number, mutant in enumerate(mutants, 1):
        print(f"[{number:2}/{len(mutants)}] {mutant}", flush=True)
        began, key = monotonic(), str(mutant)
        if key not in known:
            copy.put(mutant.path, mutant.line, mutant.after)
            known[key] = copy.test(tests, limit)
            copy.put(mutant.path, mutant.line, mutant.before)
            with results.open("a") as file:
                print(json.dumps([key, known[key]]), file=file)
        verdict = f"caught by {known[key]}" if known[key] else "SURVIVED"
        print(f"  {verdict}, {monotonic() - began:.0f} s", flush=True)
    return [str(mutant) for mutant in mutants if not known[str(mutant)]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="*", default=list(TESTS), help=" ".join(TESTS))
    parser.add_argument("--seed", default="1", help="which mutants; 1 by default")
    parser.add_argument("--count", type=int, default=20, help="of each folder; 20 by default")
    parser.add_argument("--results", type=Path, default="/dev/null", help="what was tried; a file")
    parser.add_argument(
        "--root", type=Path, default=Path(__file__).parents[2], help="the working tree"
    )
    parser.add_argument("--sources", nargs="+", help="patterns below the package, of one folder")
    parser.add_argument("--tests", nargs="+", help="patterns below tests/, of one folder")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_DATA, (8 << 30, 8 << 30))  # bytes a process
    options.results.touch()
    survivors, tried = [], 0
    with tempfile.TemporaryDirectory(prefix="phalanx-mutants-") as folder:
        copy = Copy(options.root.resolve(), Path(folder))
        for name in options.folders:
            sources = options.sources or [f"{name}/**/*.py"]
            mutants = mutants_of(copy.package, sources, options.count, f"{options.seed} {name}")
            survivors += try_all(copy, mutants, options.tests or TESTS[name], options.results)
            tried += len(mutants)
    print(*survivors, f"caught: {tried - len(survivors)} of {tried}", sep="\n")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
