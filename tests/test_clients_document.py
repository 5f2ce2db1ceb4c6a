"""docs/clusters.md: the table of trainers, which the tests of clients are run by."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "clients"))

from trainers import TRAINERS, Trainer, as_markdown

CLIENTS = Path(__file__).parent / "clients"
DOCUMENT = (Path(__file__).parents[1] / "docs" / "clusters.md").read_text()


def test_the_table_of_trainers_is_that_of_the_tests() -> None:
    shown = re.search(r"<!-- trainers -->\n\n(.*?)\n<!-- end of trainers -->", DOCUMENT, re.DOTALL)
    assert shown is not None
    assert shown[1] == as_markdown()


@pytest.mark.parametrize("trainer", TRAINERS, ids=lambda trainer: trainer.name)
def test_what_the_table_says_works_is_in_the_program_that_the_tests_run(trainer: Trainer) -> None:
    program = (CLIENTS / trainer.program).read_text()
    assert not [name for name in trainer.works if name not in program]
