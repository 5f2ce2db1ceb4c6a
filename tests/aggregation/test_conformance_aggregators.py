"""What every aggregator promises, whatever it does with the gradients on the way."""

from __future__ import annotations

import pytest
import torch
from aggregator_kinds import ALL, ALONE, EXACT, SHAPES, gradients, mean_of
from clusters import Cluster, Simulated

from phalanx import (
    AllReduceAggregator,
    Backend,
    CollectiveTimeoutError,
    CompressedAggregator,
    DesyncError,
    ErrorFeedback,
    GradientAggregator,
    LocalAggregator,
    ParameterServer,
    Quantized,
    SizeMismatchError,
    TopK,
    UnsupportedOperationError,
    simulate,
)


@pytest.mark.checkered
@pytest.mark.parametrize("p", [1, 2, 3, 5])
@pytest.mark.parametrize("name", EXACT)
def test_averages_are_the_mean_over_the_ranks(name: str, p: int):
    def run(backend: Backend):
        return EXACT[name](backend).aggregate(gradients(backend.rank))

    for found in simulate(run, p):
        torch.testing.assert_close(found, mean_of(p))


@pytest.mark.checkered
@pytest.mark.parametrize("p", [1, 2, 5])
@pytest.mark.parametrize("name", ALL)
def test_every_rank_has_new_tensors_of_the_same_bits_and_the_gradients_are_not_changed(
    name: str, p: int
):
    def run(backend: Backend):
        aggregator = ALL[name](backend)
        results = []
        for step in range(2):
            given = gradients(backend.rank, step)
            found = aggregator.aggregate(given)
            for before, one, other in zip(gradients(backend.rank, step), given, found, strict=True):
                assert torch.equal(before, one)
                assert (one.shape, one.dtype) == (other.shape, other.dtype)
                assert one.data_ptr() != other.data_ptr() or one.numel() == 0
            results += found
        return results

    first, *others = simulate(run, p)
    for other in others:
        for one, two in zip(first, other, strict=True):
            assert torch.equal(one, two)


ONE_OF_EACH_WAY = ["all-reduce", "parameter server", "top-k, error feedback", "1 bit", "PowerSGD"]


@pytest.mark.checkered
@pytest.mark.parametrize("name", ONE_OF_EACH_WAY)
def test_it_works_on_every_kind_of_backend(name: str, cluster: Cluster):
    def run(backend: Backend):
        aggregator = ALL[name](backend)
        twice = [aggregator.aggregate(gradients(backend.rank, step)) for step in range(2)]
        return twice[0] + twice[1]

    first, *others = cluster.run(run, 3)
    for other in others:
        for one, two in zip(first, other, strict=True):
            assert torch.equal(one, two)


@pytest.mark.parametrize("name", ALONE)
def test_a_list_of_nothing_is_a_list_of_nothing(name: str):
    assert list(simulate(lambda b: ALONE[name](b).aggregate([]), 2)) == [[], []]


@pytest.mark.checkered
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ALL)
def test_other_dtypes_and_mixtures_of_them_keep_their_dtypes(name: str, dtype: torch.dtype):
    def run(backend: Backend):
        one, other = gradients(backend.rank, 0, dtype), gradients(backend.rank, 1)
        mixed = [g for pair in zip(one, other, strict=True) for g in pair]
        return ALL[name](backend).aggregate(mixed)

    per_rank = simulate(run, 2)
    for found in per_rank:
        assert [g.dtype for g in found] == [dtype, torch.float32] * len(SHAPES)
        if name in EXACT:
            torch.testing.assert_close(found[::2], mean_of(2, 0, dtype), rtol=0.01, atol=0.01)
            torch.testing.assert_close(found[1::2], mean_of(2, 1))
        for one, two in zip(found, per_rank[0], strict=True):
            assert torch.equal(one, two)


DIFFERENT = {
    "a shape": ([(3, 4), (5,)], [(3, 4), (6,)], r"gradient 1 \(float32 \[6\]\)"),
    "a number": ([(3, 4), (5,)], [(3, 4)], "rank 1 has no more gradients"),
    "none at all": ([(3, 4)], [], "rank 1 has no more gradients"),
    "an order": ([(3, 4), (5,)], [(5,), (3, 4)], r"gradient 0 \(float32 \[5\]\)"),
}


@pytest.mark.parametrize("what", DIFFERENT)
@pytest.mark.parametrize("name", ["all-reduce", "parameter server", "top-k", "8 bits", "PowerSGD"])
def test_lists_that_differ_are_refused_on_every_rank_and_the_difference_is_named(
    name: str, what: str
):
    usual, odd, words = DIFFERENT[what]

    def run(backend: Backend) -> str:
        shapes = odd if backend.rank == 1 else usual
        aggregator = ALL[name](backend)
        with pytest.raises(DesyncError, match=words) as caught:
            aggregator.aggregate([torch.ones(shape) for shape in shapes])
        assert caught.value.peer == 1
        # And the group goes on: nothing else was sent.
        return aggregator.aggregate([torch.ones(2)])

    assert all(len(found) == 1 for found in simulate(run, 3))


def test_a_dtype_that_differs_is_named_on_backends_that_do_not_compare_collectives():
    from clusters import Gloo

    def run(backend: Backend) -> None:
        dtype = torch.float64 if backend.rank == 1 else torch.float32
        with pytest.raises(DesyncError, match=r"gradient 0 \(float64 \[2\]\)"):
            AllReduceAggregator(backend).aggregate([torch.ones(2, dtype=dtype)])

    Gloo().run(run, 3)


def test_ranks_with_other_compressors_are_told_so():
    def run(backend: Backend) -> None:
        with pytest.raises(DesyncError, match=r"TopK\(0.2\)"):
            CompressedAggregator(backend, TopK(0.2 if backend.rank == 1 else 0.1)).aggregate([])

    simulate(run, 3)


@pytest.mark.parametrize("name", ALONE)
def test_what_is_no_list_of_tensors_is_refused_before_anything_is_sent(name: str):
    def run(backend: Backend) -> None:
        aggregator = ALONE[name](backend)
        with pytest.raises(TypeError, match="takes a list of gradients"):
            aggregator.aggregate(torch.ones(3))
        with pytest.raises(TypeError, match="gradient 1 is a NoneType"):
            aggregator.aggregate([torch.ones(3), None])

    simulate(run, 1)


@pytest.mark.parametrize("name", ["all-reduce", "parameter server", "top-k"])
def test_sparse_gradients_are_refused_by_number_before_anything_is_sent(name: str):
    def run(backend: Backend) -> None:
        given = [torch.ones(2), torch.ones(3).to_sparse()]
        words = f"rank {backend.rank}: .*gradient 1 is torch.sparse_coo.*sparse=False"
        with pytest.raises(UnsupportedOperationError, match=words):
            ALL[name](backend).aggregate(given)

    simulate(run, 2)


@pytest.mark.parametrize("kind", [AllReduceAggregator, ParameterServer])
def test_a_timeout_of_its_own_holds_from_the_first_message_on(kind):
    def run(backend: Backend) -> None:
        if backend.rank == 0:
            with pytest.raises(CollectiveTimeoutError, match="1"):
                kind(backend, timeout=0.05).aggregate([torch.ones(3)])

    Simulated().run(run, 2, timeout=60.0)


def test_integers_can_be_averaged_but_not_compressed():
    def run(backend: Backend) -> None:
        words = f"rank {backend.rank}: gradient 1: TopK.* not int64; average such gradients un"
        with pytest.raises(UnsupportedOperationError, match=words):
            CompressedAggregator(backend, TopK(0.5)).aggregate(
                [torch.ones(3), torch.ones(3).long()]
            )
        given = [torch.full((2,), 4 * backend.rank)]
        assert AllReduceAggregator(backend).aggregate(given)[0].tolist() == [2, 2]
        assert ParameterServer(backend).aggregate(given)[0].tolist() == [2, 2]

    simulate(run, 2)


def test_gradients_that_autograd_knows_and_strided_ones_are_read_as_they_are():
    def run(backend: Backend, name: str) -> None:
        given = [torch.randn(4, 6, requires_grad=True).t(), torch.ones(1).expand(3)]
        found = EXACT[name](backend).aggregate(given)
        assert not any(g.requires_grad for g in found)
        torch.testing.assert_close(found, [g.detach() for g in given])

    for name in EXACT:
        simulate(lambda b, name=name: run(b, name), 1)


def test_local_gives_new_tensors_as_the_others_do():
    given = [torch.ones(3, requires_grad=True), torch.eye(3).to_sparse()]
    found = LocalAggregator().aggregate(given)
    found[0].zero_()
    assert given[0].tolist() == [1, 1, 1]
    assert not found[0].requires_grad
    assert torch.equal(found[1].to_dense(), torch.eye(3))
    assert found[1] is not given[1]


@pytest.mark.parametrize("p", [2, 4, 8])
def test_workers_of_a_server_give_to_it_alone_and_take_from_it_alone(p: int):
    def run(backend: Backend) -> None:
        server, given = ParameterServer(backend), [torch.ones(200_000), torch.ones(7).double()]
        backend.counters()
        server.reduce_gradients(given)
        server.broadcast_params(given)
        n, hashes = sum(g.nbytes for g in given), 2 * 8 * p  # of lists, which all ranks compare
        for peer, counts in backend.counters().peers.items():
            sent, received = 0, 0
            if backend.rank == 0:
                sent, received = 2 * n, n  # the means, and the parameters
            elif peer == 0:
                sent, received = n, 2 * n
            assert sent <= counts.bytes_sent <= sent + hashes
            assert received <= counts.bytes_received <= received + hashes

    simulate(run, p)


def test_the_server_s_parameters_are_everybody_s():
    def run(backend: Backend):
        given = [torch.full((3,), float(backend.rank)), torch.tensor(backend.rank), torch.zeros(0)]
        found = ParameterServer(backend).broadcast_params(given)
        assert given[0].tolist() == [float(backend.rank)] * 3
        return [g.tolist() for g in found]

    assert list(simulate(run, 4)) == [[[0.0] * 3, 0, []]] * 4


def test_one_method_makes_an_aggregator():
    class Twice(GradientAggregator):
        def aggregate(self, gradients):
            return [2 * gradient for gradient in gradients]

    assert Twice().aggregate([torch.ones(())])[0] == 2


def test_a_compressor_may_be_given_to_many_ranks_each_of_which_has_its_own():
    shared = ErrorFeedback(TopK(0))

    def run(backend: Backend) -> list[float]:
        aggregator = CompressedAggregator(backend, shared)
        aggregator.aggregate([torch.tensor([1.0, 2.0]) * (backend.rank + 1)])
        return aggregator.compressor.residual("0").tolist()

    assert list(simulate(run, 2)) == [[1, 0], [2, 0]]
    assert shared.residual("0") is None


def test_what_is_not_finite_is_given_back_and_not_remembered():
    def run(backend: Backend) -> None:
        aggregator = CompressedAggregator(backend, ErrorFeedback(Quantized(1)))
        aggregator.aggregate(gradients(backend.rank))
        before = aggregator.state_dict()
        bad = gradients(backend.rank)
        if backend.rank == 1:
            bad[2][3] = torch.nan
        assert not all(g.isfinite().all() for g in aggregator.aggregate(bad))
        after = aggregator.state_dict()
        assert all(torch.equal(before[key], after[key]) for key in before)
        assert all(g.isfinite().all() for g in aggregator.aggregate(gradients(backend.rank)))

    simulate(run, 2)


SHAPES_LATER = {"another size": [(2, 4), (5,)], "another order": [(5,), (3, 4)], "turned": [(4, 3)]}


@pytest.mark.parametrize("what", SHAPES_LATER)
def test_under_error_feedback_gradients_keep_their_places_in_the_list(what: str):
    """Else what was left over of one would be added to another."""

    def run(backend: Backend) -> None:
        aggregator = CompressedAggregator(backend, ErrorFeedback(TopK(0.2)))
        aggregator.aggregate([torch.ones(3, 4), torch.ones(5)])
        before = aggregator.state_dict()
        words = rf"rank {backend.rank}: .*gradient 0 has the shape .* of one of \[3, 4\]"
        with pytest.raises(SizeMismatchError, match=words):
            aggregator.aggregate([torch.ones(shape) for shape in SHAPES_LATER[what]])
        after = aggregator.state_dict()
        assert all(torch.equal(before[key], after[key]) for key in before)
        aggregator.aggregate([torch.ones(3, 4), torch.ones(5)])

    simulate(run, 2)


def test_without_feedback_they_may_be_others_in_each_call():
    def run(backend: Backend) -> None:
        aggregator = CompressedAggregator(backend, Quantized(8))
        for shapes in ([(3, 4)], [(5,), (4, 3)], [], [(2,)]):
            found = aggregator.aggregate([torch.ones(shape) for shape in shapes])
            assert [tuple(g.shape) for g in found] == shapes

    simulate(run, 2)


def test_an_average_that_is_not_finite_says_so_in_its_dtype_alone_and_training_goes_on():
    def run(backend: Backend) -> list[list[bool]]:
        aggregator = CompressedAggregator(backend, ErrorFeedback(TopK(0.2)))
        finite = []
        for step in range(3):
            given = gradients(backend.rank, step) + gradients(backend.rank, 9, torch.float64)
            if (step, backend.rank) == (1, 2):
                given[0][2, 2] = torch.inf
            found = aggregator.aggregate(given)
            finite.append([bool(g.isfinite().all()) for g in found])
        return finite

    everything = [True] * (2 * len(SHAPES))
    for found in simulate(run, 3):
        assert found == [everything, [False, *everything[1:]], everything]
