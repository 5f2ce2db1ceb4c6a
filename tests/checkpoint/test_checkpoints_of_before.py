"""What earlier versions wrote loads bit for bit: `fixtures/`, which `make_fixtures.py` explains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from clusters import Tcp
from make_fixtures import CASES, load

from phalanx import Backend
from phalanx.collectives.cost import choose

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.mark.parametrize(
    ("case", "row"), [(name, row) for name, case in CASES.items() for row in case.loads]
)
def test_a_checkpoint_of_before_loads_bit_for_bit(case: str, row: str) -> None:
    """On as many ranks and on others, with the same strategy and with others."""
    expected = json.loads((FIXTURES / case / "expected.json").read_text())[row]
    found = load(CASES[case].loads[row], FIXTURES / case)
    assert len(found) == len(expected)
    for rank, (here, there) in enumerate(zip(found, expected, strict=True)):
        for key, text in there.items():
            assert here[key] == text, f"{key} of rank {rank}"
        more = here.keys() - there.keys()  # options that a newer torch gives its optimizers
        assert all(key.startswith("group ") for key in more), more


def test_every_fixture_is_loaded() -> None:
    assert {path.name for path in FIXTURES.iterdir() if path.is_dir()} == CASES.keys()


def test_a_tuning_file_of_before_is_gone_by(monkeypatch: pytest.MonkeyPatch) -> None:
    path = FIXTURES / "tuning.json"
    tables = [each for each in json.loads(path.read_text())["tables"] if "Tcp" in each["backend"]]
    assert len(tables) == 2
    monkeypatch.setenv("PHALANX_TUNING", str(path))

    def run(backend: Backend) -> list[tuple[str, str]]:
        return [
            (choice.algorithm, str(choice))
            for table in tables
            for size in table["sizes"]
            for choice in [choose(table["collective"], size, backend)]
        ]

    fastest = [
        min(table["seconds"], key=lambda name, at=at, of=table["seconds"]: of[name][at])
        for table in tables
        for at in range(len(table["sizes"]))
    ]
    for chosen in Tcp().run(run, 2):
        assert [algorithm for algorithm, _ in chosen] == fastest
        assert all("measured" in text for _, text in chosen)
