from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
from language_model.checkpoint import FILE_NAME
from language_model.text import LIBRARY_BYTES, InputError, read_text
from language_model_runs import TINY, train_on, write_text
from train_language_model import run_on

import phalanx as px


def test_without_data_the_text_is_the_standard_library_and_always_the_same() -> None:
    text = read_text(None)
    assert text == read_text(None)
    assert 1_000_000 < len(text.content) <= LIBRARY_BYTES
    assert (Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").read_bytes() in text.content


def test_a_folder_is_its_text_files_in_the_order_of_their_paths(tmp_path: Path) -> None:
    for name, content in {
        "b.txt": b"second ",
        "a/z.md": "fürst ".encode(),
        "c/d/e": b"third",
        "image.png": b"\x89PNG\0\0",
        ".git/config": b"hidden",
        "empty": b"",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    text = read_text(str(tmp_path))
    assert text.content.decode() == "fürst second third"
    assert text.source == f"3 text files in {tmp_path}"


def test_text_that_is_missing_or_empty_is_said(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    folder = tmp_path / "folder"
    folder.mkdir()
    for path, problem in {
        tmp_path / "nowhere": "there is no such file or folder",
        empty: "is empty",
        folder: "holds no text files",
    }.items():
        with pytest.raises(InputError, match=problem):
            read_text(str(path))


BAD = {
    "--data=/nowhere/at/all": "no such file",
    "--context=1000": "a context of 1000 needs at least 50,050",
    "--batch-size=1000": "give more text, or a smaller --batch-size",
    "--steps=none": "argument --steps: 'none' is not a whole number of at least 1",
    "--learning-rate=-1": "'-1' is not a number above 0",
    "--heads=3": "--width 16 is not a multiple of twice --heads 3",
    "--nonsense": "unrecognized arguments: --nonsense",
    "--resume": "cannot read",
}


@pytest.mark.parametrize("argument", BAD)
def test_bad_input_ends_every_rank_with_one_message(
    argument: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_text(tmp_path)
    exits: list[object] = []

    def rank(backend: px.Backend) -> None:
        try:
            run_on(backend, [*TINY, f"--data={data}", f"--out={tmp_path / 'out'}", argument])
        except SystemExit as error:
            exits.append(error.code)

    px.simulate(rank, 3)
    assert exits == [2, 2, 2]
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("error: ") == 1
    assert BAD[argument] in said.err


def test_a_rank_that_alone_has_no_text_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_text(tmp_path)

    def rank(backend: px.Backend) -> None:
        name = "text.txt" if backend.rank < 2 else "missing.txt"
        with pytest.raises(SystemExit):
            run_on(backend, [*TINY, f"--data={tmp_path / name}", f"--out={tmp_path}"])

    px.simulate(rank, 3)
    assert capsys.readouterr().err.count("missing.txt: there is no such file") == 1


def test_ranks_that_read_different_texts_are_told_which(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_text(tmp_path)
    (tmp_path / "other.txt").write_text("something else " * 200)

    def rank(backend: px.Backend) -> None:
        name = "text.txt" if backend.rank < 2 else "other.txt"
        with pytest.raises(SystemExit):
            run_on(backend, [*TINY, f"--data={tmp_path / name}", f"--out={tmp_path}"])

    px.simulate(rank, 3)
    assert "rank 2 has read another text than rank 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("--seed=5", "another run: seed 0, now 5"),
        ("--width=32", "another run: width 16, now 32"),
        ("--batch-size=3", "another run: windows_per_step 4, now 3"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(
    change: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = [f"--data={write_text(tmp_path)}", f"--out={tmp_path / 'out'}", "--steps=2"]
    train_on(1, common)
    with pytest.raises(SystemExit):
        train_on(1, [*common, "--resume", change])
    assert problem in capsys.readouterr().err


def test_a_damaged_checkpoint_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = [f"--data={write_text(tmp_path)}", f"--out={tmp_path}", "--steps=2"]
    train_on(1, common)
    file = tmp_path / FILE_NAME
    whole = file.read_bytes()
    for damaged in (b"", b"nonsense", whole[: len(whole) // 2]):
        file.write_bytes(damaged)
        with pytest.raises(SystemExit):
            train_on(1, [*common, "--resume"])
        assert "this is no checkpoint of this script" in capsys.readouterr().err
