"""`BatchSampler`: each sample once in an epoch, whatever the ranks, resumed anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from forms import LONG, examples, sizes
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from phalanx import Backend, BatchSampler, DesyncError, MisuseError, simulate

Make = Callable[[Backend], BatchSampler]
Rank = list[list[int]]  # a rank's part of each batch


def epoch_of(make: Make, ranks: int, epoch: int = 0) -> list[Rank]:
    """Each rank's parts of the batches of one epoch."""

    def run(backend: Backend) -> Rank:
        sampler = make(backend)
        sampler.set_epoch(epoch)
        return list(sampler)

    return list(simulate(run, ranks))


def joined(ranks: list[Rank]) -> Rank:
    """The joined batches: the parts of all ranks, in their order."""
    return [[one for part in parts for one in part] for parts in zip(*ranks, strict=True)]


@st.composite
def arguments(draw: st.DrawFn) -> dict[str, Any]:
    drop_last = draw(st.booleans())
    size = draw(st.integers(20 if drop_last else 1, 60))
    kind = draw(st.sampled_from(["plain", "lengths", "weights"]))
    numbers = st.lists(st.integers(0, 9), min_size=size, max_size=size).filter(any)
    return {
        "samples": draw(st.sampled_from([size, list(range(100, 100 + size))])),
        "batch_size": draw(st.integers(1, 20)),
        "seed": draw(st.integers(0, 3)),
        "drop_last": drop_last,
        "allow_empty": True,
        **({"pool": draw(st.integers(1, 3))} if kind == "lengths" else {}),
        **({kind: draw(numbers)} if kind != "plain" else {}),
        **({} if kind == "weights" else {"shuffle": draw(st.booleans())}),
    }


def maker(given: dict[str, Any]) -> Make:
    rest = {name: value for name, value in given.items() if name != "samples"}
    return lambda backend: BatchSampler(given["samples"], backend, **rest)


@settings(max_examples=examples(100))
@given(arguments(), st.integers(2, 6), st.integers(0, 3))
def test_joined_batches_are_the_same_on_any_number_of_ranks(
    given: dict[str, Any], ranks: int, epoch: int
) -> None:
    alone = joined(epoch_of(maker(given), 1, epoch))
    parts = epoch_of(maker(given), ranks, epoch)
    assert joined(parts) == alone
    lengths = [[len(part) for part in batch] for batch in zip(*parts, strict=True)]
    assert all(max(each) - min(each) <= 1 for each in lengths)


@settings(max_examples=examples(100))
@given(arguments().filter(lambda given: "weights" not in given))
def test_each_sample_comes_once_in_an_epoch(given: dict[str, Any]) -> None:
    samples, batch = given["samples"], given["batch_size"]
    all_of_them = list(range(samples)) if isinstance(samples, int) else samples
    batches = joined(epoch_of(maker(given), 1))
    seen = sorted(one for batch in batches for one in batch)
    if given["drop_last"]:
        assert len(seen) == len(set(seen)) == len(all_of_them) // batch * batch
        assert set(seen) <= {*all_of_them}
    else:
        assert seen == all_of_them
    assert all(len(each) == batch for each in batches[:-1])


def test_epochs_have_other_orders_and_the_same_again_with_the_same_seed() -> None:
    def orders(seed: int) -> list[Rank]:
        return [
            joined(epoch_of(lambda b: BatchSampler(50, b, batch_size=10, seed=seed), 2, epoch))
            for epoch in range(3)
        ]

    first, *others = orders(0)
    assert first not in others
    assert orders(0)[0] == first
    assert orders(1)[0] != first
    assert orders(0)[1] != orders(1)[0], "a seed and an epoch do not add up"


def test_without_shuffle_samples_come_in_the_given_order() -> None:
    batches = joined(epoch_of(lambda b: BatchSampler(7, b, batch_size=3, shuffle=False), 1))
    assert batches == [[0, 1, 2], [3, 4, 5], [6]]


def test_per_rank_the_joined_batch_grows_with_the_ranks() -> None:
    parts = epoch_of(lambda b: BatchSampler(24, b, batch_size=4, per_rank=True), 3)
    assert [[len(part) for part in rank] for rank in parts] == [[4, 4]] * 3


def test_samples_of_like_length_come_together_and_every_batch_is_at_another_place_each_time():
    lengths = torch.randint(1, 1000, (400,), generator=torch.Generator().manual_seed(1)).tolist()

    def batches(epoch: int) -> Rank:
        make = lambda b: BatchSampler(400, b, batch_size=10, lengths=lengths, pool=40)  # noqa: E731
        return joined(epoch_of(make, 1, epoch))

    spread = [max(lengths[i] for i in b) - min(lengths[i] for i in b) for b in batches(0)]
    assert max(spread) < 150
    shortest_first = sorted(batches(0), key=lambda batch: lengths[batch[0]])
    assert batches(0) != shortest_first
    assert batches(0) != batches(1)


def test_weighted_samples_come_as_often_as_their_weights_say_and_those_of_weight_zero_never():
    weights = [0.0, 1.0, 3.0, 0.0] * 1000
    (batches,) = epoch_of(lambda b: BatchSampler(4000, b, batch_size=100, weights=weights), 1)
    kinds = [sum(i % 4 == kind for batch in batches for i in batch) for kind in range(4)]
    assert kinds[0] == kinds[3] == 0
    assert kinds[1] + kinds[2] == 4000
    assert kinds[2] / kinds[1] == pytest.approx(3, rel=0.15)


# ------------------------------------------------------------------------------
# Where the training is.


def rest_of_an_epoch(
    ranks: int, state: dict[str, Any] | None, *, stop: int | None, workers: int = 0, **given: Any
) -> tuple[Rank, dict[str, Any]]:
    """Joined batches from this state on, `stop` of them at most; and the state after them."""

    def run(backend: Backend) -> tuple[Rank, dict[str, Any]]:
        sampler = BatchSampler(23, backend, allow_empty=True, **given)
        if state is not None:
            sampler.load_state_dict(state)
        loader = DataLoader(
            range(23),  # type: ignore[arg-type]
            batch_sampler=sampler,
            collate_fn=list,
            num_workers=workers,
            multiprocessing_context="fork" if workers else None,
        )
        return list(islice(sampler.track(loader), stop)), sampler.state_dict()

    found = list(simulate(run, ranks))
    assert all(after == found[0][1] for _, after in found)
    return joined([batches for batches, _ in found]), found[0][1]


@pytest.mark.parametrize(
    "lengths", [None, [i * 7 % 5 for i in range(23)]], ids=["plain", "lengths"]
)
@pytest.mark.parametrize("before", range(1, 7))
@pytest.mark.parametrize("after", range(1, 7))
def test_resumed_at_any_batch_on_any_ranks_every_sample_comes_once(
    before: int, after: int, lengths: list[int] | None
) -> None:
    whole, _ = rest_of_an_epoch(1, None, stop=None, batch_size=5, lengths=lengths)
    for stop in range(1, len(whole)):
        taken, state = rest_of_an_epoch(before, None, stop=stop, batch_size=5, lengths=lengths)
        rest, over = rest_of_an_epoch(after, state, stop=None, batch_size=5, lengths=lengths)
        assert taken + rest == whole
        assert (over["epoch"], over["taken"]) == (1, 0)


@pytest.mark.parametrize(
    "lengths", [None, [i * 7 % 5 for i in range(23)]], ids=["plain", "lengths"]
)
def test_resumed_with_another_batch_size_every_sample_comes_once(lengths: list[int] | None):
    for stop in range(1, 5):
        taken, state = rest_of_an_epoch(2, None, stop=stop, batch_size=5, lengths=lengths)
        rest, _ = rest_of_an_epoch(3, state, stop=None, batch_size=4, lengths=lengths)
        assert sorted(i for batch in taken + rest for i in batch) == list(range(23))


@pytest.mark.parametrize("stop", range(1, sizes(3, 5)))
@pytest.mark.parametrize(("before", "after"), [(1, 2), *([(3, 1), (2, 6)] if LONG else [])])
def test_workers_that_are_ahead_do_not_move_the_place(stop: int, before: int, after: int) -> None:
    whole, _ = rest_of_an_epoch(1, None, stop=None, batch_size=5)
    taken, state = rest_of_an_epoch(before, None, stop=stop, workers=2, batch_size=5)
    rest, _ = rest_of_an_epoch(after, state, stop=None, workers=2, batch_size=5)
    assert taken + rest == whole


def alone(size: int = 10, **given: Any) -> BatchSampler:
    """A sampler of one rank."""
    (sampler,) = simulate(lambda b: BatchSampler(size, b, **{"batch_size": 4, **given}), 1)
    return sampler


def test_a_loop_over_track_goes_on_after_a_break_and_then_with_the_next_epoch() -> None:
    sampler = alone()
    loader: DataLoader[Any] = DataLoader(range(10), batch_sampler=sampler, collate_fn=list)  # type: ignore[arg-type]
    first = list(islice(sampler.track(loader), 2))
    assert (sampler.epoch, sampler.taken) == (0, 8)
    last = list(sampler.track(loader))
    assert sorted(i for batch in first + last for i in batch) == list(range(10))
    assert (sampler.epoch, sampler.taken) == (1, 0)
    assert len(list(sampler.track(loader))) == 3
    assert sampler.epoch == 2


def test_a_loop_that_is_not_tracked_is_a_whole_epoch_and_has_no_place() -> None:
    sampler = alone()
    first, second = list(sampler), list(sampler)
    assert first != second
    assert sorted(i for batch in second for i in batch) == list(range(10))
    next(iter(sampler))
    with pytest.raises(MisuseError, match=r"Loop over sampler.track\(loader\)"):
        sampler.state_dict()


def test_set_epoch_keeps_the_place_in_the_epoch_that_is_under_way() -> None:
    sampler = alone()
    list(islice(sampler.track(sampler), 1))
    sampler.set_epoch(0)
    assert sampler.taken == 4
    sampler.set_epoch(3)
    assert (sampler.epoch, sampler.taken) == (3, 0)


def test_the_place_after_the_last_batch_is_the_next_epoch() -> None:
    sampler = alone()
    states = [(sampler.state_dict()["epoch"], sampler.taken) for _ in sampler.track(sampler)]
    assert states == [(0, 4), (0, 8), (1, 0)]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"size": 11}, "size"),
        ({"seed": 1}, "seed"),
        ({"shuffle": False}, "order"),
        ({"weights": range(10)}, "order"),
    ],
)
def test_a_state_of_other_samples_is_named_and_changes_nothing(change: Any, name: str) -> None:
    state = alone().state_dict() | {"taken": 4}
    other = alone(**change)
    with pytest.raises(ValueError, match=f"another {name}"):
        other.load_state_dict(state)
    assert other.taken == 0


def test_other_samples_are_used_from_the_next_epoch_on() -> None:
    sampler = alone()
    list(islice(sampler.track(sampler), 1))
    with pytest.raises(MisuseError, match="4 samples of epoch 0 are taken: resize between epochs"):
        sampler.resize(20)
    list(sampler.track(sampler))
    sampler.resize([5, 6, 7, 8])
    assert sampler.epoch == 1
    assert sorted(next(iter(sampler))) == [5, 6, 7, 8]


# ------------------------------------------------------------------------------
# Evaluation.


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("size", [5, 6, 17, 40])
def test_evaluation_has_each_sample_once_in_batches_of_all_ranks(ranks: int, size: int) -> None:
    def run(backend: Backend) -> Rank:
        sampler = BatchSampler.evaluation(size, backend, batch_size=5)
        assert len(list(sampler)) == len(sampler)
        return list(sampler)

    parts = list(simulate(run, ranks))
    assert [i for batch in joined(parts) for i in batch] == list(range(size))
    assert all(part for rank in parts for part in rank)
    assert max(len(batch) for batch in joined(parts)) <= max(5, 2 * ranks - 1)


def test_evaluation_of_fewer_samples_than_ranks_is_refused() -> None:
    def run(backend: Backend) -> str:
        with pytest.raises(ValueError, match="2 samples are fewer than the 3 ranks"):
            BatchSampler.evaluation(2, backend, batch_size=4)
        return "refused"

    assert list(simulate(run, 3)) == ["refused"] * 3


# ------------------------------------------------------------------------------
# What is refused.


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"samples": 0}, "at least 1 sample"),
        ({"samples": []}, "at least 1 sample"),
        ({"samples": [0.5]}, "integers in one dimension"),
        ({"batch_size": 0}, "batch_size must be an integer of at least 1"),
        ({"batch_size": 2.5}, "batch_size must be an integer of at least 1"),
        ({"batch_size": 2}, "leaves some of 3 ranks without a sample"),
        ({"samples": 4, "drop_last": True}, "4 samples do not fill a batch of 5"),
        ({"samples": 11, "batch_size": 5}, "the last batch of 11 samples has 1 of them"),
        ({"lengths": [1, 2]}, "lengths must be 10 numbers"),
        ({"weights": [-1.0] + [1.0] * 9}, "weights must be 10 numbers, finite and not negative"),
        ({"weights": [0.0] * 10}, "weights are 0 for all samples"),
        ({"weights": [1.0] * 10, "shuffle": False}, "not together with shuffle"),
    ],
)
def test_arguments_that_cannot_be_right_are_refused_on_every_rank(given: Any, words: str) -> None:
    arguments = {"samples": 10, "batch_size": 5, **given}
    samples = arguments.pop("samples")

    def run(backend: Backend) -> str:
        with pytest.raises(ValueError, match=words):
            BatchSampler(samples, backend, **arguments)
        return "refused"

    assert list(simulate(run, 3)) == ["refused"] * 3


def test_ranks_with_other_arguments_are_told_on_every_rank() -> None:
    def run(backend: Backend) -> str:
        with pytest.raises(DesyncError) as caught:
            BatchSampler(12, backend, batch_size=4, seed=backend.rank == 2)
        return str(caught.value)

    for rank, said in enumerate(simulate(run, 3)):
        assert f"rank {rank}: BatchSampler" in said
        assert "rank 2 has seed=True, rank 0 has seed=False" in said


def test_a_loader_that_does_not_use_the_sampler_is_refused() -> None:
    sampler = alone()
    with pytest.raises(MisuseError, match="does not take its batches from here"):
        next(sampler.track(DataLoader(range(10), batch_size=4)))  # type: ignore[arg-type]


def test_a_loader_that_brings_back_a_place_of_its_own_is_refused() -> None:
    """As torchdata's StatefulDataLoader does when it is given a state."""
    sampler = alone()

    class Loader:
        def __iter__(self) -> Iterator[list[int]]:
            sampler.load_state_dict(sampler.state_dict())
            return iter(sampler)

    with pytest.raises(MisuseError, match="load the sampler's state, and not the loader's"):
        next(sampler.track(Loader()))


def test_one_loop_over_track_at_a_time() -> None:
    sampler = alone()
    under_way: Iterator[Any] = sampler.track(sampler)
    next(under_way)
    with pytest.raises(MisuseError, match="another loop over track has not ended"):
        next(sampler.track(sampler))
