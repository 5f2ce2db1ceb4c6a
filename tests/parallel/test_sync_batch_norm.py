"""SyncBatchNorm on parts of a batch is plain batch norm on the whole of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from clusters import Cluster
from ddp_models import noise
from ddp_runs import Watched, outcome_of
from torch import Tensor, nn

from phalanx import Backend, DesyncError, UnsupportedOperationError, all_reduce, simulate
from phalanx.parallel import SyncBatchNorm, convert_sync_batchnorm

C = 3
PLAIN = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
SPATIAL: dict[int, tuple[int, ...]] = {2: (), 3: (5,), 4: (3, 2), 5: (2, 1, 3)}
SHARES = [(4, 4), (1, 6), (5, 0), (0, 3), (2, 0, 3), (1, 2, 0, 4), (7,), (1, 1)]
EXACT = {"rtol": 1e-11, "atol": 1e-12}


def batch(rows: int, dim: int = 4, seed: int = 0) -> Tensor:
    return noise(rows, C, *SPATIAL[dim], seed=seed).double() * 3 + 2


def steepness(like: Tensor) -> Tensor:
    """What the loss multiplies outputs with, so that every output has another gradient."""
    return noise(*like.shape, seed=77).double()


def prepared(layer: Any) -> Any:
    """In float64, with scales and offsets that matter."""
    layer.double()
    if layer.weight is not None:
        with torch.no_grad():
            layer.weight.copy_(torch.tensor([0.5, -2.0, 1.5]))
            layer.bias.copy_(torch.tensor([0.1, 0.2, -0.3]))
    return layer


def cut(joined: Tensor, shares: Sequence[int], rank: int) -> Tensor:
    start = sum(shares[:rank])
    return joined[start : start + shares[rank]]


def outcome(layer: Any, x: Tensor, slope: Tensor) -> dict[str, Tensor | None]:
    """One step forward and backward, and what it leaves behind."""
    x = x.clone().requires_grad_()
    y = layer(x)
    (y * slope).sum().backward()
    return {
        "output": y.detach(),
        "gradient of the input": x.grad,
        "gradient of weight": layer.weight.grad if layer.weight is not None else None,
        "gradient of bias": layer.bias.grad if layer.bias is not None else None,
    }


def state(layer: Any) -> list[Tensor]:
    return [b.clone() for b in (layer.running_mean, layer.running_var, layer.num_batches_tracked)]


OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "cumulative": {"momentum": None},
    "momentum and eps": {"momentum": 0.37, "eps": 0.1},
    "not affine": {"affine": False},
}


@pytest.mark.checkered
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("shares", SHARES, ids=str)
@pytest.mark.parametrize("dim", [2, 3, 4, 5])
def test_three_steps_equal_those_of_plain_batch_norm_on_the_joined_batch(dim, shares, options):
    def run(backend: Backend):
        layer = prepared(SyncBatchNorm(C, backend, **options))
        steps = []
        for number in range(3):
            x = batch(sum(shares), dim, number)
            mine, slope = (cut(t, shares, backend.rank) for t in (x, steepness(x)))
            layer.zero_grad()
            steps.append((outcome(layer, mine, slope), state(layer)))
        layer.eval()
        return steps, layer(batch(2, dim, 99))

    ranks = list(simulate(run, len(shares)))
    plain = prepared(PLAIN[dim](C, **options))
    for number in range(3):
        x = batch(sum(shares), dim, number)
        plain.zero_grad()
        expected = outcome(plain, x, steepness(x))
        found = [steps[number][0] for steps, _ in ranks]
        for what in ("output", "gradient of the input"):
            joined = torch.cat([f[what] for f in found])
            torch.testing.assert_close(joined, expected[what], **EXACT)
        for what in ("gradient of weight", "gradient of bias"):
            if expected[what] is not None:
                total = torch.stack([f[what] for f in found]).sum(0)
                torch.testing.assert_close(total, expected[what], **EXACT)
        for steps, _ in ranks:
            for mine, theirs, wanted in zip(
                steps[number][1], ranks[0][0][number][1], state(plain), strict=True
            ):
                assert torch.equal(mine, theirs)
                torch.testing.assert_close(mine, wanted, **EXACT)
    plain.eval()
    for _, evaluated in ranks:
        torch.testing.assert_close(evaluated, plain(batch(2, dim, 99)), **EXACT)


def test_it_is_right_on_every_kind_of_backend(cluster: Cluster):
    shares = (3, 0, 2)
    x = batch(5)

    def run(backend: Backend):
        layer = prepared(SyncBatchNorm(C, backend))
        mine, slope = (cut(t, shares, backend.rank) for t in (x, steepness(x)))
        return outcome(layer, mine, slope)

    expected = outcome(prepared(nn.BatchNorm2d(C)), x, steepness(x))
    found = cluster.run(run, 3)
    for what in ("output", "gradient of the input"):
        torch.testing.assert_close(torch.cat([f[what] for f in found]), expected[what], **EXACT)


def test_a_gradient_check_of_two_ranks_as_one_function():
    """The Jacobian, by differences: what rank 0 gets back depends on rank 1's batch, too."""

    def run(backend: Backend) -> bool:
        layer = prepared(SyncBatchNorm(C, backend))
        x = batch(2, 2, backend.rank).requires_grad_()
        slope = steepness(x) + backend.rank
        (layer(x) * slope).sum().backward()
        h, worst = 1e-6, 0.0
        for owner in range(backend.world_size):
            for place in range(x.numel()):
                losses = []
                for sign in (1, -1):
                    moved = x.detach().clone()
                    if backend.rank == owner:
                        moved.view(-1)[place] += sign * h
                    with torch.no_grad():
                        loss = (layer(moved) * slope).sum()
                    losses.append(all_reduce(loss, backend).item())
                if backend.rank == owner:
                    by_difference = (losses[0] - losses[1]) / (2 * h)
                    worst = max(worst, abs(by_difference - x.grad.view(-1)[place].item()))
        return worst < 1e-7

    assert list(simulate(run, 2)) == [True, True]


def test_a_mean_that_is_large_beside_the_deviation_costs_no_digits():
    shares = (8, 3)
    x = noise(11, C, 4).double() * 1e-2 + 1e6

    def run(backend: Backend) -> Tensor:
        layer = SyncBatchNorm(C, backend, eps=1e-12, dtype=torch.float64)
        return layer(cut(x, shares, backend.rank)).detach()

    plain = nn.BatchNorm1d(C, eps=1e-12, dtype=torch.float64)
    found = torch.cat(list(simulate(run, 2)))
    torch.testing.assert_close(found, plain(x).detach(), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("parameters", ["half", "float32"])
def test_half_precision_inputs_have_statistics_in_float32(dtype: torch.dtype, parameters: str):
    shares = (5, 2)
    x = (batch(7) * 4 + 100).to(dtype)

    def run(backend: Backend):
        layer = SyncBatchNorm(C, backend).to(dtype if parameters == "half" else torch.float32)
        mine = cut(x, shares, backend.rank).clone().requires_grad_()
        y = layer(mine)
        y.float().pow(3).sum().backward()
        assert y.dtype == mine.grad.dtype == dtype
        assert layer.weight.grad.dtype == layer.weight.dtype
        return y.detach(), layer.running_mean

    plain = nn.BatchNorm2d(C)
    expected = plain(x.float()).detach()
    found = list(simulate(run, 2))
    error = (torch.cat([y for y, _ in found]).float() - expected).abs().max().item()
    assert error < 4 * torch.finfo(dtype).eps  # of a value of 2 to 4: rounded once, at the end
    torch.testing.assert_close(
        found[0][1].float(), plain.running_mean, rtol=torch.finfo(dtype).eps, atol=1e-3
    )


def test_under_autocast_it_takes_what_comes_and_gives_the_same_dtype():
    def run(backend: Backend) -> tuple[torch.dtype, torch.dtype, bool]:
        model = nn.Sequential(nn.Conv2d(C, C, 1), SyncBatchNorm(C, backend))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(batch(3, seed=backend.rank).float())
        y.float().pow(2).sum().backward()
        return y.dtype, model[1].running_mean.dtype, model[0].weight.grad.isfinite().all().item()

    assert list(simulate(run, 2)) == [(torch.bfloat16, torch.float32, True)] * 2


def test_the_memory_format_stays():
    def run(backend: Backend) -> bool:
        x = batch(3, seed=backend.rank).contiguous(memory_format=torch.channels_last)
        x.requires_grad_()
        y = prepared(SyncBatchNorm(C, backend))(x)
        (y * steepness(y)).sum().backward()
        return all(
            t.is_contiguous(memory_format=torch.channels_last) and not t.is_contiguous()
            for t in (y, x.grad)
        )

    assert list(simulate(run, 2)) == [True, True]


@pytest.mark.parametrize("shares", [(1, 0), (0, 1), (0, 1, 0)], ids=str)
def test_one_value_per_channel_in_all_ranks_is_plain_batch_norm_s_error_on_every_rank(shares):
    x = batch(1, 2)

    def run(backend: Backend) -> BaseException | None:
        layer = prepared(SyncBatchNorm(C, backend))
        return outcome_of(lambda: layer(cut(x, shares, backend.rank)))

    plain = outcome_of(lambda: prepared(nn.BatchNorm1d(C))(x))
    for error in simulate(run, len(shares)):
        assert type(error) is type(plain) is ValueError
        assert str(error).startswith(str(plain).split(", got")[0])


def test_batches_that_are_empty_everywhere_leave_the_statistics_alone():
    def run(backend: Backend):
        layer = prepared(SyncBatchNorm(C, backend))
        found = outcome(layer, batch(0), batch(0))
        return [found["gradient of weight"], found["gradient of the input"], *state(layer)]

    plain = prepared(nn.BatchNorm2d(C))
    expected = outcome(plain, batch(0), batch(0))
    wanted = [expected["gradient of weight"], expected["gradient of the input"], *state(plain)]
    for found in simulate(run, 2):
        for mine, theirs in zip(found, wanted, strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("tracked", [True, False])
def test_in_eval_mode_nothing_is_sent_and_one_rank_alone_may_call(tracked: bool):
    def run(backend: Backend) -> None:
        layer = prepared(SyncBatchNorm(C, backend, track_running_stats=tracked)).eval()
        plain = prepared(nn.BatchNorm2d(C, track_running_stats=tracked)).eval()
        if backend.rank == 1:
            watched = Watched(backend)
            x = batch(4)
            torch.testing.assert_close(layer(x), plain(x), **EXACT)
            assert watched.events == []

    simulate(run, 2)


WIDE = [torch.float32, torch.float64]


@pytest.mark.parametrize("parameters", WIDE)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, *WIDE])
def test_in_eval_mode_too_inputs_are_of_any_dtype(dtype: torch.dtype, parameters: torch.dtype):
    def run(backend: Backend) -> None:
        layer = prepared(SyncBatchNorm(C, backend)).to(parameters).eval()
        plain = prepared(nn.BatchNorm2d(C)).eval()
        x = batch(4).to(dtype)
        y = layer(x)
        assert y.dtype is dtype
        eps = torch.finfo(min(dtype, parameters, key=lambda each: each.itemsize)).eps
        torch.testing.assert_close(y.double(), plain(x.double()), rtol=4 * eps, atol=4 * eps)

    simulate(run, 1)


def test_without_gradients_one_message_is_sent_and_statistics_are_tracked():
    def run(backend: Backend) -> list[Tensor]:
        layer = prepared(SyncBatchNorm(C, backend))
        watched = Watched(backend)
        with torch.no_grad():
            layer(batch(2, seed=backend.rank))
        assert [event.split()[0] for event in watched.events] == ["all_gather"]
        return state(layer)

    plain = prepared(nn.BatchNorm2d(C))
    plain(torch.cat([batch(2), batch(2, seed=1)]))
    for found in simulate(run, 2):
        for mine, theirs in zip(found, state(plain), strict=True):
            torch.testing.assert_close(mine, theirs, **EXACT)


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_a_step_sends_one_small_message_each_way(world_size: int):
    def run(backend: Backend) -> tuple[list[str], int]:
        layer = prepared(SyncBatchNorm(C, backend))
        watched = Watched(backend)
        outcome(layer, batch(2), batch(2))
        return [event.split()[0] for event in watched.events], watched.bytes_sent

    for names, sent in simulate(run, world_size):
        assert names == ["all_gather", "all_reduce"]
        assert sent <= 2 * world_size * (2 * C + 1) * 8


def test_an_input_without_a_gradient_needs_no_message_on_the_way_back():
    def run(backend: Backend) -> Tensor:
        layer = prepared(SyncBatchNorm(C, backend))
        x = batch(2, seed=backend.rank)
        watched = Watched(backend)
        (layer(x) * steepness(x)).sum().backward()
        assert [event.split()[0] for event in watched.events] == ["all_gather"]
        return layer.weight.grad

    plain = prepared(nn.BatchNorm2d(C))
    x = [batch(2), batch(2, seed=1)]
    (plain(torch.cat(x)) * torch.cat([steepness(x[0])] * 2)).sum().backward()
    total = torch.stack(list(simulate(run, 2))).sum(0)
    torch.testing.assert_close(total, plain.weight.grad, **EXACT)


def test_it_cannot_be_differentiated_twice_and_says_so():
    def run(backend: Backend) -> None:
        layer = prepared(SyncBatchNorm(C, backend))
        x = batch(3).requires_grad_()
        (first,) = torch.autograd.grad(layer(x).pow(3).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="twice"):
            first.sum().backward()

    simulate(run, 2)


def test_ranks_that_are_in_different_layers_are_told_which():
    """Their messages have the same size: without the names it would be a wrong number."""

    def run(backend: Backend) -> BaseException | None:
        model = nn.ModuleDict({"left": nn.BatchNorm2d(C), "right": nn.BatchNorm2d(C)})
        convert_sync_batchnorm(model, backend)
        name = "left" if backend.rank else "right"
        return outcome_of(lambda: model[name](batch(2).float()))

    for error in simulate(run, 2):
        assert isinstance(error, DesyncError)
        assert "SyncBatchNorm left" in str(error)
        assert "SyncBatchNorm right" in str(error)


def test_ranks_that_go_back_through_layers_in_another_order_are_told():
    def run(backend: Backend) -> BaseException | None:
        model = nn.ModuleDict({"left": nn.BatchNorm2d(C), "right": nn.BatchNorm2d(C)})
        convert_sync_batchnorm(model, backend)
        x = [batch(2, seed=s).float().requires_grad_() for s in range(2)]
        outputs = [model["left"](x[0]).sum(), model["right"](x[1]).sum()]
        backend.barrier()
        return outcome_of(outputs[backend.rank].backward)

    for error in simulate(run, 2):
        assert isinstance(error, DesyncError)
        assert "SyncBatchNorm left" in str(error)


@pytest.mark.parametrize(
    ("x", "kind", "message"),
    [
        (torch.ones(3), ValueError, "2D to 5D"),
        (torch.ones(2, 4), ValueError, "3 channels"),
        (torch.ones(2, 3, 1, 1, 1, 1), ValueError, "2D to 5D"),
        (torch.ones(2, 3, dtype=torch.int64), UnsupportedOperationError, "int64"),
    ],
)
def test_wrong_inputs_are_refused_before_anything_is_sent(x: Tensor, kind, message: str):
    def run(backend: Backend) -> None:
        layer = SyncBatchNorm(C, backend)
        watched = Watched(backend)
        with pytest.raises(kind, match=message):
            layer(x)
        assert watched.events == []

    simulate(run, 2)
