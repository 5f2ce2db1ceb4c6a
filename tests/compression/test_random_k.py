"""Random-k: places that all members draw alike, and every one of them in its turn."""

from __future__ import annotations

import pytest
import torch
from members import average, buckets_of, noise

from phalanx import ErrorFeedback, TopK
from phalanx.compression import Half, RandomK


def places(compressor: RandomK, n: int) -> list[int]:
    return compressor.decompress(compressor.compress(torch.ones(n))).nonzero().flatten().tolist()


def test_k_different_places_are_drawn_anew_each_time_alike_for_one_seed():
    one, other, stranger = RandomK(0.1, seed=5), RandomK(0.1, seed=5), RandomK(0.1, seed=6)
    draws = [places(one, 97) for _ in range(5)]
    assert [len(set(draw)) for draw in draws] == [10] * 5
    assert len(set(map(tuple, draws))) == 5
    assert [places(other, 97) for _ in range(5)] == draws
    assert [places(stranger, 97) for _ in range(5)] != draws


def test_every_place_is_as_likely_as_any_other():
    compressor, times = RandomK(0.25), 2000
    counts = torch.zeros(40)
    for _ in range(times):
        counts[places(compressor, 40)] += 1
    # A binomial of 2000 draws with chance 1/4 has a standard deviation of 19.4.
    assert (counts - times / 4).abs().max() < 4.5 * 19.4


def test_an_average_is_exact_where_it_is_drawn_and_zero_elsewhere():
    given = [[noise(50, seed=member)] for member in range(3)]
    mean = sum(mine[0].double() for mine in given) / 3
    found = average([RandomK(0.2) for _ in range(3)], buckets_of(given))[0]
    drawn = found != 0
    assert int(drawn.sum()) == 10
    assert torch.equal(found[drawn], mean[drawn].float())


def test_members_cut_short_at_different_calls_draw_alike_after_both_roll_back():
    one, other = RandomK(0.1), RandomK(0.1)
    for times, compressor in ((1, one), (3, other)):
        for _ in range(times):
            places(compressor, 50)
        compressor.rollback()
    assert places(one, 50) == places(other, 50)


def test_a_cast_saturates_before_a_sum_overflows_and_keeps_infinity():
    given = [[torch.tensor([6e4, -7e4, 1.0])] for _ in range(3)]
    found = average([Half(torch.float16) for _ in range(3)], buckets_of(given))[0]
    assert found.isfinite().all()
    assert found[2] == 1
    given = [[torch.tensor([torch.inf, torch.nan, 1.0])] for _ in range(3)]
    found = average([Half(torch.float16) for _ in range(3)], buckets_of(given))[0]
    assert found[0].isinf()
    assert found[1].isnan()
    assert Half(torch.float16).compress(torch.tensor([1e30])).sent[0].tolist() == [65504.0]


@pytest.mark.parametrize("compressor", [TopK(0.5), RandomK(1), Half(torch.float16)])
def test_what_was_left_over_may_exceed_the_gradients_dtype_and_comes_in_parts(compressor):
    """An infinity that came of a cast would come again in every pass."""
    feedback = ErrorFeedback(compressor)
    feedback.load_state_dict(
        {"residual.g0": torch.tensor([1.5e5, 0.0]), "inner.draws": torch.tensor(0)}
    )
    came = 0
    for _ in range(8):
        came = came + average([feedback], buckets_of([[torch.zeros(2).half()]]))[0].double()
        feedback.commit()
    assert came.tolist() == [1.5e5, 0]
