"""The state of a model that is cut: parts under the plain names, the whole, and back again."""

from __future__ import annotations

import copy

import pytest
import torch
from tensor_models import assert_all_close, batch, plan_for, transformer
from torch import Tensor, nn

from phalanx import (
    DDP,
    FSDP,
    Backend,
    DeviceMesh,
    Pipeline,
    PipelineParallelConfig,
    SizeMismatchError,
    parallelize,
    simulate,
)
from phalanx.tensor import full_state_dict, load_full_state_dict


def other() -> nn.Module:
    model = transformer()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    return model


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_the_parts_have_the_plain_models_names():
    plain = transformer()

    def run(backend: Backend) -> dict[str, list[int]]:
        model = parallelize(transformer(), backend, plan_for())
        names = [name for name, _ in model.named_parameters()]
        assert names == [name for name, _ in plain.named_parameters()]
        return {name: list(value.shape) for name, value in model.state_dict().items()}

    shapes = simulate(run, 4)
    assert list(shapes[0]) == list(plain.state_dict())
    assert [s["embed.weight"] for s in shapes] == [[4, 16], [3, 16], [3, 16], [3, 16]]
    assert [s["blocks.0.down.weight"] for s in shapes] == [[16, 12]] * 4
    assert [s["blocks.0.down.bias"] for s in shapes] == [[16]] * 4


class Versioned(nn.Linear):
    """A layer that converts the states of its former versions."""

    _version = 2

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest) -> None:
        assert local_metadata.get("version") == 2, "it would convert what is new"
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


@pytest.mark.parametrize("kind", ["DDP", "FSDP", "Pipeline", "parallelize"])
def test_layers_are_told_the_version_of_the_state_that_they_load(kind: str):
    def plain() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 2), Versioned(2, 2))

    def run(backend: Backend) -> None:
        make = {
            "DDP": lambda: DDP(plain(), backend),
            "FSDP": lambda: FSDP(plain(), backend),
            "Pipeline": lambda: Pipeline(plain(), backend, PipelineParallelConfig(2, 2)),
            "parallelize": lambda: parallelize(plain(), backend, {"0": "column"}),
        }
        model = make[kind]()
        model.load_state_dict(model.state_dict())
        whole = full_state_dict(model)
        load_full_state_dict(model, whole)
        if kind != "Pipeline":  # whose is that of this rank's layers
            plain().load_state_dict(whole)

    simulate(run, 2)


@pytest.mark.parametrize("ranks", [1, 2, 5, 8])
def test_the_whole_state_is_the_plain_models_to_the_bit(ranks: int):
    expected = transformer().state_dict()

    def run(backend: Backend) -> dict[str, Tensor]:
        return full_state_dict(parallelize(transformer(), backend, plan_for(sequence_dim=1)))

    for found in simulate(run, ranks):
        assert_equal(found, expected)


def test_only_rank_0_may_keep_the_whole():
    def run(backend: Backend) -> int:
        model = parallelize(transformer(), backend, plan_for())
        return len(full_state_dict(model, rank0_only=True))

    assert list(simulate(run, 3)) == [len(transformer().state_dict()), 0, 0]


@pytest.mark.parametrize("tied", [False, True])
def test_a_state_is_loaded_on_another_number_of_ranks(tied: bool):
    inputs, _ = batch()
    expected = transformer(tied=tied)
    with torch.no_grad():
        for p in expected.parameters():
            p.mul_(1.5)

    def save(backend: Backend) -> dict[str, Tensor]:
        model = parallelize(copy.deepcopy(expected), backend, plan_for())
        return full_state_dict(model)

    state = simulate(save, 3)[0]

    def load(backend: Backend) -> Tensor:
        model = parallelize(transformer(tied=tied), backend, plan_for())
        load_full_state_dict(model, state)
        assert_equal(full_state_dict(model), expected.state_dict())
        return model(inputs)

    torch.testing.assert_close(torch.cat(list(simulate(load, 4)), -1), expected(inputs))


def test_a_rank_loads_its_own_part_with_load_state_dict():
    def run(backend: Backend) -> None:
        model = parallelize(transformer(), backend, plan_for())
        mine = {name: value.clone() for name, value in model.state_dict().items()}
        load_full_state_dict(model, other().state_dict())
        model.load_state_dict(mine)
        assert_equal(full_state_dict(model), transformer().state_dict())

    simulate(run, 2)


def test_a_model_in_ddp_has_the_same_state():
    def run(backend: Backend) -> dict[str, Tensor]:
        mesh = DeviceMesh(backend, (2, 2), ("data", "tensor"))
        model = parallelize(transformer(), mesh["tensor"], plan_for())
        ddp = DDP(model, mesh["data"])
        load_full_state_dict(ddp, other().state_dict())
        return full_state_dict(ddp)

    for found in simulate(run, 4):
        assert_equal(found, other().state_dict())


def test_a_model_on_the_meta_device_is_cut_and_then_filled():
    def run(backend: Backend) -> dict[str, Tensor]:
        model = parallelize(transformer().to("meta"), backend, plan_for())
        assert all(p.is_meta for p in model.parameters())
        model.to_empty(device="cpu")
        load_full_state_dict(model, transformer().state_dict())
        return full_state_dict(model)

    for found in simulate(run, 2):
        assert_all_close(found, transformer().state_dict())


def test_a_state_of_other_sizes_is_refused_and_nothing_is_changed():
    def run(backend: Backend) -> None:
        model = parallelize(transformer(), backend, plan_for())
        before = {name: value.clone() for name, value in model.state_dict().items()}
        wrong = other().state_dict()
        wrong["norm.bias"] = torch.ones(17)
        with pytest.raises(SizeMismatchError, match=r"norm.bias is of shape \[16\] .* \[17\]"):
            load_full_state_dict(model, wrong)
        with pytest.raises(SizeMismatchError, match=r"shape \[13, 16\] in the whole model.*own"):
            load_full_state_dict(model, model.state_dict())
        assert_equal(model.state_dict(), before)

    simulate(run, 2)


def test_keys_that_are_missing_or_unknown_are_named():
    def run(backend: Backend) -> None:
        model = parallelize(transformer(), backend, plan_for())
        state = other().state_dict()
        state["extra"] = state.pop("head.bias")
        with pytest.raises(RuntimeError, match=r"(?s)head\.bias.*extra"):
            load_full_state_dict(model, state)
        load_full_state_dict(model, state, strict=False)
        assert torch.equal(model.norm.bias, other().norm.bias)

    simulate(run, 2)
