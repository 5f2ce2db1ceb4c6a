"""`step` in training: what follows it, what is left over of it, and steps in `join`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from ddp_runs import gradients, values
from fsdp_runs import COMMON, COOPERATIVE, SHARD_GRAD_OP, gradient_pieces, joined
from joined_runs import (
    BY_MESSAGES,
    SHARDED,
    SPLITS,
    UNEVEN,
    WITH_DDP,
    Split,
    alone,
    assert_equal_to_rounding,
    batch,
    both,
    build,
    few,
    gradients_alone,
    gradients_of_steps,
    loss_on,
    sum_of_losses,
    take_step,
)
from residuals import lacking
from torch import Tensor, nn
from wrappings import Wrapping, every_wrapping

import phalanx
from phalanx import DDP, FSDP, Backend, ErrorFeedback, ShardingStrategy, TopK, simulate

# What follows -------------------------------------------------------------------------------------


@every_wrapping(among=[WITH_DDP, SHARDED, Wrapping(FSDP, {"strategy": SHARD_GRAD_OP}, COMMON)])
def test_the_norm_is_that_of_one_process_and_clipped_by_it(wrap: Wrapping):
    def body(model: nn.Module, backend: Backend) -> Any:
        wrapped = wrap(model, backend)
        take_step(wrapped, backend.rank, UNEVEN)
        norms = [phalanx.clip_grad_norm_(wrapped, bound).item() for bound in (0.1, 1e9)]
        return gradient_pieces(wrapped), norms

    plain = build()
    alone(plain, UNEVEN)
    right = [nn.utils.clip_grad_norm_(plain.parameters(), b).item() for b in (0.1, 1e9)]
    found = wrap.on_ranks(3, build, body)
    assert_equal_to_rounding(joined([pieces for pieces, _ in found]), gradients(plain))
    for _, norms in found:
        assert norms == pytest.approx(right, rel=1e-12)


@pytest.mark.checkered
@both
@pytest.mark.parametrize("kind", ["torch", "phalanx"])
def test_a_scaler_finds_scaled_gradients_and_the_loss_has_its_scale(wrap: Wrapping, kind: str):
    split = [[2, 1], [1], [1, 3, 2]]

    def body(model: nn.Module, backend: Backend) -> Any:
        wrapped = wrap(model, backend)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        options = {"device": "cpu", "init_scale": 1024.0}
        ours = kind == "phalanx"
        scaler = phalanx.GradScaler(backend, **options) if ours else torch.amp.GradScaler(**options)

        def scaled(*given: Any) -> Tensor:
            return scaler.scale(loss_on(*given))

        step = take_step(wrapped, backend.rank, split, loss=scaled)
        assert step.loss / scaler.get_scale() == pytest.approx(loss, rel=1e-12)
        scaler.unscale_(optimizer)
        pieces = gradient_pieces(wrapped)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 1024.0
        return pieces

    plain = build()
    loss = alone(plain, split).item()
    assert_equal_to_rounding(joined(wrap.on_ranks(3, build, body)), gradients(plain))


@both
def test_an_overflow_of_one_rank_is_a_step_that_none_takes(wrap: Wrapping):
    def body(model: nn.Module, backend: Backend) -> Any:
        wrapped = wrap(model, backend)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        scaler = phalanx.GradScaler(backend, init_scale=4.0)
        before = wrap.state(wrapped)

        def scaled(*given: Any) -> Tensor:
            return scaler.scale(loss_on(*given)) * (math.inf if given[1] == 2 else 1)

        take_step(wrapped, backend.rank, UNEVEN, loss=scaled)
        scaler.step(optimizer)
        scaler.update()
        after = wrap.state(wrapped)
        assert all(torch.equal(after[name], value) for name, value in before.items())
        return scaler.get_scale()

    assert wrap.on_ranks(3, build, body) == [2.0] * 3


def test_skip_nonfinite_skips_a_step_on_ranks_without_a_micro_batch_too():
    def run(backend: Backend) -> Any:
        ddp = DDP(build(), backend, skip_nonfinite=True)

        def bad(*given: Any) -> Tensor:
            return loss_on(*given) * (math.nan if given[1] == 2 else 1)

        take_step(ddp, backend.rank, UNEVEN, loss=bad)
        assert all(grad is None for grad in gradients(ddp).values())
        take_step(ddp, backend.rank, UNEVEN)
        return ddp.skipped_steps, gradients(ddp)

    for skipped, found in simulate(run, 3):
        assert skipped == 1
        assert_equal_to_rounding(found, gradients_alone(UNEVEN))


def test_mixed_precision_and_autocast_are_right_to_their_rounding():
    def in_bfloat16(*given: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x, y = batch(*given[1:])
            outputs = given[0](x.float())
        return sum_of_losses(outputs.float(), y.float())

    def take(model: Any, rank: int, split: Split) -> None:
        take_step(model, rank, split, loss=in_bfloat16)

    def make() -> nn.Module:
        return build().float()

    expected = gradients_alone(UNEVEN, make, loss=in_bfloat16)
    for wrap in (WITH_DDP, SHARDED):
        (found,) = gradients_of_steps(wrap, UNEVEN, make=make, take=take)
        assert_equal_to_rounding(found, expected, 0.02)
    exact = {n: g.float() for n, g in gradients_alone(UNEVEN).items()}
    options = {"mixed_precision": torch.bfloat16}
    (found,) = gradients_of_steps(SHARDED, UNEVEN, make=make, take=single_precision, fsdp=options)
    assert_equal_to_rounding(found, exact, 0.05)


def single_precision(model: Any, rank: int, split: Split) -> None:
    def loss(*given: Any) -> Tensor:
        x, y = batch(*given[1:])
        return sum_of_losses(model(x.float()).float(), y.float())

    take_step(model, rank, split, loss=loss)


HYBRID = Wrapping(FSDP, {"strategy": ShardingStrategy.hybrid(2)}, COOPERATIVE)


@pytest.mark.parametrize(
    ("wrap", "split"),
    [
        (WITH_DDP, [[2, 1], [3], [1]]),
        (SHARDED, [[2, 1], [3], [1]]),
        (HYBRID, [[2], [1], [1, 3], [2, 1]]),
    ],
    ids=["DDP", "FULL_SHARD", "hybrid"],
)
def test_what_is_sent_and_what_is_left_over_are_the_weighted_gradient(wrap: Wrapping, split: Split):
    """Also of ranks that have no micro-batch any more, or none that counts: they send the rest."""
    *most, _ = split
    splits = [split, [*([] for _ in most), [2]], [*([0] for _ in most), [1, 1]], split]

    def body(model: nn.Module, backend: Backend) -> Any:
        wrapped = wrap(
            model,
            backend,
            ddp={"compression": ErrorFeedback(TopK(0.1))},
            fsdp={"compression": ErrorFeedback(TopK(0.1))},
        )
        optimizer, found = torch.optim.SGD(wrapped.parameters(), lr=0.0), []
        for number, each in enumerate(splits):
            wrapped.zero_grad()
            take_step(wrapped, backend.rank, each, shift=10 * number)
            found.append(gradient_pieces(wrapped))
            optimizer.step()  # which counts: residuals are the next step's
        return found, wrapped.own_state()

    per_rank = wrap.on_ranks(len(split), build, body)
    sent = [joined(pieces) for pieces in zip(*(found for found, _ in per_rank), strict=True)]
    left = lacking([state for _, state in per_rank], {n: p.numel() for n, p in sizes().items()})
    plain = build()
    for number, each in enumerate(splits):
        alone(plain, each, shift=10 * number)
    for name, right in gradients(plain).items():
        total = sum(one[name] if one[name] is not None else 0 for one in sent) + left[name].view(
            right.shape
        )
        assert (total - right).norm() <= 1e-12 * right.norm(), name
    assert any(rest.norm() > 0 for rest in left.values())


def sizes() -> dict[str, Tensor]:
    return dict(build().named_parameters())


@every_wrapping(among=[SHARDED, BY_MESSAGES])
def test_optimizers_in_hooks_step_on_every_rank(wrap: Wrapping):
    def body(model: nn.Module, backend: Backend) -> Any:
        wrapped = wrap(model, backend)
        for parameter in wrapped.parameters():
            own = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
            parameter.register_post_accumulate_grad_hook(
                lambda p, own=own: (own.step(), own.zero_grad())
            )
        for number, split in enumerate(SPLITS):
            take_step(wrapped, backend.rank, split, shift=10 * number)
        return wrap.state(wrapped)

    plain = build()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for number, split in enumerate(SPLITS):
        alone(plain, split, shift=10 * number)
        optimizer.step()
        optimizer.zero_grad()
    for state in wrap.on_ranks(3, build, body):
        assert_equal_to_rounding(state, values(plain), 1e-10)


@both
def test_a_checkpoint_after_it_has_the_trained_model(wrap: Wrapping, tmp_path: Any):
    def body(model: nn.Module, backend: Backend) -> Any:
        wrapped = wrap(model, backend)
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.1, eps=0.1)
        take_step(wrapped, backend.rank, SPLITS[0])
        optimizer.step()
        phalanx.save_checkpoint(
            tmp_path, model=wrapped, optimizer=optimizer, step=1, backend=backend
        )
        take_step(wrapped, backend.rank, SPLITS[1])
        optimizer.step()
        phalanx.load_checkpoint(tmp_path, model=wrapped, optimizer=optimizer, backend=backend)
        return wrap.state(wrapped)

    plain = build()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1, eps=0.1)
    alone(plain, SPLITS[0])
    optimizer.step()
    for state in wrap.on_ranks(3, build, body):
        assert_equal_to_rounding(state, values(plain))


# In join ------------------------------------------------------------------------------------------


@pytest.mark.checkered
@few
@pytest.mark.parametrize("zeroed", ["by step", "before the loop's step", "never"])
def test_steps_in_join_are_those_of_the_ranks_that_have_a_batch(wrap: Wrapping, zeroed: str):
    """A rank that is through has gradients of its own, which do not count any more."""
    steps = [3, 1, 0]
    split = [[1, 2], [3], [2]]

    def parts(number: int) -> Split:
        return [own if number < steps[rank] else [] for rank, own in enumerate(split)]

    def body(model: nn.Module, backend: Backend) -> Any:
        wrapped, rank = wrap(model, backend), backend.rank
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)

        def step() -> None:
            optimizer.step()
            if zeroed == "by step":
                optimizer.zero_grad()

        for epoch in range(2):
            with wrapped.join(step):
                for number in range(steps[rank]):
                    if zeroed == "before the loop's step":
                        optimizer.zero_grad()
                    take_step(wrapped, rank, split, shift=100 * epoch + 10 * number)
                    step()
        return wrap.state(wrapped)

    plain = build()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(2):
        for number in range(3):
            if zeroed != "never":
                optimizer.zero_grad()
            alone(plain, parts(number), shift=100 * epoch + 10 * number)
            optimizer.step()
    for state in wrap.on_ranks(3, build, body):
        assert_equal_to_rounding(state, values(plain), 1e-10)
