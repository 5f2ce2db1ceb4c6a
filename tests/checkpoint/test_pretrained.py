"""`load_pretrained`: files of Hugging Face's form, into models that are split in any way."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from conversions import Tied, allocations
from file_operations import recorded
from flat_shards import FlatShards
from safetensors.torch import save_file
from torch import nn

import phalanx
from phalanx import (
    DDP,
    FSDP,
    Backend,
    CheckpointDamagedError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    DiLoCo,
    LocalSGD,
    Pipeline,
    PipelineParallelConfig,
    TopK,
    load_pretrained,
    parallelize,
)
from phalanx.checkpoint.safetensors_format import INDEX
from phalanx.tensor import full_state_dict

SINGLE = "model.safetensors"


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    state = Tied(seed).state_dict()
    del state["head.weight"]
    return state


def write(folder: Path, state: dict[str, torch.Tensor] | None = None, *, shards: int = 1) -> None:
    state = tensors() if state is None else state
    names = list(state)
    files = {
        f"model-{n + 1:05}-of-{shards:05}.safetensors" if shards > 1 else SINGLE: names[n::shards]
        for n in range(shards)
    }
    for file, of_file in files.items():
        save_file({name: state[name] for name in of_file}, folder / file)
    if shards > 1:
        weight_map = {name: file for file, of_file in files.items() for name in of_file}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_equal(found: dict[str, Any], seed: int = 0) -> None:
    for name, tensor in Tied(seed).state_dict().items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("shards", [1, 3])
def test_into_a_plain_model(folder: Path, shards: int) -> None:
    write(folder, shards=shards)
    model = Tied(seed=5)
    load_pretrained(folder, model)
    assert_equal(model.state_dict())
    assert model.head.weight is model.embed.weight


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("wrap", [DDP, FSDP, FlatShards])
def test_into_a_wrapped_model(folder: Path, wrap: Callable[..., Any], ranks: int) -> None:
    write(folder, shards=2)

    def load(backend: Backend) -> None:
        model = wrap(Tied(seed=5), backend)
        load_pretrained(folder, model)
        if wrap is FlatShards:
            for name, part in model.named_parameters():
                start, stop = model.slices()[name][1:]
                assert torch.equal(part, tensors()[name].view(-1)[start:stop])
        else:
            assert_equal(full_state_dict(model))

    phalanx.simulate(load, ranks)


LOCAL: dict[str, Callable[..., Any]] = {
    "LocalSGD": lambda m, b: LocalSGD(m, b, every=2),
    "LocalSGD compressed": lambda m, b: LocalSGD(m, b, every=2, compression=TopK(0.5)),
    "DiLoCo": lambda m, b: DiLoCo(
        m, b, every=2, outer=lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9)
    ),
}


@pytest.mark.parametrize("wrap", LOCAL.values(), ids=LOCAL)
def test_local_training_goes_on_from_what_was_loaded(
    folder: Path, wrap: Callable[..., Any]
) -> None:
    """As if the module had the values when it was wrapped; a period that was begun is given up."""
    save_file(mlp(0).state_dict(), folder / SINGLE)

    def train(model: nn.Module, rank: int, steps: int) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(steps):
            draw = torch.Generator().manual_seed(10 * rank + number)
            optimizer.zero_grad()
            model(torch.randn(3, 4, generator=draw)).square().mean().backward()
            optimizer.step()

    def loaded(backend: Backend) -> dict[str, torch.Tensor]:
        model = wrap(mlp(5), backend)
        train(model, backend.rank, 1)
        load_pretrained(folder, model)
        train(model, backend.rank, 5)
        return values(model.module)

    def built(backend: Backend) -> dict[str, torch.Tensor]:
        model = wrap(mlp(0), backend)
        train(model, backend.rank, 5)
        return values(model.module)

    for found, expected in zip(
        phalanx.simulate(loaded, 2), phalanx.simulate(built, 2), strict=True
    ):
        for name, value in expected.items():
            assert torch.equal(found[name], value), name


def mlp(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4), nn.Linear(4, 3))


@pytest.mark.parametrize("sharded", [False, True])
def test_into_tensor_parallel_layers(folder: Path, sharded: bool) -> None:
    plain = mlp(0)
    save_file(plain.state_dict(), folder / SINGLE)
    models = [mlp(5) for _ in range(4)]

    def load(backend: Backend) -> None:
        mesh = phalanx.DeviceMesh(backend, (2, 2), ("data", "tensor"))
        model: nn.Module = models[backend.rank]
        model = parallelize(model, mesh["tensor"], {"0": "column", "2": "row"})
        if sharded:
            model = FSDP(model, mesh["data"])
        load_pretrained(folder, model, backend=backend)
        found = full_state_dict(model)
        for name, tensor in plain.state_dict().items():
            assert torch.equal(found[name], tensor), name

    phalanx.simulate(load, 4)


def test_into_a_pipeline(folder: Path) -> None:
    plain = mlp(0)
    save_file(plain.state_dict(), folder / SINGLE)
    layers = [mlp(5) for _ in range(2)]

    def load(backend: Backend) -> list[tuple[str, torch.Tensor]]:
        pipeline = Pipeline(list(layers[backend.rank]), backend, PipelineParallelConfig(2, 2))
        load_pretrained(folder, pipeline)
        return [(name, parameter.detach()) for name, parameter in pipeline.named_parameters()]

    found = dict(chain.from_iterable(phalanx.simulate(load, 2)))
    assert found.keys() == plain.state_dict().keys()
    for name, tensor in plain.state_dict().items():
        assert torch.equal(found[name], tensor), name


def test_floating_dtypes_are_converted_and_others_are_not(folder: Path) -> None:
    state = tensors()
    write(folder, {n: t.bfloat16() if t.is_floating_point() else t for n, t in state.items()})
    model = Tied(seed=5)
    load_pretrained(folder, model)
    assert torch.equal(model.embed.weight, state["embed.weight"].bfloat16().float())
    write(folder, state | {"mask": state["mask"].long()})
    with pytest.raises(CheckpointMismatchError, match=r"mask is int64 \[5\] there and uint8 \[5\]"):
        load_pretrained(folder, model)


def test_names_that_differ_are_renamed(folder: Path) -> None:
    write(folder, {f"net.{name}": tensor for name, tensor in tensors().items()})
    model = Tied(seed=5)
    load_pretrained(folder, model, rename=lambda name: name.removeprefix("net."))
    assert_equal(model.state_dict())
    with pytest.raises(CheckpointMismatchError, match=r"it has no .* other names, give rename="):
        load_pretrained(folder, model)
    write(folder, tensors() | {"head.scale": torch.ones(1)})
    with pytest.raises(CheckpointMismatchError, match=r"no place for head\.scale\. With rename="):
        load_pretrained(folder, model)
    load_pretrained(folder, model, rename={"head.scale": None})
    with pytest.raises(CheckpointMismatchError, match=r"two tensors would be named mask"):
        load_pretrained(folder, model, rename={"head.scale": "mask"})


def test_tied_tensors_load_from_any_name_and_have_to_be_equal(folder: Path) -> None:
    state = tensors(seed=0)
    embed = state.pop("embed.weight")
    write(folder, state | {"head.weight": embed})
    model = Tied(seed=5)
    load_pretrained(folder, model)
    assert_equal(model.state_dict())
    write(folder, tensors(1) | {"head.weight": tensors(1)["embed.weight"].clone()})
    load_pretrained(folder, model)
    assert_equal(model.state_dict(), 1)
    write(folder, tensors(2) | {"head.weight": embed})
    with pytest.raises(CheckpointMismatchError, match=r"embed\.weight has several names"):
        load_pretrained(folder, model)
    assert_equal(model.state_dict(), 1)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"embed.weight": None}, r"it has no embed\.weight, which the model has"),
        ({"mask": torch.ones(6, dtype=torch.uint8)}, r"mask is uint8 \[6\] there and uint8 \[5\]"),
        ({"more": torch.ones(1)}, "the model has no place for more"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_changed_on_any_rank(
    folder: Path, change: dict[str, Any], problem: str
) -> None:
    changed = {name: t for name, t in (tensors() | change).items() if t is not None}
    write(folder, changed)

    def load(backend: Backend) -> None:
        model = FlatShards(Tied(seed=5), backend)
        before = [parameter.clone() for parameter in model.parameters()]
        with pytest.raises(CheckpointMismatchError, match=problem):
            load_pretrained(folder, model)
        assert all(map(torch.equal, before, model.parameters()))

    phalanx.simulate(load, 2)


def test_a_rank_that_cannot_read_fails_all_and_nothing_is_changed(folder: Path) -> None:
    write(folder)
    path = folder / SINGLE
    whole = path.read_bytes()

    def load(backend: Backend) -> None:
        place = folder if backend.rank == 0 else folder / "elsewhere"
        model = FlatShards(Tied(seed=5), backend)
        before = [parameter.clone() for parameter in model.parameters()]
        with pytest.raises(CheckpointNotFoundError, match=r"rank 1: there is neither"):
            load_pretrained(place, model)
        assert all(map(torch.equal, before, model.parameters()))

    phalanx.simulate(load, 2)
    path.write_bytes(whole[:-1])
    with pytest.raises(CheckpointDamagedError, match="cannot be bytes"):
        load_pretrained(folder, Tied())


def test_a_rank_reads_its_own_bytes_and_holds_its_share(folder: Path) -> None:
    count, ranks = 12 << 20, 3
    share = 4 * count // ranks
    save_file({"weight": torch.arange(count, dtype=torch.float32)}, folder / SINGLE)

    def load(backend: Backend) -> int:
        model = nn.Module()
        model.weight = nn.Parameter(torch.zeros(count))
        sharded = FlatShards(model, backend)
        with allocations() as allocated:
            load_pretrained(folder, sharded)
        ((name, part),) = sharded.named_parameters()
        _, start, stop = sharded.slices()[name]
        assert torch.equal(part, torch.arange(start, stop, dtype=torch.float32))
        return allocated.tensors

    with recorded(str(folder)) as operations:
        held = phalanx.simulate(load, ranks)
    reads = sum(operation.name == "preadv" for operation in operations)
    assert reads == ranks * (2 + share // (4 << 20))  # the header in two, the data by 4 MiB
    assert all(share <= most <= share + (64 << 20) for most in held)


def header(entries: dict[str, Any] | bytes, data: int = 16, announced: int | None = None) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    length = len(text) if announced is None else announced
    return length.to_bytes(8, "little") + text + bytes(data)


def entry(begin: Any = 0, end: Any = 16, shape: Any = (4,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def twice(one: dict[str, Any], other: dict[str, Any]) -> bytes:
    return f'{{"w": {json.dumps(one)}, "w": {json.dumps(other)}}}'.encode()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "ends at byte 0"),
        (header({}, announced=1 << 60), "announces a header of"),
        (header({}, announced=3, data=0), "announces a header of 3"),
        (header(b"{"), "cannot be read"),
        (header(b"[]"), "Expected `object`, got `array`"),
        (header(b"[" * 100_000), "cannot be read"),
        (header(twice(entry(), entry())), "a name is there twice"),
        (header(twice(entry(0, 8), entry(8, 16))), "a name is there twice"),
        (header({"w": 1}), "Expected `object`, got `int`"),
        (header({"w": {}}), "w lacks what says where it is"),
        (header({"w": entry(0, 17)}), "cannot be bytes 0:17"),
        (header({"w": entry(8, 24)}), "cannot be bytes 8:24 of 16"),
        (header({"w": entry(-16, 0)}), "Expected `int` >= 0"),
        (header({"w": entry(shape=[-4])}), "Expected `int` >= 0"),
        (header({"w": entry(shape=[4.0])}), "Expected `int`, got `float`"),
        (header({"w": entry(shape="4")}), "w lacks what says where it is"),
        (header({"w": entry(shape=[1] * 65)}), "length <= 64"),
        (header({"w": entry(shape=[1 << 63])}), "Expected `int` <= "),
        (header({"\x1b[2J": entry(dtype="\x1b]0;\x07")}), "is of dtype  ]0; , which"),
        (header({"w": entry(shape=[1 << 40, 1 << 40])}), "cannot be bytes 0:16"),
        (header({"w": entry(dtype="F3")}), "of dtype F3, which is not known"),
        (header({"w": entry(dtype=["F32"])}), "Expected `str`, got `array`"),
        (header({"w": entry(), "v": entry(4, 8, [1])}), "lies over another tensor"),
    ],
)
def test_a_hostile_header_is_refused(folder: Path, content: bytes, problem: str) -> None:
    (folder / SINGLE).write_bytes(content)
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(4))
    with pytest.raises((CheckpointDamagedError, CheckpointMismatchError), match=problem):
        load_pretrained(folder, model)
    assert model.w.tolist() == [0] * 4


@pytest.mark.parametrize(
    ("index", "problem"),
    [
        ("{}", "missing required field `weight_map`"),
        ('{"weight_map": {"w": "../x.safetensors"}}', "of names of files beside it"),
        ('{"weight_map": {"w": "/etc/passwd"}}', "of names of files beside it"),
        ('{"weight_map": {"w": "model.safetensors"}}', "says that w is in model.safetensors"),
    ],
)
def test_a_hostile_index_is_refused(folder: Path, index: str, problem: str) -> None:
    write(folder)
    (folder / INDEX).write_text(index)
    with pytest.raises(CheckpointDamagedError, match=problem):
        load_pretrained(folder, Tied())
