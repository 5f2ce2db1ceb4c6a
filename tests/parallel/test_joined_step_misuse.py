"""`step`: what is refused, in words, on every rank; and what ranks hear of one that differs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ddp_models import Fails, mlp, noise
from ddp_runs import gradients, outcome_of
from fsdp_runs import gradient_pieces, joined
from joined_runs import (
    BY_MESSAGES,
    REPLICATED,
    SHARDED,
    WITH_DDP,
    Split,
    alone,
    assert_equal_to_rounding,
    batch,
    both,
    build,
    few,
    loss_on,
    sum_of_losses,
    take_step,
)
from torch import Tensor, nn
from wrappings import Wrapping, every_wrapping

from phalanx import DDP, Backend, DesyncError, DistributedError, MisuseError, simulate
from phalanx.parallel import convert_sync_batchnorm

Do = Callable[[Any, Backend], Any]


def errors_of(wrap: Wrapping, do: Do, ranks: int = 2) -> list[BaseException]:
    """What each rank raises, in this step or in its next call."""

    def body(model: nn.Module, backend: Backend) -> BaseException | None:
        wrapped = wrap(model, backend)
        backend.barrier()
        return outcome_of(lambda: do(wrapped, backend)) or outcome_of(backend.barrier)

    found = wrap.on_ranks(ranks, build, body)
    assert all(found), f"some ranks are told of nothing: {found}"
    return found


# A step that cannot begin: the group goes on ------------------------------------------------------

BAD_WEIGHTS: list[tuple[Any, str]] = [
    (-1, "number of at least 0, not -1"),
    (math.nan, "not nan"),
    (math.inf, "not inf"),
    (torch.tensor(2.0, requires_grad=True), "has a gradient"),
    (torch.ones(2), "2 elements|scalar"),
    (True, "not True"),
    ("3", "not '3'"),
    (None, "NoneType"),
    (10**400, "too large"),
]


@pytest.mark.checkered
@pytest.mark.parametrize("everywhere", [True, False], ids=["every rank", "one rank"])
@pytest.mark.parametrize(("weight", "words"), BAD_WEIGHTS, ids=lambda value: str(value)[:12])
def test_a_weight_that_is_none_is_refused_on_every_rank(weight: Any, words: str, everywhere: bool):
    def run(backend: Backend) -> None:
        ddp = DDP(build(), backend)
        bad = everywhere or backend.rank == 1
        said = words if bad else "rank 1 cannot begin it; see its error"
        with (
            pytest.raises((ValueError, TypeError, RuntimeError, OverflowError), match=said),
            ddp.step(weight if bad else 2),
        ):
            pass
        take_step(ddp, backend.rank, [[2], [1]])  # the group goes on
        plain = build()
        alone(plain, [[2], [1]])
        assert_equal_to_rounding(gradients(ddp), gradients(plain))

    simulate(run, 2)


@pytest.mark.checkered
@both
@pytest.mark.parametrize(
    ("weight", "count", "words"),
    [
        (0, 1, "all weights are 0"),
        (0, 0, "all weights are 0"),
        (1e308, 1, "the sum of all weights is inf"),
        (2, 0, "needs a micro-batch"),
        (2, -1, "must be 0 or more, not -1"),
        (2, 1.0, "must be 0 or more, not 1.0"),
        (2, True, "must be 0 or more, not True"),
    ],
)
def test_steps_that_cannot_be_begun(wrap: Wrapping, weight: Any, count: Any, words: str):
    def do(model: Any, backend: Backend) -> None:
        with pytest.raises(ValueError, match=words), model.step(weight, micro_batches=count):
            pass
        take_step(model, backend.rank, [[2], [1]])
        raise KeyError

    assert all(isinstance(error, KeyError) for error in errors_of(wrap, do))


@few
@pytest.mark.parametrize("how", ["around", "gradients from before"])
def test_no_sync_around_it_is_refused_and_the_group_goes_on(wrap: Wrapping, how: str):
    def do(model: Any, backend: Backend) -> None:
        with model.no_sync():
            if how == "around":
                with pytest.raises(MisuseError, match=r"inside no_sync\(\)"), model.step(2):
                    pass
            else:
                loss_on(model, backend.rank, 0, 2).backward()
        if how != "around":
            with pytest.raises(MisuseError, match=r"zero_grad\(\) of the model"), model.step(2):
                pass
            model.zero_grad()
        take_step(model, backend.rank, [[2], []])
        raise KeyError

    assert all(isinstance(error, KeyError) for error in errors_of(wrap, do))


@few
def test_an_error_of_the_program_leaves_it_and_after_zero_grad_the_next_one_is_right(
    wrap: Wrapping,
):
    split = [[2, 1], [1, 3]]

    def body(model: nn.Module, backend: Backend) -> Any:
        wrapped = wrap(model, backend)

        def cut_short() -> None:
            with wrapped.step(3, micro_batches=2) as step:
                step.backward(loss_on(wrapped, backend.rank, 0, 2))
                raise KeyError

        assert isinstance(outcome_of(cut_short), KeyError)
        wrapped.zero_grad()
        take_step(wrapped, backend.rank, split)
        return gradient_pieces(wrapped)

    plain = build()
    alone(plain, split)
    assert_equal_to_rounding(joined(wrap.on_ranks(2, build, body)), gradients(plain))


def test_ranks_with_other_numbers_of_micro_batches_and_a_sync_batch_norm_are_refused():
    def run(backend: Backend) -> None:
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
        ddp = DDP(convert_sync_batchnorm(model, backend), backend, broadcast_buffers=False)
        with (
            pytest.raises(MisuseError, match=r"1, a SyncBatchNorm.*of weight 0"),
            ddp.step(1, micro_batches=1 + backend.rank),
        ):
            pass
        with ddp.step(1) as step:
            step.backward(ddp(noise(3, 6)).sum())

    simulate(run, 2)


@few
@pytest.mark.parametrize("failing", [0, 1])
def test_a_micro_batch_that_failed_is_not_tried_again_in_the_same_step(
    wrap: Wrapping, failing: int
):
    """A part of its gradients may be there, and those of the ones before may be gone."""

    def do(model: Any, backend: Backend) -> None:
        with model.step(3, micro_batches=3) as step:
            for number in range(3):
                loss = loss_on(model, backend.rank, number, 1)
                if number == failing:
                    with pytest.raises(ArithmeticError):
                        step.backward(Fails.apply(model(batch(0, 0, 1)[0])).sum())
                step.backward(loss)

    told(errors_of(wrap, do), "a backward pass of this step has failed")


# A step that is not as it was said ----------------------------------------------------------------


def told(errors: list[BaseException], words: str, kind: type[DistributedError] = MisuseError):
    """One rank at least raises this, and it is what the others hear of, by name."""
    assert any(type(error) is kind and words in str(error) for error in errors), errors
    assert all(isinstance(error, DistributedError) for error in errors), errors


@pytest.mark.checkered
@few
@pytest.mark.parametrize("everywhere", [True, False], ids=["every rank", "one rank"])
def test_a_step_in_a_step_is_refused(wrap: Wrapping, everywhere: bool):
    def do(model: Any, backend: Backend) -> None:
        with model.step(2) as step:
            if everywhere or backend.rank == 0:
                with model.step(2):
                    pass
            step.backward(loss_on(model, backend.rank, 0, 2))

    told(errors_of(wrap, do), "step() inside step()")


@pytest.mark.checkered
@few
@pytest.mark.parametrize("everywhere", [True, False], ids=["every rank", "one rank"])
def test_a_backward_pass_by_another_way_is_refused(wrap: Wrapping, everywhere: bool):
    def do(model: Any, backend: Backend) -> None:
        with model.step(2) as step:
            loss = loss_on(model, backend.rank, 0, 2)
            (loss.backward if everywhere or backend.rank == 0 else lambda: step.backward(loss))()

    told(errors_of(wrap, do), "and not by step.backward(loss)")


@pytest.mark.checkered
@few
@pytest.mark.parametrize("done", [1, 3])
@pytest.mark.parametrize("everywhere", [True, False], ids=["every rank", "one rank"])
def test_more_or_fewer_micro_batches_than_said_are_refused(
    wrap: Wrapping, done: int, everywhere: bool
):
    def do(model: Any, backend: Backend) -> None:
        with model.step(2, micro_batches=2) as step:
            for number in range(done if everywhere or backend.rank == 0 else 2):
                step.backward(loss_on(model, backend.rank, number, 2))

    errors = errors_of(wrap, do)
    if done == 3 and not everywhere and wrap is BY_MESSAGES:
        told(errors, "FSDP gathers", DesyncError)  # its forward pass waits for the others already
    else:
        said = {1: "told of 2 micro-batches, and there were 1", 3: "more than the 2"}[done]
        told(errors, said)


@both
def test_no_sync_inside_is_refused_where_it_would_leave_out_the_last_one(wrap: Wrapping):
    def do(model: Any, backend: Backend) -> None:
        with model.step(2) as step, model.no_sync():
            step.backward(loss_on(model, backend.rank, 0, 2))

    told(errors_of(wrap, do), "no_sync() inside step()")


def test_weighted_inside_is_refused():
    def do(model: Any, backend: Backend) -> None:
        with model.step(2) as step:
            step.backward(model.weighted(loss_on(model, backend.rank, 0, 2), 2))

    told(errors_of(WITH_DDP, do), "weighted() inside step()")


@pytest.mark.checkered
@both
@pytest.mark.parametrize("bad", [3.0, torch.ones(2, requires_grad=True), torch.ones(())])
def test_what_is_no_loss_is_refused(wrap: Wrapping, bad: Any):
    def do(model: Any, backend: Backend) -> None:
        with model.step(2) as step:
            step.backward(bad)

    told(errors_of(wrap, do), "takes the sum of the losses, with a graph")


@both
def test_a_last_micro_batch_that_does_not_reach_the_model_is_refused(wrap: Wrapping):
    """What was accumulated before would stay on its rank."""

    def do(model: Any, backend: Backend) -> None:
        with model.step(2, micro_batches=2) as step:
            step.backward(loss_on(model, backend.rank, 0, 2))
            step.backward(torch.ones((), requires_grad=True) * 2)

    told(errors_of(wrap, do), "does not depend on the model")


@every_wrapping(among=[SHARDED, BY_MESSAGES, REPLICATED])
def test_a_forward_pass_of_a_rank_that_is_through_is_refused(wrap: Wrapping):
    """It is to follow the others, which have more micro-batches."""

    def do(model: Any, backend: Backend) -> None:
        own = [1, 2][: 1 + backend.rank]
        with model.step(1, micro_batches=len(own)) as step:
            for number in own:
                step.backward(loss_on(model, backend.rank, number, 2))
                with torch.no_grad():
                    model(batch(0, 0, 2)[0])

    told(errors_of(wrap, do), "after this rank's last micro-batch, and others have more")


@few
@pytest.mark.parametrize("count", [0, 1])
def test_a_rank_that_opens_a_step_alone_and_the_others_hear_of_it(wrap: Wrapping, count: int):
    def do(model: Any, backend: Backend) -> None:
        if backend.rank:
            model(batch(1, 0, 2)[0]).sum().backward()
            raise AssertionError("not reached")
        with model.step(2 * count, micro_batches=count) as step:
            step.backward(loss_on(model, backend.rank, 0, 2))

    errors = errors_of(wrap, do)
    assert all(isinstance(error, DesyncError) for error in errors), errors
    for error in errors:
        assert str(error).count("test_joined_step_misuse.py") >= 2, error  # both lines


class Two(nn.Module):
    def __init__(self, one: nn.Module, other: nn.Module) -> None:
        super().__init__()
        self.one, self.other = one, other

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) + self.other(x)


@both
def test_a_wrapper_beside_the_one_in_step_is_refused(wrap: Wrapping):
    """Its gradients would be averaged without weights."""

    def do(model: Any, backend: Backend) -> None:
        two = Two(model, wrap(build(), backend))
        x, y = batch(backend.rank, 0, 2)
        with model.step(2) as step:
            step.backward(sum_of_losses(two(x), y))

    told(errors_of(wrap, do), "inside the step() of another wrapper")


@both
def test_steps_of_two_wrappers_at_a_time_are_refused(wrap: Wrapping):
    def do(model: Any, backend: Backend) -> None:
        other = wrap(build(), backend)
        with model.step(2), other.step(2):
            pass

    told(errors_of(wrap, do), "step() inside step()")


@both
def test_wrappers_side_by_side_may_take_steps_one_after_the_other(wrap: Wrapping):
    split: Split = [[2, 1], []]

    def body(model: nn.Module, backend: Backend) -> Any:
        one, other = wrap(model, backend), wrap(mlp(3).double(), backend)
        for each in (one, other):
            take_step(each, backend.rank, split)
        return gradient_pieces(one), gradient_pieces(other)

    found = list(zip(*wrap.on_ranks(2, build, body), strict=True))
    for seed, pieces in zip((0, 3), found, strict=True):
        plain = mlp(seed).double()
        alone(plain, split)
        assert_equal_to_rounding(joined(pieces), gradients(plain))


@both
def test_a_wrapper_inside_another_one_is_refused(wrap: Wrapping):
    def run(backend: Backend) -> None:
        with pytest.raises(MisuseError, match="already"):
            wrap(nn.Sequential(wrap(build(), backend), nn.Linear(3, 2)), backend)

    simulate(run, 2)


@both
def test_join_in_a_step_is_refused(wrap: Wrapping):
    def do(model: Any, backend: Backend) -> None:
        with model.step(2), model.join(lambda: None):
            pass

    told(errors_of(wrap, do), "inside step()")


@few
def test_an_error_of_the_leader_in_a_step_is_told_to_ranks_that_follow_it(wrap: Wrapping) -> None:
    def do(model: Any, backend: Backend) -> None:
        with model.step(3.0 * (backend.rank == 0), micro_batches=int(backend.rank == 0)):
            if backend.rank == 0:
                raise ArithmeticError("a bad batch")

    first, second = errors_of(wrap, do)
    assert isinstance(first, ArithmeticError)
    assert isinstance(second, MisuseError)
    assert "rank 0, which this one follows, has left step() by an error" in str(second)


@few
def test_a_step_in_which_every_rank_has_failed_leaves_nothing_for_the_next_one(
    wrap: Wrapping,
) -> None:
    """The leader's words of it, which nobody has heard, are not those of the next step."""
    split = [[2, 1], [1]]

    def body(model: nn.Module, backend: Backend) -> Any:
        wrapped = wrap(model, backend)
        for failing in (True, False):
            try:
                with wrapped.step(sum(split[backend.rank]), micro_batches=2 - backend.rank) as step:
                    for place, rows in enumerate(split[backend.rank]):
                        x, y = batch(backend.rank, place, rows)
                        if failing:
                            raise ArithmeticError("a bad batch")
                        step.backward(sum_of_losses(wrapped(x), y))
            except ArithmeticError:
                wrapped.zero_grad()
        return step.loss

    first, second = wrap.on_ranks(2, build, body)
    assert first == second
