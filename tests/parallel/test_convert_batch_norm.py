"""The converter: every batch norm is replaced, and nothing else changes."""

from __future__ import annotations

import copy

import pytest
import torch
from ddp_models import noise, seeded
from ddp_runs import assert_same_bits, values
from torch import nn

from phalanx import Backend, UnsupportedOperationError, simulate
from phalanx.parallel import SyncBatchNorm, convert_sync_batchnorm


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm2d(2, momentum=None, eps=0.01)
        self.body = nn.Sequential(
            nn.Conv2d(2, 3, 1),
            nn.BatchNorm2d(3, affine=False),
            nn.ModuleDict({"deep": nn.BatchNorm3d(4, track_running_stats=False)}),
            nn.GroupNorm(1, 3),
            nn.InstanceNorm2d(3),
        )
        self.shared = nn.BatchNorm1d(5, momentum=0.25)
        self.again = self.shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body[:2](self.first(x))


SETTINGS = (
    "num_features",
    "eps",
    "momentum",
    "affine",
    "track_running_stats",
    "training",
    "weight",
    "bias",
    "running_mean",
    "running_var",
    "num_batches_tracked",
)


def test_every_batch_norm_is_replaced_and_keeps_all_that_it_has():
    def run(backend: Backend) -> None:
        model = seeded(Nested)
        model.body[1].eval()
        before = dict(model.named_modules())
        state = values(model)
        parameters = list(model.parameters())
        converted = convert_sync_batchnorm(model, backend)
        assert converted is model
        after = dict(model.named_modules())
        assert list(after) == list(before)
        for name, layer in before.items():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                assert type(after[name]) is SyncBatchNorm
                assert after[name].backend is backend
                for setting in SETTINGS:
                    assert getattr(after[name], setting) is getattr(layer, setting), setting
            else:
                assert after[name] is layer
        assert model.again is model.shared
        assert model.shared.label == "SyncBatchNorm shared"
        assert model.body[2].deep.label == "SyncBatchNorm body.2.deep"
        assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
        assert_same_bits([state, values(model)])
        model.load_state_dict(seeded(Nested, 5).state_dict())

    simulate(run, 2)


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d])
def test_a_module_that_is_itself_a_batch_norm_is_replaced(kind: type[nn.Module]):
    def run(backend: Backend) -> None:
        layer = kind(3, dtype=torch.float64)
        new = convert_sync_batchnorm(layer, backend)
        assert isinstance(new, SyncBatchNorm)
        assert new.weight is layer.weight
        assert new.weight.dtype is torch.float64
        assert convert_sync_batchnorm(new, backend).weight is layer.weight

    simulate(run, 1)


def test_hooks_and_devices_stay():
    def run(backend: Backend) -> None:
        layer = nn.BatchNorm1d(3, device="meta")
        assert convert_sync_batchnorm(layer, backend).weight.device.type == "meta"
        calls = []
        layer = nn.BatchNorm1d(3)
        handle = layer.register_forward_hook(lambda *_: calls.append("hook"))
        new = convert_sync_batchnorm(nn.Sequential(layer), backend)
        new(noise(4, 3))
        assert calls == ["hook"]
        handle.remove()
        new(noise(4, 3))
        assert calls == ["hook"]

    simulate(run, 1)


def test_a_model_without_batch_norm_is_returned_as_it_is():
    def run(backend: Backend) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
        layers = list(model)
        assert convert_sync_batchnorm(model, backend) is model
        assert list(model) == layers

    simulate(run, 1)


class Own(nn.BatchNorm2d):
    pass


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (lambda: Own(3), ["1.norm", "Own", "by hand"]),
        (nn.LazyBatchNorm2d, ["1.norm", "LazyBatchNorm2d", "one batch"]),
        (lambda: nn.SyncBatchNorm(3), ["1.norm", "torch.distributed"]),
    ],
    ids=["subclass", "lazy", "torch's"],
)
def test_other_kinds_are_refused_by_name_and_nothing_is_changed(layer, words: list[str]):
    def run(backend: Backend) -> None:
        first = nn.BatchNorm2d(3)
        model = nn.Sequential(first, nn.ModuleDict({"norm": layer()}))
        with pytest.raises(UnsupportedOperationError) as caught:
            convert_sync_batchnorm(model, backend)
        assert all(word in str(caught.value) for word in words)
        assert model[0] is first

    simulate(run, 1)


def test_a_lazy_one_that_has_run_is_converted():
    def run(backend: Backend) -> None:
        model = nn.Sequential(nn.LazyBatchNorm1d())
        model(noise(4, 3))
        assert isinstance(convert_sync_batchnorm(model, backend)[0], SyncBatchNorm)

    simulate(run, 1)


def test_a_copy_is_independent_and_for_the_same_ranks():
    def run(backend: Backend) -> bool:
        model = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3)), backend)
        other = copy.deepcopy(model)
        assert other[0].backend is backend
        other(noise(4, 3, seed=backend.rank))
        assert other[0].weight is not model[0].weight
        assert model[0].num_batches_tracked == 0
        return bool(other[0].num_batches_tracked == 1)

    assert list(simulate(run, 2)) == [True, True]


def test_a_converted_model_has_the_state_of_the_plain_one():
    def run(backend: Backend) -> None:
        model = convert_sync_batchnorm(seeded(Nested), backend)
        model(noise(2, 2, 3, 3, seed=backend.rank))
        plain = seeded(Nested, 3)
        plain.load_state_dict(model.state_dict())
        assert_same_bits([values(plain), values(model)])

    simulate(run, 2)
