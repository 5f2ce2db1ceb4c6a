"""torch's clipping is refused where gradients are parts; else they behave as plain tensors."""

from __future__ import annotations

import io
from collections.abc import Callable
from copy import copy, deepcopy
from typing import Any

import pytest
import torch
from ddp_models import seeded
from ddp_runs import outcome_of
from torch import Tensor, nn
from torch.nn import functional as F

from phalanx import (
    DDP,
    FSDP,
    Backend,
    DeviceMesh,
    LocalSGD,
    MisuseError,
    Pipeline,
    PipelineParallelConfig,
    ShardingStrategy,
    all_reduce,
    clip_grad_norm_,
    parallelize,
    simulate,
)
from phalanx.parallel.gradient_parts import GradientPart, mark_part


def mlp() -> nn.Sequential:
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)))
    assert isinstance(model, nn.Sequential)
    return model


def tensor_parallel(backend: Backend) -> nn.Module:
    return parallelize(mlp(), backend, {"0": "column", "2": "row"})


def backward(model: nn.Module) -> None:
    inputs, targets = torch.ones(2, 3), torch.ones(2, 2)
    if isinstance(model, Pipeline):
        model.train_step(inputs, targets, F.mse_loss)
    else:
        F.mse_loss(model(inputs), targets).backward()


def unit_behind_a_plain_layer(backend: Backend) -> nn.Module:
    model = mlp()
    model[2] = FSDP(model[2], backend)
    return model


def over_a_mesh(backend: Backend, wrap: Callable[[nn.Module, Backend], nn.Module]) -> nn.Module:
    mesh = DeviceMesh(backend, (1, 2), ("data", "tensor"))
    return wrap(tensor_parallel(mesh["tensor"]), mesh["data"])


PARTS: dict[str, Callable[[Backend], nn.Module]] = {
    "FSDP": lambda b: FSDP(mlp(), b),
    "a unit in FSDP": unit_behind_a_plain_layer,
    "tensor": tensor_parallel,
    "tensor in DDP": lambda b: over_a_mesh(b, DDP),
    "tensor in LocalSGD": lambda b: over_a_mesh(b, lambda m, data: LocalSGD(m, data, every=2)),
    "Pipeline": lambda b: Pipeline(mlp(), b, PipelineParallelConfig(2, 2, "zb_h1")),
}
WHOLE: dict[str, Callable[[Backend], nn.Module]] = {
    "NO_SHARD": lambda b: FSDP(mlp(), b, strategy=ShardingStrategy.NO_SHARD),
    "DDP": lambda b: DDP(mlp(), b),
    "LocalSGD": lambda b: LocalSGD(mlp(), b, every=2),
}
TORCHS: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "by default": lambda p: nn.utils.clip_grad_norm_(p, 0.1),
    "foreach": lambda p: nn.utils.clip_grad_norm_(p, 0.1, foreach=True),
    "one by one": lambda p: nn.utils.clip_grad_norm_(p, 0.1, foreach=False),
    "the total": lambda p: nn.utils.get_total_norm([q.grad for q in p if q.grad is not None]),
}


@pytest.mark.checkered
@pytest.mark.parametrize("torchs", TORCHS.values(), ids=TORCHS)
@pytest.mark.parametrize("make", PARTS.values(), ids=PARTS)
def test_torchs_norm_of_parts_is_refused_in_every_step(make: Any, torchs: Any):
    """Also of gradients that an optimizer has taken, and that are added to after it."""

    def run(backend: Backend) -> None:
        model = make(backend)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for keeps in (False, True, False):
            backward(model)
            before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            error = outcome_of(lambda: torchs(list(model.parameters())))
            assert isinstance(error, MisuseError)
            assert "call phalanx.clip_grad_norm_(model, max_norm) on every rank" in str(error)
            now = [p.grad for p in model.parameters() if p.grad is not None]
            assert all(map(torch.equal, now, before)), "nothing is scaled"
            clip_grad_norm_(model, 0.1)
            optimizer.step()
            optimizer.zero_grad(set_to_none=not keeps)

    simulate(run, 2)


@pytest.mark.parametrize("make", WHOLE.values(), ids=WHOLE)
def test_torchs_norm_of_whole_gradients_is_right(make: Any):
    def run(backend: Backend) -> None:
        model = make(backend)
        backward(model)
        norms = [torchs(list(model.parameters())).item() for torchs in TORCHS.values()]
        assert norms == pytest.approx([norms[0], 0.1, 0.1, 0.1], rel=1e-3)

    simulate(run, 2)


# What else is done with them ------------------------------------------------------------------


def part(values: Tensor) -> tuple[nn.Parameter, Any]:
    parameter = nn.Parameter(torch.zeros_like(values))
    parameter.grad = values.clone()
    mark_part(parameter)
    assert type(parameter.grad) is GradientPart
    return parameter, parameter.grad


VALUES = torch.tensor([3.0, -4.0])


def test_a_mark_changes_neither_the_gradient_nor_what_is_computed_of_it():
    parameter, gradient = part(VALUES)
    assert parameter.grad is gradient
    for found, expected in [
        (gradient + 1, VALUES + 1),
        (gradient.norm(), VALUES.norm()),
        (torch.linalg.vector_norm(gradient), VALUES.norm()),
        (torch._foreach_norm([gradient])[0], VALUES.norm()),
        (gradient.view(1, 2), VALUES.view(1, 2)),
        (gradient.detach(), VALUES),
        (gradient.data, VALUES),
        (gradient.abs().max(), torch.tensor(4.0)),
        (torch.stack([gradient, gradient]), torch.stack([VALUES, VALUES])),
    ]:
        assert type(found) is Tensor
        assert torch.equal(found, expected)
    assert gradient.tolist() == VALUES.tolist()
    assert gradient.numpy().tolist() == VALUES.tolist()
    assert "[ 3., -4.]" in repr(gradient)


@pytest.mark.parametrize("taken", [copy, deepcopy, lambda g: deepcopy([g, g])[1]])
def test_a_copy_is_a_plain_tensor(taken: Callable[[Tensor], Tensor]):
    found = taken(part(VALUES)[1])
    assert type(found) is Tensor
    assert torch.equal(found, VALUES)


def test_it_is_saved_as_a_plain_tensor():
    file = io.BytesIO()
    torch.save({"gradient": part(VALUES)[1]}, file)
    file.seek(0)
    found = torch.load(file, weights_only=True)["gradient"]
    assert type(found) is Tensor
    assert torch.equal(found, VALUES)


def test_values_are_clipped_added_to_and_zeroed_in_place():
    parameter, gradient = part(VALUES)
    nn.utils.clip_grad_value_([parameter], 3.5)
    assert gradient.tolist() == [3.0, -3.5]
    gradient.add_(torch.ones(2)).mul_(2)
    assert gradient.tolist() == [8.0, -5.0]
    (parameter * torch.tensor([1.0, 2.0])).sum().backward()
    assert gradient.tolist() == [9.0, -3.0]
    torch.optim.SGD([parameter]).zero_grad(set_to_none=False)
    assert parameter.grad is gradient
    assert gradient.tolist() == [0.0, 0.0]


def test_a_scaler_unscales_it():
    parameter, gradient = part(VALUES)
    optimizer = torch.optim.SGD([parameter], 1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    assert gradient.tolist() == [0.75, -1.0]
    scaler.step(optimizer)
    assert parameter.tolist() == [-0.75, 1.0]


def test_it_is_sent_as_any_tensor():
    assert all(
        torch.equal(found, 2 * VALUES)
        for found in simulate(lambda b: all_reduce(part(VALUES)[1], b), 2)
    )


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_an_optimizer_computes_with_a_plain_tensor(kind: Any, options: dict[str, bool]):
    """So that a step costs what it costs without marks."""
    parameter, gradient = part(VALUES)
    plain = nn.Parameter(torch.zeros(2))
    plain.grad = VALUES.clone()
    optimizer = kind([parameter], 0.1, **options)
    seen: list[type] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(type(parameter.grad)))
    optimizer.step()
    kind([plain], 0.1, **options).step()
    assert torch.equal(parameter, plain)
    assert parameter.grad is gradient
    assert type(gradient) is Tensor
