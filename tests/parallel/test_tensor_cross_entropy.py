"""parallel_cross_entropy is F.cross_entropy of logits that no rank ever has."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from ddp_models import noise
from ddp_runs import Watched, assert_same_bits, outcome_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from phalanx import (
    Backend,
    SimulatedBackend,
    SizeMismatchError,
    UnsupportedOperationError,
    simulate,
)
from phalanx.tensor import parallel_cross_entropy
from phalanx.tensor.shards import ShardSpec


def alone(logits: Tensor, targets: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """The loss, and the gradient of its sum."""
    z = logits.clone().requires_grad_()
    loss = F.cross_entropy(z, targets, **options)
    loss.sum().backward()
    assert z.grad is not None
    return loss.detach(), z.grad


def together(
    logits: Tensor, targets: Tensor, ranks: int, *, say: bool = True, **options: Any
) -> tuple[Tensor, Tensor]:
    """The same of each rank's own classes; the gradients joined."""
    classes = ShardSpec.of(logits.shape[-1], ranks)

    def run(backend: Backend) -> tuple[Tensor, Tensor]:
        z = classes.shard(logits, -1, backend.rank).clone().requires_grad_()
        number = {"num_classes": logits.shape[-1]} if say else {}
        loss = parallel_cross_entropy(z, backend, targets, **number, **options)
        loss.sum().backward()
        assert z.grad is not None
        return loss.detach(), z.grad

    results = list(simulate(run, ranks))
    assert_same_bits([{"loss": torch.nan_to_num(loss)} for loss, _ in results])
    return results[0][0], torch.cat([grad for _, grad in results], -1)


@settings(max_examples=50)
@given(
    ranks=st.integers(1, 8),
    more=st.integers(0, 9),
    rows=st.integers(0, 6),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    scale=st.sampled_from([1.0, 1e4]),
    ignore=st.sampled_from([-100, 0, 1]),
    say=st.booleans(),
    data=st.data(),
)
def test_values_and_gradients_are_those_of_the_joined_logits(
    ranks: int,
    more: int,
    rows: int,
    reduction: str,
    smoothing: float,
    scale: float,
    ignore: int,
    say: bool,
    data: st.DataObject,
):
    classes = ranks * (1 + more // ranks) if not say else ranks + more
    logits = scale * noise(rows, classes).double()
    drawn = data.draw(st.lists(st.integers(-1, classes - 1), min_size=rows, max_size=rows))
    targets = torch.tensor([ignore if y < 0 else y for y in drawn], dtype=torch.int64)
    options: dict[str, Any] = {
        "reduction": reduction,
        "label_smoothing": smoothing,
        "ignore_index": ignore,
    }
    if not bool(((targets >= 0) | (targets == ignore)).all()):
        return
    expected = alone(logits, targets, **options)
    found = together(logits, targets, ranks, say=say, **options)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, equal_nan=True)


@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (2, 1, 2)])
def test_classes_are_the_last_dim_and_the_others_are_rows(shape: tuple[int, ...]):
    logits = noise(*shape, 6)
    targets = torch.arange(math.prod(shape)).view(shape) % 6
    expected = F.cross_entropy(logits.reshape(-1, 6), targets.reshape(-1), reduction="none")
    loss, gradient = together(logits, targets, 3, reduction="none")
    torch.testing.assert_close(loss, expected.view(shape))
    assert gradient.shape == logits.shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_coarse_logits_are_computed_with_in_float32(dtype: torch.dtype):
    logits, targets = noise(5, 8).to(dtype), torch.tensor([0, 7, 3, 3, 1])
    exact, slope = alone(logits.float(), targets)
    loss, gradient = together(logits, targets, 2)
    assert loss.dtype is torch.float32
    assert gradient.dtype is dtype
    torch.testing.assert_close(loss, exact)
    torch.testing.assert_close(gradient, slope.to(dtype))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 1e38])
@pytest.mark.parametrize("where", [0, 5])
def test_what_is_not_finite_does_what_it_does_in_one_place(value: float, where: int):
    logits, targets = noise(3, 6), torch.tensor([0, 5, -100])
    logits[:, where] = value
    expected, slope = alone(logits, targets, reduction="none")
    found, gradient = together(logits, targets, 3, reduction="none")
    torch.testing.assert_close(found, expected, equal_nan=True)
    torch.testing.assert_close(gradient[:2], slope[:2], equal_nan=True)
    assert not gradient[2].any(), "what is ignored has a gradient"


@pytest.mark.parametrize("classes", [8, 4000])
@pytest.mark.parametrize(("smoothing", "numbers"), [(0.0, 3), (0.1, 4)])
def test_it_sends_a_few_numbers_a_row_however_many_classes_there_are(
    classes: int, smoothing: float, numbers: int
):
    rows, p = 5, 4

    def run(backend: Backend) -> int:
        z = noise(rows, classes // p).requires_grad_()
        watched = Watched(backend)
        parallel_cross_entropy(
            z,
            backend,
            torch.zeros(rows, dtype=torch.int64),
            num_classes=classes,
            label_smoothing=smoothing,
        ).backward()
        assert len(watched.events) == 2
        return watched.bytes_sent

    assert sum(simulate(run, p)) == 2 * (p - 1) * numbers * rows * 4


# What is refused ----------------------------------------------------------------------------


def test_classes_that_are_not_evenly_cut_are_found_on_every_rank():
    def run(backend: Backend) -> BaseException | None:
        z = noise(2, 3 - backend.rank)
        targets = torch.tensor([0, 4])  # a class, of five
        return outcome_of(lambda: parallel_cross_entropy(z, backend, targets))

    for rank, error in enumerate(simulate(run, 2)):
        assert isinstance(error, SizeMismatchError)
        assert f"rank {rank}:" in str(error)
        assert "from 2 to 3 classes each" in str(error)
        assert "num_classes=" in str(error)


@pytest.mark.parametrize("say", [True, False])
@pytest.mark.parametrize("target", [-1, 6])
def test_a_target_that_is_no_class_is_refused_on_every_rank(target: int, say: bool):
    def run(backend: Backend) -> None:
        number = {"num_classes": 6} if say else {}
        with pytest.raises(IndexError, match=f"target {target} is no class: there are 6"):
            parallel_cross_entropy(noise(2, 3), backend, torch.tensor([0, target]), **number)

    simulate(run, 2)


Y = torch.tensor([0, 1])
WRONG: dict[str, tuple[Tensor, Tensor, dict[str, Any], type[Exception], str]] = {
    "rows": (torch.ones(3, 2), Y, {}, ValueError, r"targets of shape \[2\] do not fit"),
    "no dim": (torch.tensor(1.0), Y[0], {}, ValueError, "do not fit"),
    "no classes": (torch.ones(2, 0), Y, {}, ValueError, "one"),
    "reduction": (torch.ones(2, 2), Y, {"reduction": "max"}, ValueError, "mean, sum, none"),
    "smoothing": (torch.ones(2, 2), Y, {"label_smoothing": 1.5}, ValueError, "from 0 to 1"),
    "few": (torch.ones(2, 2), Y, {"num_classes": 1}, ValueError, "num_classes 1 .* 2 ranks"),
    "other": (torch.ones(2, 2), Y, {"num_classes": 9}, SizeMismatchError, "of 9 classes .* 5"),
    "numbers": (torch.ones(2, 2).long(), Y, {}, UnsupportedOperationError, "int64"),
    "chances": (torch.ones(2, 2), Y.float(), {}, UnsupportedOperationError, "probabilities"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_use_is_refused_before_anything_is_sent(case: str):
    logits, targets, options, kind, message = WRONG[case]
    backend, _ = SimulatedBackend.create_group(2, timeout=1.0)
    with pytest.raises(kind, match=message):
        parallel_cross_entropy(logits, backend, targets, **options)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_gradients_of_gradients_are_those_of_the_joined_logits(smoothing: float):
    logits, targets = noise(4, 7).double(), torch.tensor([6, 0, -100, 3])

    def penalty(loss: Tensor, z: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(loss.pow(2), z, create_graph=True)
        return slope.pow(3).sum()

    z = logits.clone().requires_grad_()
    penalty(F.cross_entropy(z, targets, label_smoothing=smoothing), z).backward()
    classes = ShardSpec.of(7, 3)

    def run(backend: Backend) -> Tensor:
        own = classes.shard(logits, -1, backend.rank).clone().requires_grad_()
        loss = parallel_cross_entropy(
            own, backend, targets, num_classes=7, label_smoothing=smoothing
        )
        penalty(loss, own).backward()
        assert own.grad is not None
        return own.grad

    torch.testing.assert_close(torch.cat(list(simulate(run, 3)), -1), z.grad)
