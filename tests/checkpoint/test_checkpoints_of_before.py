"""What 8165af3 wrote loads bit for bit, and what is written now has the same form.

`fixtures/` has the files, and `make_fixtures.py` explains them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from clusters import Tcp
from make_fixtures import CASES, load, save

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


def form_of(checkpoint: Path) -> dict[str, Any]:
    """The manifest, without what depends on the versions and on the values of tensors."""
    manifest: dict[str, Any] = json.loads((checkpoint / "manifest.json").read_text())
    for key in ("phalanx", "torch"):
        del manifest[key]
    manifest.pop("cuts", None)  # which was not written before
    for file in manifest["files"]:
        del file["checksums"]
    if manifest["optimizer"] is not None:
        for group in manifest["optimizer"]["groups"]:
            del group["options"]  # a newer torch has others
    return manifest


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_is_written_as_before(case: str, tmp_path: Path) -> None:
    """The same files, with the same tensors at the same bytes."""
    save(CASES[case], tmp_path)
    before = FIXTURES / case / "checkpoint"
    manifests = sorted(path.relative_to(before) for path in before.rglob("manifest.json"))
    assert manifests
    for path in manifests:
        now = tmp_path / "checkpoint" / path.parent
        assert form_of(now) == form_of(before / path.parent)
        names = {each.name for each in (before / path.parent).iterdir()}
        assert {each.name for each in now.iterdir()} == names


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
