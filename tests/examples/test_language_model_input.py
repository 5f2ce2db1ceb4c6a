from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
from language_model.checkpoint import FORMER_NAME
from language_model.text import LIBRARY_BYTES, InputError, read_text
from language_model_runs import TINY, checkpoints, train_on, write_text
from torch import nn
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
    "--resume": "there is no checkpoint in",
    "--resume=/nowhere/at/all": "there is no checkpoint in /nowhere/at/all",
    "--strategy=full": "'full' is not one of ddp|full_shard|",
    "--strategy=hybrid:0": "'hybrid:0' is not one of",
    "--strategy=local_sgd": "'local_sgd' is not one of",
    "--strategy=hybrid:2": "--strategy hybrid:2: FSDP: hybrid(intra_node_size=2) needs a",
}


def exits_of(ranks: int, arguments: list[str]) -> list[object]:
    """What each rank of a run ends with."""
    exits: list[object] = []

    def rank(backend: px.Backend) -> None:
        try:
            run_on(backend, [*TINY, *arguments])
        except SystemExit as error:
            exits.append(error.code)

    px.simulate(rank, ranks)
    return exits


@pytest.mark.parametrize("argument", BAD)
def test_bad_input_ends_every_rank_with_one_message(
    argument: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_text(tmp_path)
    assert exits_of(3, [f"--data={data}", f"--out={tmp_path / 'out'}", argument]) == [2, 2, 2]
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
        ("--batch-size=3", "windows_per_step 4, now 3; --batch-size x ranks is to stay the same"),
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


def test_a_damaged_checkpoint_is_refused_and_the_one_before_can_be_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = [f"--data={write_text(tmp_path)}", f"--out={tmp_path}", "--steps=2"]
    train_on(2, [*common, "--checkpoint-every=1", "--strategy=full_shard"])
    before, last = (tmp_path / "checkpoints" / name for name in checkpoints(tmp_path))
    file = last / "model-00001-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    capsys.readouterr()
    with pytest.raises(SystemExit):
        train_on(1, [*common, "--batch-size=8", "--resume"])
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("error: ") == 1
    assert str(file) in said.err
    assert str(before) in said.err
    assert "--resume CHECKPOINT goes on from the one in that folder" in said.err

    (run,) = train_on(1, [*common, "--batch-size=8", f"--resume={before}"])
    assert [point.step for point in run.history.steps] == [1, 2]


def test_a_checkpoint_of_something_else_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    px.save_checkpoint(tmp_path / "checkpoints", model=nn.Linear(2, 2), step=3, extra={"epoch": 1})
    with pytest.raises(SystemExit):
        train_on(2, [f"--data={write_text(tmp_path)}", f"--out={tmp_path}", "--resume"])
    assert "000001-step-3 is no checkpoint of this script" in capsys.readouterr().err


def test_a_checkpoint_of_the_former_kind_is_named_and_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    former = tmp_path / FORMER_NAME
    former.write_bytes(b"what it was")
    with pytest.raises(SystemExit):
        train_on(2, [f"--data={write_text(tmp_path)}", f"--out={tmp_path}", "--resume"])
    assert f"{former} is of an earlier form of this script" in capsys.readouterr().err
    assert former.read_bytes() == b"what it was"


def test_a_place_for_checkpoints_that_is_none_is_said_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "checkpoints").write_text("a file, where a folder should be")
    assert exits_of(2, [f"--data={write_text(tmp_path)}", f"--out={tmp_path}"]) == [2, 2]
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == f"error: --out {tmp_path / 'checkpoints'}: File exists\n"


def test_a_disk_that_fails_while_saving_ends_every_rank_with_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "checkpoints" / ".phalanx-lock").mkdir(parents=True)  # where a file should be
    options = [f"--data={write_text(tmp_path)}", f"--out={tmp_path}", "--steps=1"]
    assert exits_of(2, options) == [2, 2]
    said = capsys.readouterr().err
    assert said.count("error: ") == 1
    assert f"{tmp_path / 'checkpoints'}" in said
    assert "EISDIR" in said
