"""The tables of docs that say what works with other packages, by which their tests are run."""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "clients"))

from files_and_loggers import FILES_AND_LOGGERS, Claim
from tables import between, tables
from trainers import TRAINERS, Trainer

HERE = Path(__file__).parent
CLIENTS = HERE / "clients"
CLAIMS = [claim for row in FILES_AND_LOGGERS for claim in (*row.works, *row.refused)]


@pytest.mark.parametrize("name", tables())
def test_the_table_in_the_document_is_that_of_the_tests(name: str) -> None:
    page, table = tables()[name]
    written = between(page.read_text(), name)[0]
    assert written == table, "python tests/clients/tables.py writes it"


@pytest.mark.parametrize("trainer", TRAINERS, ids=lambda trainer: trainer.name)
def test_what_the_table_says_works_is_in_the_program_that_the_tests_run(trainer: Trainer) -> None:
    program = (CLIENTS / trainer.program).read_text()
    assert not [name for name in trainer.works if name not in program]


@cache
def written_in(file: str) -> dict[str, str]:
    """The tests of a file, by name, as they are written."""
    source = (HERE / file).read_text()
    lines = source.splitlines()
    return {
        node.name: "\n".join(
            lines[min(part.lineno for part in (node, *node.decorator_list)) - 1 : node.end_lineno]
        )
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.words[:30])
def test_what_the_table_says_is_in_the_test_that_shows_it(claim: Claim) -> None:
    file, _, name = claim.test.partition("::")
    assert name in written_in(file)
    code = re.findall(r"`(.*?)`", claim.words)
    assert not [words for words in code if words not in written_in(file)[name]]


def test_every_test_with_another_package_is_in_the_table() -> None:
    said = {claim.test for claim in CLAIMS}
    files = {test.partition("::")[0] for test in said if test.startswith("clients/")}
    missing = [
        f"{file}::{name}"
        for file in sorted(files)
        for name in written_in(file)
        if f"{file}::{name}" not in said
    ]
    assert not missing
