"""The promises of README and docs/: their code runs, their commands exist, their diffs train."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from documents import PAGES, ROOT, blocks
from ports import unused_port
from torch import nn
from typer.testing import CliRunner

import phalanx
from phalanx.cli.app import app
from phalanx.launch.environment import GIVEN

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


def of_ranks(source: str) -> str:
    """The script with the simulated ranks' backend in the place of a launcher's."""
    return source.replace("phalanx.init()", "backend").replace("Elastic()", "Elastic(backend)")


def scope_of(backend: phalanx.Backend) -> dict[str, object]:
    """What a training script has before it does anything with ranks."""
    GIVEN.set("")  # some documents show what a script does that is started by hand
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


REFERENCE = [name for name in PAGES if name.startswith("docs/reference/")]


@pytest.mark.parametrize(
    "page", [n for n in PAGES if n not in (*ALONE, *REFERENCE) and blocks("python", PAGES[n])]
)
def test_the_python_of_a_guide_runs_on_two_ranks(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One block after the other, as parts of one script."""
    monkeypatch.chdir(tmp_path)  # some save checkpoints

    def run(backend: phalanx.Backend) -> None:
        scope = scope_of(backend)
        for source in blocks("python", PAGES[page]):
            exec(compile(of_ranks(source), f"<{page}>", "exec"), scope)

    assert len(phalanx.simulate(run, 2)) == 2


# Those of docs/coming-from.md and OF_SCRIPTS are of whole scripts, which their tests run.
DIFFS = [diff for page in ("README.md", "docs/sharded.md") for diff in blocks("diff", PAGES[page])]


def test_every_diff_in_a_document_is_run() -> None:
    pages = ("docs/coming-from.md", *OF_SCRIPTS)
    elsewhere = [diff for page in pages for diff in blocks("diff", PAGES[page])]
    assert sorted(all_blocks("diff")) == sorted([*DIFFS, *elsewhere])


@pytest.mark.parametrize("diff", DIFFS, ids=["to DDP", "to Elastic", "to FSDP"])
def test_a_diff_in_a_document_trains_before_and_after(
    diff: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # it saves a checkpoint
    after = "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("-"))
    before = "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("+"))

    def run(source: str, backend: phalanx.Backend) -> float:
        scope = scope_of(backend)
        exec(compile(of_ranks(source), "document", "exec"), scope)
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


def entries() -> Iterator[tuple[str, str]]:
    """The names that the reference shows, and what stands under each up to the next one."""
    for page in REFERENCE:
        pieces = re.split(r"^::: (phalanx[\w.]*)\n", PAGES[page], flags=re.MULTILINE)
        yield from zip(pieces[1::2], pieces[2::2], strict=True)


ENTRIES = dict(entries())
OPTIONS = r"(?:    [^\n]*\n)*\n"  # of the directive
FLAGS = re.DOTALL | re.MULTILINE
WITHOUT_EXAMPLE = {
    "DEFAULT_TIMEOUT": "a number",
    "TopKCompressor": "another name of TopK",
    **dict.fromkeys(phalanx.errors.__all__, "the page of errors has examples for all"),
}
NOT_RUN = {  # here: what each needs, and the tests of it
    "phalanx.spawn(": "processes: tests/multiprocess/test_spawn.py",
    "phalanx.TorchBackend(": "a process group of the process: tests/backends/test_torch_group.py",
    "phalanx.NcclBackend(": "GPUs: tests/scripts/device.py",
    "phalanx.UccBackend(": "a build of torch with UCC: tests/backends/test_torch_group.py",
    "phalanx.MpiBackend(": "mpirun: tests/mpi_ranks.py",
}
BETWEEN_PARTS = set(
    """
    share registers_memory has_background spares_a_processor forked finished issue run
    check_rank check_peer check_movable
    attach deal other_parts before_step after_step after_skip passes answer begin_answers end_join
    leaves communicating needs means named_parameters named_buffers slices all_slices writing
    own_state load_own_state regrouped check_regroupable between_syncs begin_block end_block weight
    """.split()  # noqa: SIM905 - a line for each kind
)
EXAMPLES = [
    (page, number)
    for page in REFERENCE
    for number, source in enumerate(blocks("python", PAGES[page]))
    if not any(call in source for call in NOT_RUN)
]
PORT = "29500"  # an example with it makes backends, whose ranks wait without the simulation


def compared(source: str) -> ast.Module:
    """The program that also looks whether values are as it says behind them.

    value  # -> repr            on every rank
    value  # rank 1 -> repr     on this one
    """
    program, lines = ast.parse(source), source.splitlines()
    notes = {n: re.search(r"  # (?:rank (\d) )?-> (.+)$", text) for n, text in enumerate(lines, 1)}
    said = {number: note for number, note in notes.items() if note is not None}
    for node in ast.walk(program):
        note = said.pop(node.end_lineno or 0, None) if isinstance(node, ast.Expr) else None
        if note is not None and isinstance(node, ast.Expr):
            names = [ast.Constant(each) for each in note.groups()]
            node.value = ast.Call(ast.Name("compare", ast.Load()), [*names, node.value], [])
    assert said == {}, "only the value of an expression can be compared"
    return ast.fix_missing_locations(program)


@pytest.mark.parametrize(("page", "number"), EXAMPLES)
def test_an_example_of_the_reference_runs_on_two_ranks_and_gives_what_it_says(
    page: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = blocks("python", PAGES[page])[number]
    program = compile(compared(source.replace(PORT, str(unused_port()))), f"<{page}>", "exec")
    monkeypatch.chdir(tmp_path)  # some save checkpoints

    def run(backend: phalanx.Backend) -> None:
        def compare(rank: str | None, text: str, value: object) -> None:
            if rank in (None, str(backend.rank)):
                assert " ".join(repr(value).split()) == text  # of a matrix, in one line

        exec(program, {**scope_of(backend), "compare": compare})

    if PORT not in source:
        phalanx.simulate(run, 2)
        return
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(run, phalanx.SimulatedBackend.create_group(2)))


def test_the_examples_that_are_not_run_are_a_few_of_the_top_level_and_have_tests() -> None:
    assert {f"phalanx.{name}(" for name in phalanx.__all__} >= NOT_RUN.keys()
    assert len(NOT_RUN) <= 6
    assert [why for why in NOT_RUN.values() if not (ROOT / why.split(": ")[1]).exists()] == []


def test_every_class_and_function_of_the_top_level_has_an_example_that_names_it() -> None:
    without = set()
    for name in phalanx.__all__:
        example = re.match(rf"{OPTIONS}```python\n(.*?)^```", ENTRIES[f"phalanx.{name}"], FLAGS)
        if example is None or not re.search(rf"\bphalanx\.{name}\b", example[1]):
            without.add(name)
    assert without == WITHOUT_EXAMPLE.keys()


SHOWN = re.findall(r"^::: (phalanx[\w.]*)", "".join(PAGES.values()), flags=re.MULTILINE)


@pytest.mark.parametrize("name", phalanx.__all__)
def test_the_first_page_of_the_reference_links_to_every_public_name(name: str) -> None:
    (page,) = re.findall(rf"\]\((\S+\.md)#phalanx\.{name}\)", PAGES["docs/reference/index.md"])
    assert f"::: phalanx.{name}\n" in PAGES[f"docs/reference/{page}"]


@pytest.mark.parametrize(
    "name", ["Backend", "DDP", "FSDP", "LocalSGD", "DiLoCo", "Pipeline", "Elastic"]
)
def test_the_reference_shows_the_methods_that_users_call(name: str) -> None:
    """A new method is shown, or it is one of those that only other parts of Phalanx call."""
    (listed,) = re.findall(r"members: \[(.*?)\]", ENTRIES[f"phalanx.{name}"], re.DOTALL)
    shown = set(re.findall(r"\w+", listed))
    there = {
        method
        for method, member in inspect.getmembers(getattr(phalanx, name))
        if not method.startswith("_") and is_of_phalanx(getattr(member, "fget", member))
    }
    assert shown <= there
    assert there - shown <= BETWEEN_PARTS


def is_of_phalanx(function: object) -> bool:
    return (getattr(function, "__module__", None) or "").startswith("phalanx")


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
