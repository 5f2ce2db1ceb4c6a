"""`phalanx checkpoint`: what it says, its exit codes, and its errors."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from conversions import save
from safetensors.torch import load_file
from test_hostile_files import changed
from torch import nn
from typer.testing import CliRunner, Result

from phalanx import (
    CheckpointDamagedError,
    CheckpointNotFoundError,
    MisuseError,
    load_checkpoint,
    save_checkpoint,
)
from phalanx.checkpoint.tensor_files import BLOCK
from phalanx.cli.app import app

GUIDE = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()


def run(*words: object) -> Result:
    return CliRunner().invoke(app, ["checkpoint", *map(str, words)])


def said(*words: object) -> str:
    result = run(*words)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def test_inspect_says_what_is_there(folder: Path) -> None:
    save(folder, 2, extra={"epoch": 3, "words": ["a"]})
    lines = said("inspect", folder).splitlines()
    assert lines[0] == f"{folder}/000001-step-2: step 2, saved by 2 ranks"
    assert lines[2].startswith("files     4, ")
    assert lines[3] == "model     25 tensors, 260 elements, 1.0 kB"
    assert lines[4] == "tied      head.weight = embed.weight"
    assert lines[5] == ("optimizer AdamW: step of 24, exp_avg of 24, exp_avg_sq of 24 parameters")
    assert lines[6].startswith("  group 0: 24 parameters, lr=0.1, betas=[0.9, 0.999], eps=1e-08")
    assert lines[8] == "extra     epoch, words"
    rows = [line.split() for line in lines[11:]]
    assert rows[0] == ["embed.weight", "float32", "7", "x", "4", "112", "bytes", "2", "ranks"]
    assert rows[-1] == ["mask", "uint8", "5", "5", "bytes", "rank", "0"]
    order = [row[0] for row in rows]
    assert order.index("layers.2.bias") < order.index("layers.10.bias")


def test_inspect_shows_forty_rows_of_a_large_model_or_all(folder: Path) -> None:
    model = nn.ModuleList(nn.Linear(1, 1) for _ in range(30))
    save_checkpoint(folder, model=model, step=1)
    lines = said("inspect", folder).splitlines()
    assert lines[-1] == "and 20 more: --all shows them"
    assert sum("float32" in line for line in lines) == 40
    assert sum("float32" in line for line in said("inspect", folder, "--all").splitlines()) == 60


def test_inspect_is_one_object_for_programs(folder: Path) -> None:
    save(folder, 2)
    found = json.loads(said("inspect", folder, "--json"))
    assert found["step"] == 2
    assert found["ranks"] == 2
    assert found["aliases"] == {"head.weight": "embed.weight"}
    by_name = {tensor["name"]: tensor for tensor in found["model"]}
    assert by_name["embed.weight"] == {
        "name": "embed.weight",
        "dtype": "float32",
        "shape": [7, 4],
        "bytes": 112,
        "ranks": [0, 1],
    }
    assert found["optimizer"]["state"] == {"step": 24, "exp_avg": 24, "exp_avg_sq": 24}


def test_verify_reads_every_checkpoint_and_names_the_first_wrong_bytes(folder: Path) -> None:
    model = nn.Module()
    model.register_buffer("large", torch.arange(3 * BLOCK // 8))
    for step in (1, 2):
        save_checkpoint(folder, model=model, step=step)
    assert said("verify", folder).count("ok ") == 2
    path = folder / "000001-step-1" / "model-00000-of-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[2 * BLOCK + 5] ^= 1
    content[-1] ^= 1
    path.write_bytes(content)
    result = run("verify", folder)
    assert result.exit_code == 1
    damaged, fine = result.stdout.splitlines()
    assert damaged.startswith("damaged ")
    assert f"{path} is not as it was written" in damaged
    assert f"its bytes {2 * BLOCK}:{3 * BLOCK} differs" in damaged
    assert fine.startswith(f"ok       {folder}/000002-step-2")
    assert run("verify", folder, "--step", 2).exit_code == 0
    path.write_bytes(content[:-1])
    assert "is truncated" in run("verify", folder, "--step", 1).stdout
    path.unlink()
    assert "is missing" in run("verify", folder / "000001-step-1").stdout
    (folder / "000001-step-1" / "manifest.json").write_text("{}")
    result = run("verify", folder)
    assert result.exit_code == 1
    assert "manifest.json has 2 bytes" in result.stdout


@pytest.mark.parametrize("command", ["inspect", "verify", "export"])
def test_what_is_not_there_is_said(folder: Path, command: str) -> None:
    more = [folder / "out", "--format", "hf"] if command == "export" else []
    result = run(command, folder / "nowhere", *more)
    assert isinstance(result.exception, CheckpointNotFoundError)
    assert f"{command}: there is no folder {folder}/nowhere" in str(result.exception)
    left = folder / "runs" / "000001-step-5"
    left.mkdir(parents=True)
    for path in (left, left.parent):
        result = run(command, path, *more)
        assert isinstance(result.exception, CheckpointNotFoundError)
        assert "000001-step-5 was never committed" in str(result.exception)
    save(folder / "runs", 1)
    result = run(command, folder / "runs", "--step", 9, *more)
    assert "there is no checkpoint of step 9 in" in str(result.exception)
    assert "which has those of steps 2" in str(result.exception)


def test_export_to_hugging_face_and_what_it_says(folder: Path) -> None:
    save(folder / "runs", 2)
    lines = said("export", folder / "runs", folder / "out", "--format", "hf").splitlines()
    assert lines[0].startswith("Note: from_pretrained needs a config.json beside them")
    assert lines[1].startswith(f"{folder}/out: step 2, 1 file, 2.9 kB")
    assert "embed.weight" in load_file(folder / "out" / "model.safetensors")
    (folder / "config.json").write_text("{}")
    options = ["--config", folder / "config.json", "--shard-size", "0.5kB"]
    out = said("export", folder / "runs", folder / "two", "--format", "hf", *options)
    assert out.startswith(f"{folder}/two: step 2, 5 files")


def test_export_to_torch_and_import_again(folder: Path) -> None:
    save(folder / "runs", 2, extra="told")
    out = said("export", folder / "runs", folder / "out", "--format", "dcp")
    assert out.startswith(f"{folder}/out: step 2, 2 files")
    result = run("import", folder / "out", folder / "back")
    assert isinstance(result.exception, MisuseError)
    assert "--trust-pickle" in str(result.exception)
    assert not (folder / "back").exists()
    lines = said("import", folder / "out", folder / "back", "--trust-pickle").splitlines()
    assert lines == [
        "Note: tied, since they are equal: head.weight = embed.weight",
        f"{folder}/back/000001-step-2: step 2, 98 tensors",
    ]
    assert load_checkpoint(folder / "back").extra == "told"


def test_options_of_the_other_format_are_refused(folder: Path) -> None:
    words = ["export", folder, folder / "out", "--format"]
    assert "are of --format hf" in str(run(*words, "dcp", "--config", "x").exception)
    assert "is of --format dcp" in str(run(*words, "hf", "--model-only").exception)
    assert "'many' is no size" in str(run(*words, "hf", "--shard-size", "many").exception)


def test_a_damaged_checkpoint_says_which_other_one_there_is(folder: Path) -> None:
    save(folder, 1, steps=1)
    save(folder, 1, steps=2)
    path = folder / "000002-step-2" / "manifest.json"
    path.write_text(path.read_text()[:-1])
    result = run("inspect", folder)
    assert isinstance(result.exception, CheckpointDamagedError)
    assert "The previous checkpoint, of step 1, is all there" in str(result.exception)


@pytest.mark.parametrize(
    "command",
    sorted(set(re.findall(r"^phalanx checkpoint .*", GUIDE, flags=re.MULTILINE))),
)
def test_the_commands_of_the_guide_are_understood(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is read to its end; there is nothing here to convert."""
    monkeypatch.chdir(tmp_path)
    result = run(*shlex.split(command)[2:])
    assert isinstance(result.exception, CheckpointNotFoundError), result.output


def test_what_is_inspected_reaches_a_terminal_as_plain_text(folder: Path) -> None:
    escape = "\x1b]0;owned\x07\u202e"
    values = {escape: escape}
    model = {escape: {"dtype": "float32", "shape": [0], "pieces": []}}
    changed(folder, phalanx=escape, torch=escape, values=values, extra=values, model=model)
    ended = CliRunner().invoke(app, ["checkpoint", "inspect", str(folder)])
    assert ended.exit_code == 0
    assert "owned" in ended.stdout
    assert ended.stdout.replace("\n", "").isprintable()
