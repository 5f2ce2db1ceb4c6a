"""PowerSGD: exact at full rank, the best approximation in the long run, few bytes."""

from __future__ import annotations

import pytest
import torch
from members import average, buckets_of, noise

from phalanx import ErrorFeedback, PowerSGD


def commit(compressors: list) -> None:
    for compressor in compressors:
        compressor.commit()


@pytest.mark.parametrize("rank", [7, 8, 20])
def test_at_full_rank_it_is_exact(rank: int):
    given = [[noise(7, 9, seed=member), noise(5, seed=member)] for member in range(3)]
    expected = sum(bucket.flat.double() for bucket in buckets_of(given)) / 3
    found = average([PowerSGD(rank) for _ in range(3)], buckets_of(given))[0]
    assert torch.equal(found, expected.float())


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_mean_of_that_rank_comes_exactly_by_its_factors(rank: int):
    factors = [(noise(20, rank, seed=p), noise(rank, 30, seed=p + 9)) for p in range(2)]
    shared = noise(20, rank)
    given = [[shared @ right] for _, right in factors]  # so that the mean is of that rank, too
    expected = sum(mine[0] for mine in given) / 2
    compressors = [PowerSGD(rank) for _ in range(2)]
    found = average(compressors, buckets_of(given))[0].view(20, 30)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_repeated_steps_find_the_best_approximation():
    """Power iteration from where the last step ended converges to the singular vectors."""
    u, _ = torch.linalg.qr(noise(30, 30))
    v, _ = torch.linalg.qr(noise(40, 30, seed=1))
    matrix = u @ torch.diag(0.7 ** torch.arange(30.0)) @ v.T
    compressors = [PowerSGD(2)]
    for _ in range(20):
        buckets = buckets_of([[matrix]])
        found = average(compressors, buckets)[0].view(30, 40)
        commit(compressors)
    left, singular, right = torch.linalg.svd(matrix)
    best = left[:, :2] @ torch.diag(singular[:2]) @ right[:2]
    assert (matrix - found).norm() <= 1.001 * (matrix - best).norm()


def test_a_matrix_of_zeros_does_not_stop_it():
    compressors = [PowerSGD(2)]
    for given in (torch.zeros(20, 30), noise(20, 2) @ noise(2, 30, seed=1)):
        buckets = buckets_of([[given]])
        found = average(compressors, buckets)[0].view(20, 30)
        commit(compressors)
        torch.testing.assert_close(found, given, rtol=1e-4, atol=1e-4)


def test_tensors_of_more_dimensions_are_matrices_by_their_first_one():
    kernel = (noise(16, 2) @ noise(2, 27, seed=1)).view(16, 3, 3, 3)
    message = PowerSGD(2).compress(kernel)
    assert message.nbytes == 4 * 2 * (16 + 27)
    torch.testing.assert_close(PowerSGD(2).decompress(message), kernel, rtol=1e-4, atol=1e-4)


def test_what_would_not_become_smaller_goes_whole_with_the_first_factors():
    compressor = PowerSGD(4)
    for shape in [(6, 5), (100,), (), (1, 50)]:
        assert len(compressor.compress(noise(*shape)).sent) == 1
    given = [[noise(6, 5, seed=p), noise(100, seed=p)] for p in range(2)]
    expected = sum(bucket.flat for bucket in buckets_of(given)) / 2
    assert torch.equal(average([PowerSGD(4), PowerSGD(4)], buckets_of(given))[0], expected)


def test_its_state_is_where_the_next_step_begins():
    compressors = [ErrorFeedback(PowerSGD(1))]
    average(compressors, buckets_of([[noise(8, 9)]]))
    assert not compressors[0].state_dict()  # until the pass counts
    commit(compressors)
    assert compressors[0].state_dict()["inner.q.g0"].shape == (9, 1)


KERNELS = [(500, 3), (3, 500), (1, 70), (70, 1), (64, 1, 3, 3), (2, 3, 1, 1), (8, 4, 5), (2, 2)]


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_matrices_of_any_shape_lose_nothing_under_error_feedback(rank: int):
    feedbacks = [ErrorFeedback(PowerSGD(rank)) for _ in range(2)]
    given = [
        [noise(*shape, seed=9 * member + i) for i, shape in enumerate(KERNELS)] for member in (0, 1)
    ]
    mean = sum(bucket.flat.double() for bucket in buckets_of(given)) / 2
    found, other = average(feedbacks, buckets_of(given))
    commit(feedbacks)
    assert torch.equal(found, other)
    left = sum(
        torch.cat([feedback.residual(f"g{i}") for i in range(len(KERNELS))]).double()
        for feedback in feedbacks
    )
    torch.testing.assert_close(found.double() + left / 2, mean, rtol=0, atol=1e-5)


def test_zeros_on_one_part_or_on_all_are_averaged_as_they_are():
    for others in (torch.zeros(20, 30), noise(20, 1) @ noise(1, 30, seed=1)):
        given = [[torch.zeros(20, 30)], [others]]
        found = average([PowerSGD(2) for _ in range(2)], buckets_of(given))[0].view(20, 30)
        torch.testing.assert_close(found, others / 2, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [1e-38, 1e-20, 1e15])
def test_sizes_far_from_one_are_approximated_as_well(size: float):
    matrix = noise(20, 2) @ noise(2, 30, seed=1) * size
    found = average([PowerSGD(2)], buckets_of([[matrix]]))[0].view(20, 30)
    torch.testing.assert_close(found / size, matrix / size, rtol=1e-3, atol=1e-2)
