"""Checkpoints as Hugging Face has them: files, index, names, configuration, memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from conversions import Tied, allocations, save, silent, trained
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from phalanx import (
    CheckpointDamagedError,
    CheckpointIOError,
    CheckpointNotFoundError,
    MisuseError,
    UnsupportedOperationError,
    save_checkpoint,
)
from phalanx.checkpoint import safetensors_format
from phalanx.checkpoint.stored import Exported, open_checkpoint
from phalanx.checkpoint.tensor_files import BLOCK, HELD
from phalanx.ops.interop.hugging_face import export_hugging_face, parse_size


def export(runs: Path, out: Path, **options: Any) -> Exported:
    return export_hugging_face(open_checkpoint(runs), out, begin=silent, **options)


def expected() -> dict[str, torch.Tensor]:
    state = trained()[0].state_dict()
    del state["head.weight"]  # which is embed.weight
    return state


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert tensor.dtype == wanted[name].dtype
        assert torch.equal(tensor, wanted[name]), name


@pytest.mark.parametrize("ranks", [1, 3])
def test_one_file_has_every_tensor_whole_and_tied_ones_once(folder: Path, ranks: int) -> None:
    save(folder / "runs", ranks)
    exported = export(folder / "runs", folder / "out")
    assert exported.files == ["model.safetensors"] == [p.name for p in (folder / "out").iterdir()]
    assert_equal(load_file(folder / "out" / "model.safetensors"), expected())
    with safe_open(folder / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}


def test_the_file_is_the_one_that_the_library_writes(folder: Path) -> None:
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(12)))
    save_checkpoint(folder / "runs", model=model, step=1)
    export(folder / "runs", folder / "out")
    save_file(model.state_dict(), folder / "theirs", metadata={"format": "pt"})
    ours = (folder / "out" / "model.safetensors").read_bytes()
    assert ours == (folder / "theirs").read_bytes()


def test_shards_are_in_the_order_of_layers_and_the_index_says_what_is_where(folder: Path) -> None:
    save(folder / "runs", 2)
    export(folder / "runs", folder / "out", shard_size=250)
    index = json.loads((folder / "out" / safetensors_format.INDEX).read_text())
    state = expected()
    assert index["metadata"] == {
        "head.weight": "embed.weight",
        "total_size": sum(tensor.nbytes for tensor in state.values()),
    }
    shards = sorted((folder / "out").glob("model-*.safetensors"))
    assert len(shards) == 5
    assert [path.name for path in shards] == [
        f"model-{number:05}-of-00005.safetensors" for number in range(1, 6)
    ]
    found: dict[str, torch.Tensor] = {}
    for path in shards:
        of_shard = load_file(path)
        assert sum(tensor.nbytes for tensor in of_shard.values()) <= 250
        assert {index["weight_map"][name] for name in of_shard} == {path.name}
        found |= of_shard
    assert_equal(found, state)
    where = [index["weight_map"][f"layers.{number}.weight"] for number in range(11)]
    assert where == sorted(where)


def test_a_tensor_that_is_larger_than_a_shard_has_one_of_its_own(folder: Path) -> None:
    save(folder / "runs", 1)
    export(folder / "runs", folder / "out", shard_size=100)
    index = json.loads((folder / "out" / safetensors_format.INDEX).read_text())["weight_map"]
    assert [name for name, file in index.items() if file == index["embed.weight"]] == [
        "embed.weight"
    ]


def test_no_more_is_held_than_64_mib_and_a_block_whatever_the_size_of_a_tensor(
    folder: Path,
) -> None:
    model = nn.Module()
    model.register_buffer("large", torch.arange(10 << 20, dtype=torch.int64))  # 80 MiB
    model.register_buffer("small", torch.ones(3))
    save_checkpoint(folder / "runs", model=model, step=1)
    with allocations() as allocated:
        export(folder / "runs", folder / "out")
    assert allocated.tensors == HELD
    assert BLOCK < allocated.python < BLOCK + (1 << 20)
    assert torch.equal(load_file(folder / "out" / "model.safetensors")["large"], model.large)


def test_the_watch_of_allocations_sees_tensors_and_buffers() -> None:
    """Or the test above would prove nothing."""
    with allocations() as allocated:
        tensors = [torch.empty(1 << 20, dtype=torch.uint8) for _ in range(3)]
        del tensors
        buffer = bytearray(5 << 20)
        torch.empty(1 << 20)
        del buffer
    assert allocated.tensors == 4 << 20
    assert 5 << 20 <= allocated.python < 6 << 20


def test_the_configuration_and_the_tokenizer_are_copied_and_nothing_else(folder: Path) -> None:
    save(folder / "runs", 1)
    source = folder / "source"
    source.mkdir()
    config = {"model_type": "gpt2", "dtype": "bfloat16"}
    (source / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "vocab.txt", "chat_template.jinja", "tokenizer.model"):
        (source / name).write_text("{}")
    for name in (safetensors_format.INDEX, "model.safetensors", "pytorch_model.bin", "README.md"):
        (source / name).write_text("not this")
    exported = export(folder / "runs", folder / "out", config=source)
    assert sorted(path.name for path in (folder / "out").iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer.model",
        "vocab.txt",
    ]
    copied = json.loads((folder / "out" / "config.json").read_text())
    assert copied == config | {"dtype": "float32"}  # from_pretrained would have cut it to bfloat16
    assert exported.notes == [
        "config.json says dtype float32, as the model has it; it was bfloat16"
    ]
    (folder / "mine.json").write_text('{"a": 1}')
    export(folder / "runs", folder / "other", config=folder / "mine.json")
    assert (folder / "other" / "config.json").read_text() == '{"a": 1}'


@pytest.mark.parametrize(
    ("content", "problem", "kind"),
    [
        (None, "there is no .*config.json", CheckpointNotFoundError),
        ("{", "is not JSON", MisuseError),
        ("[]", "it has a list", MisuseError),
    ],
)
def test_a_configuration_that_is_none_is_refused_before_anything_is_written(
    folder: Path, content: str | None, problem: str, kind: type[Exception]
) -> None:
    save(folder / "runs", 1)
    source = folder / "source"
    source.mkdir()
    if content is not None:
        (source / "config.json").write_text(content)
    with pytest.raises(kind, match=problem):
        export(folder / "runs", folder / "out", config=source)
    assert sorted(path.name for path in folder.iterdir()) == ["runs", "source"]


def test_a_damaged_checkpoint_is_not_exported_and_nothing_is_left(folder: Path) -> None:
    save(folder / "runs", 2)
    path = next((folder / "runs").rglob("model-00001*"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointDamagedError, match="model-00001-of-00002"):
        export(folder / "runs", folder / "out")
    assert [path.name for path in folder.iterdir()] == ["runs"]


def test_what_is_there_already_is_not_touched_but_for_an_empty_folder(folder: Path) -> None:
    save(folder / "runs", 1)
    out = folder / "out"
    out.mkdir()
    export(folder / "runs", out)
    before = (out / "model.safetensors").stat().st_mtime_ns
    with pytest.raises(MisuseError, match="is there already: name a folder that is new, or empty"):
        export(folder / "runs", out)
    assert (out / "model.safetensors").stat().st_mtime_ns == before
    (folder / "file").touch()
    with pytest.raises(MisuseError, match="is there already"):
        export(folder / "runs", folder / "file")


def test_a_dtype_that_the_format_does_not_have_is_named(folder: Path) -> None:
    model = nn.Module()
    model.register_buffer("waves", torch.zeros(2, dtype=torch.complex128))
    save_checkpoint(folder / "runs", model=model, step=1)
    with pytest.raises(UnsupportedOperationError, match="waves is complex128"):
        export(folder / "runs", folder / "out")


def test_what_is_no_tensor_is_left_out_and_said(folder: Path) -> None:
    class Scaled(nn.Linear):
        def get_extra_state(self) -> object:
            return {"scale": 2}

        def set_extra_state(self, state: object) -> None:
            pass

    save_checkpoint(folder / "runs", model=nn.Sequential(Scaled(2, 2)), step=1)
    exported = export(folder / "runs", folder / "out")
    assert exported.notes == ["left out, since it is no tensor: 0._extra_state (get_extra_state)"]


def test_a_disk_without_room_is_refused_before_anything_is_written(folder: Path) -> None:
    """A model of more bytes than any disk has."""
    save(folder / "runs", 1)
    checkpoint = open_checkpoint(folder / "runs")
    records = checkpoint.manifest.model
    larger = msgspec.structs.replace(records["embed.weight"], shape=(1 << 50, 4))
    manifest = msgspec.structs.replace(
        checkpoint.manifest, model={**records, "embed.weight": larger}
    )
    with pytest.raises(CheckpointIOError, match=r"has room for [\d,]+ bytes, and 18,014,398"):
        export_hugging_face(checkpoint._replace(manifest=manifest), folder / "out", begin=silent)
    assert [path.name for path in folder.iterdir()] == ["runs"]


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("1.5 MB", 1_500_000), ("2GiB", 2 << 30), ("700", 700), ("3kb", 3000)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "5 parsecs", "1e9"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(MisuseError, match="is no size"):
        parse_size(text)


def test_a_checkpoint_of_no_tensors_is_an_empty_file(folder: Path) -> None:
    save_checkpoint(folder / "runs", model=nn.Identity(), step=1)
    export(folder / "runs", folder / "out")
    assert load_file(folder / "out" / "model.safetensors") == {}


def test_what_was_exported_loads_into_the_plain_model(folder: Path) -> None:
    save(folder / "runs", 2)
    export(folder / "runs", folder / "out")
    model = Tied(seed=5)
    missing, unexpected = model.load_state_dict(
        load_file(folder / "out" / "model.safetensors"), strict=False
    )
    assert (missing, unexpected) == (["head.weight"], [])
    tokens = torch.arange(7)
    assert torch.equal(model(tokens), trained()[0](tokens))
