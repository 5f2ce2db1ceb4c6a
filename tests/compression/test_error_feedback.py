"""Error feedback: nothing is lost, whatever the compressor, the dtype and the number of members."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from members import average, buckets_of, noise
from torch import Tensor

from phalanx import ErrorFeedback, PowerSGD, Quantized, TopK
from phalanx.compression import Compressor, Half, RandomK
from phalanx.compression.compressor import AllReduceMean
from phalanx.compression.error_feedback import total_residual
from phalanx.errors import SizeMismatchError

EXACT: dict[str, Callable[[], Compressor]] = {
    "top-k": lambda: TopK(0.1),
    "top-k of one": lambda: TopK(0),
    "random-k": lambda: RandomK(0.2),
    "float16": lambda: Half(torch.float16),
    "bfloat16": lambda: Half(torch.bfloat16),
}
ROUNDED: dict[str, Callable[[], Compressor]] = {
    "8 bits": lambda: Quantized(8, block=16),
    "4 bits": lambda: Quantized(4, block=16),
    "1 bit": lambda: Quantized(1, block=16),
    "8 bits at random": lambda: Quantized(8, block=16, stochastic=True),
    "PowerSGD": lambda: PowerSGD(2),
    "PowerSGD in bfloat16": lambda: PowerSGD(2, dtype=torch.bfloat16),
}
ALL = {**EXACT, **ROUNDED}
SHAPES = [(7, 9), (5,), (), (0, 3), (4, 3, 2)]  # 93 values


def gradients(member: int, step: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [
        noise(*shape, seed=1000 * member + 100 * step + number).to(dtype)
        for number, shape in enumerate(SHAPES)
    ]


def residuals_of(feedback: ErrorFeedback) -> Tensor:
    """Of all gradients, in float64; zeros before the first step."""
    kept = [feedback.residual(f"g{number}") for number in range(len(SHAPES))]
    return torch.cat(
        [
            torch.zeros(torch.Size(shape).numel()).double() if one is None else one.double()
            for one, shape in zip(kept, SHAPES, strict=True)
        ]
    )


@pytest.mark.parametrize("name", EXACT)
def test_sent_and_residual_are_the_gradient_and_the_former_residual_bit_for_bit(name: str):
    feedback = ErrorFeedback(EXACT[name]())
    former = torch.zeros(7, 9)
    for step in range(5):
        gradient = noise(7, 9, seed=step) * 10 ** (step - 2)
        sent = feedback.decompress(feedback.compress(gradient))
        residual = feedback.residual().view(7, 9)
        assert torch.equal(sent.double() + residual.double(), (gradient + former).double())
        former = residual


@pytest.mark.parametrize("name", ROUNDED)
def test_or_to_one_rounding_of_the_larger(name: str):
    feedback = ErrorFeedback(ROUNDED[name]())
    former = torch.zeros(7, 9)
    for step in range(5):
        gradient = noise(7, 9, seed=step) * 10 ** (step - 2)
        sent = feedback.decompress(feedback.compress(gradient))
        residual = feedback.residual().view(7, 9)
        off = sent.double() + residual.double() - (gradient + former).double()
        assert (off.abs() <= 2**-24 * sent.abs().maximum(residual.abs()).double()).all()
        former = residual


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", EXACT)
def test_of_other_dtypes_too_with_residuals_in_float32_or_wider(name: str, dtype: torch.dtype):
    feedback = ErrorFeedback(EXACT[name]())
    former = torch.zeros(40, dtype=torch.float64 if dtype is torch.float64 else torch.float32)
    for step in range(3):
        gradient = noise(40, seed=step).to(dtype)
        message = feedback.compress(gradient)
        sent = feedback.decompress(message)
        residual = feedback.residual()
        assert sent.dtype == dtype
        assert residual.dtype == former.dtype
        assert torch.equal(sent.double() + residual.double(), (gradient + former).double())
        former = residual


@pytest.mark.parametrize("p", [1, 2, 5])
@pytest.mark.parametrize("name", ALL)
def test_all_that_averages_lack_is_left_over_somewhere(name: str, p: int):
    """mean of gradients + mean of former residuals == average + mean of residuals + owned."""
    feedbacks = [ErrorFeedback(ALL[name]()) for _ in range(p)]
    missing = torch.zeros_like(residuals_of(feedbacks[0]))
    for step in range(4):
        given = [gradients(member, step) for member in range(p)]
        buckets = buckets_of(given)
        mean = sum(bucket.flat.double() for bucket in buckets) / p
        first, *others = average(feedbacks, buckets)
        for other in others:
            assert torch.equal(first, other)
        for feedback in feedbacks:
            feedback.commit()
        now = torch.cat([all_residuals(feedbacks)[f"g{i}"] for i in range(len(SHAPES))])
        # What a sum of halves rounds away is not known to anybody.
        atol = 0.05 if "float" in name and p > 1 else 2e-6
        torch.testing.assert_close(first.double() + now, mean + missing, rtol=0, atol=atol)
        missing = now


def all_residuals(feedbacks: list[ErrorFeedback]) -> dict[str, Tensor]:
    return total_residual([feedback.state_dict() for feedback in feedbacks], len(feedbacks))


@pytest.mark.parametrize("p", [3])
@pytest.mark.parametrize("name", ALL)
def test_a_constant_gradient_arrives_in_full_in_the_long_run(name: str, p: int):
    """What is left over stays bounded, so the mean of many averages is the gradient."""
    feedbacks = [ErrorFeedback(ALL[name]()) for _ in range(p)]
    given = [gradients(member, 0) for member in range(p)]
    mean = sum(bucket.flat for bucket in buckets_of(given)) / p
    steps, total = 40, 0
    for _ in range(steps):
        buckets = buckets_of(given)
        total = total + average(feedbacks, buckets)[0]
        for feedback in feedbacks:
            feedback.commit()
    lacks = (total / steps - mean).norm() / mean.norm()
    bound = 0.85 if name == "top-k of one" else 0.2  # of 93 values one a step
    assert lacks < bound


@pytest.mark.parametrize("name", ALL)
def test_a_pass_that_is_rolled_back_was_never_there(name: str):
    def run(failures: bool) -> list[Tensor]:
        feedbacks = [ErrorFeedback(ALL[name]()) for _ in range(2)]
        found = []
        for step in range(3):
            if failures:
                bad = [[g * math.nan for g in gradients(member, step)] for member in range(2)]
                average(feedbacks, buckets_of(bad))
                for feedback in feedbacks:
                    feedback.rollback()
            found += average(
                feedbacks, buckets_of([gradients(member, step) for member in range(2)])
            )
            for feedback in feedbacks:
                feedback.commit()
        return found

    for with_failures, without in zip(run(True), run(False), strict=True):
        assert torch.equal(with_failures, without)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_on_one_member_shows_on_all(name: str, bad: float):
    feedbacks = [ErrorFeedback(ALL[name]()) for _ in range(3)]
    for place in range(0, 9, 4):
        given = [gradients(member, 0) for member in range(3)]
        given[1][0][3, place] = bad
        for flat in average(feedbacks, buckets_of(given)):
            assert not flat.isfinite().all()
        for feedback in feedbacks:
            feedback.rollback()


@pytest.mark.parametrize("name", ALL)
def test_a_state_that_is_loaded_goes_on_bit_for_bit(name: str):
    def step(feedbacks: list[ErrorFeedback], number: int) -> Tensor:
        flat = average(feedbacks, buckets_of([gradients(p, number) for p in range(2)]))[0]
        for feedback in feedbacks:
            feedback.commit()
        return flat

    feedbacks = [ErrorFeedback(ALL[name]()) for _ in range(2)]
    for number in range(3):
        step(feedbacks, number)
    again = [ErrorFeedback(ALL[name]()) for _ in range(2)]
    for one, other in zip(again, feedbacks, strict=True):
        one.load_state_dict(other.state_dict())
    for number in range(3, 6):
        assert torch.equal(step(again, number), step(feedbacks, number))


@pytest.mark.parametrize("name", ["top-k", "1 bit", "PowerSGD"])
@pytest.mark.parametrize(("p", "q"), [(2, 4), (5, 3), (4, 1)])
def test_another_number_of_members_has_as_much_left_over_for_averages(name: str, p: int, q: int):
    feedbacks = [ErrorFeedback(ALL[name]()) for _ in range(p)]
    for step in range(3):
        average(feedbacks, buckets_of([gradients(member, step) for member in range(p)]))
        for feedback in feedbacks:
            feedback.commit()
    before = all_residuals(feedbacks)
    states = feedbacks[0].reshard([feedback.state_dict() for feedback in feedbacks], q)
    after = [ErrorFeedback(ALL[name]()) for _ in range(q)]
    for feedback, state in zip(after, states, strict=True):
        feedback.load_state_dict(state)
    now = all_residuals(after)
    assert now.keys() == before.keys()
    for key, missing in before.items():
        # Rounded once: half a unit in the last place of one residual, of which each counts 1/q.
        unit = torch.finfo(torch.float32).eps * missing.abs()
        assert ((now[key] - missing).abs() <= unit / q + 1e-300).all(), key
    for step in range(3, 5):  # and they go on
        flat = average(after, buckets_of([gradients(member, step) for member in range(q)]))[0]
        assert flat.isfinite().all()
        for feedback in after:
            feedback.commit()


def test_residuals_that_can_be_shared_out_evenly_are_conserved_to_the_last_bit():
    feedbacks = [ErrorFeedback(TopK(0)) for _ in range(4)]
    whole = [[torch.arange(6.0) * (member + 1)] for member in range(4)]
    average(feedbacks, buckets_of(whole))
    for feedback in feedbacks:
        feedback.commit()
    before = all_residuals(feedbacks)["g0"]
    for q in (1, 2, 8):
        states = feedbacks[0].reshard([feedback.state_dict() for feedback in feedbacks], q)
        total = sum(state["residual.g0"].double() for state in states) / q
        assert torch.equal(total, before)


def test_what_an_owner_left_out_follows_when_another_member_owns_that_slice():
    """Buckets that are cut anew, as DDP's are after its first pass."""
    feedbacks = [ErrorFeedback(Quantized(1, block=8)) for _ in range(2)]
    first = [[noise(40, seed=member), noise(8, seed=9 + member)] for member in range(2)]
    average(feedbacks, buckets_of(first))
    for feedback in feedbacks:
        feedback.commit()
    before = all_residuals(feedbacks)
    assert any(key.startswith("owned.0-24.g0") for key in feedbacks[0].state_dict())
    buckets = buckets_of(first)
    for bucket, mine in zip(buckets, first, strict=True):
        bucket.__init__(torch.cat([mine[1], mine[0]]), ["g1", "g0"], [mine[1].shape, mine[0].shape])
    flat = average(feedbacks, buckets)[0].double()
    for feedback in feedbacks:
        feedback.commit()
    now = all_residuals(feedbacks)
    mean = [sum(mine[number].double() for mine in first) / 2 for number in range(2)]
    for number, place in enumerate((slice(8, 48), slice(0, 8))):
        key = f"g{number}"
        torch.testing.assert_close(
            flat[place] + now[key], mean[number] + before[key], rtol=0, atol=2e-6
        )
    assert not any("0-24.g0" in key for key in feedbacks[0].state_dict())


def test_a_gradient_of_another_size_is_refused_by_name():
    feedback = ErrorFeedback(TopK(0.5))
    feedback.compress(torch.ones(4), "layer.weight")
    with pytest.raises(SizeMismatchError, match=r"'layer.weight' has 5 values.*left over of it 4"):
        feedback.compress(torch.ones(5), "layer.weight")


def test_a_scale_of_the_loss_that_changes_scales_what_is_residuals_of():
    feedback = ErrorFeedback(TopK(0.5))
    feedback.compress(torch.tensor([1.0, 4.0]))
    feedback.scale_(0.5)
    assert feedback.residual().tolist() == [0.5, 0]


class Rounds(Compressor):
    """Sends whole numbers, and lets the store keep what it leaves out."""

    def compress(self, tensor: Tensor) -> Tensor:
        return tensor.round()

    def decompress(self, message: Tensor) -> Tensor:
        return message.clone()

    def average_(self, bundle, part, feedback=None):
        wanted = feedback.add_residual(bundle, part)
        sent = wanted.round()
        feedback.store_residual(bundle, lambda: wanted - sent)
        mean = yield AllReduceMean(sent.clone())
        owned = feedback.add_owned_residual(bundle, 0, mean)
        feedback.store_owned_residual(bundle, 0, lambda: owned - owned.floor())
        bundle.flat.copy_(owned.floor())


def test_a_compressor_of_ones_own_keeps_residuals():
    feedbacks = [ErrorFeedback(Rounds()) for _ in range(2)]
    found = average(feedbacks, buckets_of([[torch.tensor([1.25])], [torch.tensor([2.0])]]))
    for feedback in feedbacks:
        feedback.commit()
    assert [flat.tolist() for flat in found] == [[1.0], [1.0]]  # the floor of (1 + 2) / 2
    assert [feedback.residual("g0").tolist() for feedback in feedbacks] == [[0.25], [0.0]]
    assert feedbacks[0].state_dict()["owned.0-1.g0"].tolist() == [0.5]


def test_error_feedback_wants_small_errors_not_unbiased_ones():
    assert ErrorFeedback(Quantized(1)).inner.stochastic is False
    assert ErrorFeedback(Quantized(8, stochastic=True)).inner.stochastic is True
    with pytest.raises(ValueError, match="stochastic rounding to 1 bit"):
        ErrorFeedback(Quantized(1, stochastic=True))
    with pytest.raises(ValueError, match="forgets nothing already"):
        ErrorFeedback(ErrorFeedback(TopK(0.1)))
