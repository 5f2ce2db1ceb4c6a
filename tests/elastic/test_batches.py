"""`Batches`: each sample once in steps that count, whatever ranks come and go."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from forms import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset
from waiting import PATIENCE, wait_until

from phalanx import BatchSampler, MisuseError, UnsupportedOperationError
from phalanx.core.replaceable import ReplaceableBackend
from phalanx.elastic.batches import Batches, loader, sampler
from phalanx.transport.simulated import SimulatedBackend

Part = list[int]
Make = Callable[[ReplaceableBackend], Batches[Any]]


class Member:
    """A process of an elastic job, as far as its batches go: alone until it enters a group."""

    def __init__(self, make: Make, state: dict[str, Any] | None = None) -> None:
        self.backend = ReplaceableBackend(SimulatedBackend.create_group(1)[0])
        self.batches = make(self.backend)
        if state is not None:
            self.batches.load_state_dict(json.loads(json.dumps(state)))


def regroup(members: list[Member]) -> None:
    for member, inner in zip(members, SimulatedBackend.create_group(len(members)), strict=True):
        member.backend.enter(inner)
        member.batches.regrouped()


def group(make: Make, ranks: int, state: dict[str, Any] | None = None) -> list[Member]:
    members = [Member(make, state) for _ in range(ranks)]
    regroup(members)
    return members


def step(members: list[Member], *, counts: bool = True) -> tuple[list[Any], list[float]]:
    """What each rank takes in one step, and the weights of that."""
    for member in members:
        member.batches.begin()
    taken = [member.batches.take() for member in members]
    weights = [member.batches.weight for member in members]
    for member in members:
        member.batches.count() if counts else member.batches.undo()
    return taken, weights


def joined(members: list[Member], *, counts: bool = True) -> Part:
    """The samples of one step over all ranks, but for those that only fill an empty part."""
    parts, weights = step(members, counts=counts)
    return [i for part, weight in zip(parts, weights, strict=True) if weight for i in part]


def without_elastic(size: int, **options: Any) -> Iterator[Part]:
    """The joined batches, epoch after epoch."""
    (alone,) = SimulatedBackend.create_group(1)
    batches = BatchSampler(size, alone, **options)
    while True:
        yield from batches


def of(size: int, batch_size: int, **options: Any) -> Make:
    return lambda backend: sampler(size, backend, batch_size=batch_size, **options)


# ------------------------------------------------------------------------------
# Each sample once.

GENERATIONS = st.lists(
    st.tuples(st.integers(1, 5), st.lists(st.booleans(), max_size=6)), min_size=1, max_size=6
)


@settings(max_examples=examples(200))
@given(st.integers(1, 20), st.integers(1, 9), st.integers(0, 3), GENERATIONS)
def test_each_sample_comes_once_an_epoch_in_steps_that_count(
    size: int, batch_size: int, seed: int, generations: list[tuple[int, list[bool]]]
) -> None:
    make = of(size, batch_size, seed=seed)
    members, seen = group(make, 1), []
    for ranks, steps in generations:
        state = members[0].batches.state_dict()
        members = [*members[:ranks], *(Member(make, state) for _ in range(ranks - len(members)))]
        regroup(members)
        for counts in steps:
            batch = joined(members, counts=counts)
            seen += [batch] if counts else []
    expected = without_elastic(size, batch_size=batch_size, seed=seed)
    assert seen == list(islice(expected, len(seen)))
    samples = [i for batch in seen for i in batch]
    for begin in range(0, len(samples) - size + 1, size):
        assert sorted(samples[begin : begin + size]) == list(range(size))
    assert {member.batches.epoch for member in members} == {len(samples) // size}


@pytest.mark.parametrize(
    "options", [{"drop_last": True}, {"lengths": range(13), "pool": 2}, {"weights": range(13)}]
)
def test_joined_batches_are_those_of_batch_sampler(options: dict[str, Any]) -> None:
    members = group(of(13, 4, **options), 3)
    seen = [joined(members) for _ in range(9)]
    assert seen == list(islice(without_elastic(13, batch_size=4, **options), 9))


def test_what_an_older_generation_had_ready_is_dealt_again() -> None:
    """The picture of the module."""

    def ready(backend: ReplaceableBackend) -> Batches[Part]:
        return loader(range(18), backend, batch_size=3, shuffle=False, collate_fn=list)  # type: ignore[arg-type]

    members = group(ready, 3)
    assert joined(members) == [0, 1, 2]
    assert joined(members, counts=False) == [3, 4, 5]
    survivors = members[1:]
    regroup(survivors)
    assert [joined(survivors) for _ in range(2)] == [[3, 4, 5], [6, 7, 8]]


def test_a_step_that_takes_nothing_moves_nothing() -> None:
    (member,) = group(of(6, 2, shuffle=False), 1)
    member.batches.begin()
    member.batches.count()
    assert joined([member]) == [0, 1]


# ------------------------------------------------------------------------------
# Weights.


@pytest.mark.parametrize("ranks", range(1, 8))
def test_the_mean_of_weighted_losses_is_the_loss_of_the_joined_batch(ranks: int) -> None:
    losses = torch.rand(11, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    members = group(of(11, 4), ranks)
    for batch in islice(without_elastic(11, batch_size=4), 6):
        parts, weights = step(members)
        of_ranks = [losses[part].mean() * w for part, w in zip(parts, weights, strict=True)]
        torch.testing.assert_close(torch.stack(of_ranks).mean(), losses[batch].mean())


def test_a_weight_is_one_before_a_take_and_when_parts_are_equal() -> None:
    members = group(of(15, 15, shuffle=False), 3)
    assert step(members)[1] == [1.0] * 3
    regroup(members[:2])
    assert step(members[:2])[1] == [14 / 15, 16 / 15]
    members[0].batches.begin()
    assert members[0].batches.weight == 1.0


def test_a_rank_without_samples_gets_the_first_with_weight_zero() -> None:
    members = group(of(5, 3, shuffle=False), 4)
    assert step(members) == ([[0], [0], [1], [2]], [0.0] + [4 / 3] * 3)
    assert step(members) == ([[3], [3], [3], [4]], [0.0, 2.0, 0.0, 2.0])


# ------------------------------------------------------------------------------
# States.


@pytest.mark.parametrize("after", [1, 2, 5])
@pytest.mark.parametrize("stop", range(7))
def test_resumed_on_other_ranks_the_next_batch_is_the_same(stop: int, after: int) -> None:
    members = group(of(11, 4), 3)
    whole = list(islice(without_elastic(11, batch_size=4), 9))
    assert [joined(members) for _ in range(stop)] == whole[:stop]
    resumed = group(of(11, 4), after, members[0].batches.state_dict())
    assert [joined(resumed) for _ in range(9 - stop)] == whole[stop:]


def test_with_another_batch_size_the_rest_of_the_epoch_comes_once() -> None:
    members = group(of(11, 4), 3)
    seen = joined(members)
    resumed = group(of(11, 5), 2, members[0].batches.state_dict())
    assert sorted(seen + joined(resumed) + joined(resumed)) == list(range(11))
    assert resumed[0].batches.epoch == 1


def test_a_state_of_batch_sampler_is_one_too() -> None:
    (alone,) = SimulatedBackend.create_group(1)
    batches = BatchSampler(11, alone, batch_size=4)
    first = list(islice(batches.track(batches), 1))
    resumed = group(of(11, 4), 2, batches.state_dict())
    assert [*first, joined(resumed), joined(resumed)] == list(
        islice(without_elastic(11, batch_size=4), 3)
    )


def test_a_step_in_its_block_has_not_moved_the_state() -> None:
    (member,) = group(of(11, 4), 1)
    before = member.batches.state_dict()
    member.batches.begin()
    member.batches.take()
    assert member.batches.state_dict() == before
    member.batches.count()
    assert member.batches.state_dict() == {**before, "taken": 4}


def test_a_state_that_is_loaded_under_way_is_gone_on_from() -> None:
    members = group(of(11, 4), 2)
    state = members[0].batches.state_dict()
    first = [joined(members) for _ in range(4)]
    for member in members:
        member.batches.load_state_dict(state)
    assert [joined(members) for _ in range(4)] == first


def test_a_state_of_other_samples_is_refused_and_changes_nothing() -> None:
    (member,) = group(of(11, 4, shuffle=False), 1)
    with pytest.raises(ValueError, match=r"Elastic.sampler: the state is of another size \(12"):
        member.batches.load_state_dict(group(of(12, 4), 1)[0].batches.state_dict())
    assert joined([member]) == [0, 1, 2, 3]


def test_an_identity_differs_with_whatever_ranks_have_to_agree_about() -> None:
    plain: dict[str, Any] = {"samples": 12, "batch_size": 4}
    changes: list[dict[str, Any]] = [
        {},
        {"samples": 13},
        {"samples": list(range(1, 13))},
        {"batch_size": 5},
        {"seed": 1},
        {"shuffle": False},
        {"drop_last": True},
        {"lengths": range(12)},
        {"lengths": range(12), "pool": 3},
        {"weights": range(12)},
    ]
    (alone,) = SimulatedBackend.create_group(1)
    said = [json.dumps(sampler(backend=alone, **{**plain, **each}).identity()) for each in changes]
    assert len(set(said)) == len(said)


# ------------------------------------------------------------------------------
# Loaders.


class Numbers(Dataset[Any]):
    """Samples that are their numbers, and what the process that loads them draws at random."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, i: int) -> tuple[int, Tensor, float]:
        return i, torch.rand(()), random.random()


def loading(num_workers: int, **options: Any) -> Make:
    return lambda backend: loader(
        Numbers(), backend, batch_size=5, seed=2, num_workers=num_workers, **options
    )


@pytest.fixture
def workers() -> Callable[[], int]:
    """How many children this test has started that have not ended."""
    before = multiprocessing.active_children()
    return lambda: len([each for each in multiprocessing.active_children() if each not in before])


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True, "prefetch_factor": 3}])
def test_a_loader_with_workers_gives_what_a_sampler_gives(
    options: dict[str, Any], workers: Callable[[], int]
) -> None:
    with_workers, plain = group(loading(2, **options), 2), group(of(23, 5, seed=2), 2)
    for ranks, steps in ((2, [True] * 6 + [False]), (1, [True, False, True]), (2, [True] * 3)):
        state = plain[0].batches.state_dict()
        for members in (with_workers, plain):
            members[1].batches.load_state_dict(state)
            regroup(members[:ranks])
        for counts in steps:
            loaded, weights = step(with_workers[:ranks], counts=counts)
            numbers = [batch[0].tolist() for batch in loaded]
            assert (numbers, weights) == step(plain[:ranks], counts=counts)
    for member in with_workers:
        member.batches.close()
    wait_until(lambda: not workers(), "the workers of all generations have ended")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_survivor_draws_at_random_what_a_newcomer_draws(num_workers: int) -> None:
    """As the job seeds torch at the start of a generation."""
    (survivor,) = group(loading(num_workers), 1)
    for _ in range(3):
        step([survivor])
    regroup([survivor])
    drawn = []
    for member in (survivor, Member(loading(num_workers), survivor.batches.state_dict())):
        torch.manual_seed(5)
        random.seed(5)
        (batch,), _ = step([member])
        drawn.append([each.tolist() for each in batch])
        member.batches.close()
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}])
def test_to_close_ends_the_workers_and_their_pipes(
    options: dict[str, Any], workers: Callable[[], int]
) -> None:
    (member,) = group(loading(2, **options), 1)
    before = len(os.listdir("/dev/fd"))
    step([member])
    assert workers() == 2
    assert len(os.listdir("/dev/fd")) > before
    member.batches.close()
    assert workers() == 0
    wait_until(lambda: len(os.listdir("/dev/fd")) <= before, "threads have closed the pipes")


class Gated(Dataset[int]):
    """Samples of which all but the first wait at a gate."""

    def __init__(self) -> None:
        self.waits, self.gate = multiprocessing.Event(), multiprocessing.Event()

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> int:
        if i:
            self.waits.set()
            self.gate.wait()
        return i


def test_a_regroup_does_not_wait_for_what_a_worker_is_at(workers: Callable[[], int]) -> None:
    data = Gated()
    (member,) = group(lambda b: loader(data, b, batch_size=1, shuffle=False, num_workers=1), 1)
    step([member])
    assert data.waits.wait(PATIENCE)
    regroup([member])
    assert workers() == 1, "torch would have killed it, had it waited"
    data.gate.set()
    wait_until(lambda: not workers(), "the worker ends by itself")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_a_dataset_raises_is_raised_and_a_batch_can_be_tried_again(
    num_workers: int, workers: Callable[[], int]
) -> None:
    fails = torch.tensor([False]).share_memory_()

    def collate(samples: list[tuple[int, Tensor, float]]) -> Part:
        if fails.item():
            raise ValueError("no such sample")
        return [i for i, *_ in samples]

    (member,) = group(loading(num_workers, shuffle=False, collate_fn=collate), 1)
    assert joined([member]) == [0, 1, 2, 3, 4]
    regroup([member])
    member.batches.begin()
    fails.fill_(True)
    with pytest.raises(ValueError, match="no such sample") as caught:
        member.batches.take()
    fails.fill_(False)
    assert member.batches.take() == [5, 6, 7, 8, 9]
    member.batches.close()
    wait_until(lambda: not workers(), "the worker that failed has ended, too")
    assert caught.tb, "which refers to what that worker belongs to"


# ------------------------------------------------------------------------------
# What is refused.


def test_a_batch_is_taken_once_in_a_step_and_inside_its_block() -> None:
    (member,) = group(of(12, 4), 1)
    batches = member.batches
    with pytest.raises(MisuseError, match="outside of a step's block"):
        batches.take()
    for end in (batches.count, batches.undo, batches.regrouped):
        batches.begin()
        batches.take()
        with pytest.raises(MisuseError, match=r"rank 0: Elastic: .* a second time in one step"):
            batches.take()
        end()
        with pytest.raises(MisuseError, match="outside of a step's block"):
            batches.take()
    assert batches.state_dict()["taken"] == 4


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (
            {"dataset": Stream()},
            UnsupportedOperationError,
            "samples of an iterable dataset have no numbers",
        ),
        ({"sampler": range(9)}, MisuseError, "sampler: which sample comes when is the job's"),
        ({"batch_sampler": [[1]]}, MisuseError, "batch_sampler: which sample comes when"),
        ({"in_order": False}, MisuseError, "in_order: which sample comes when"),
        ({"prefetch_factor": 2}, ValueError, "multiprocessing"),
        ({"batch_size": 0}, ValueError, "Elastic.loader: batch_size must be an integer"),
        ({"batch_size": None}, ValueError, "Elastic.loader: batch_size must be an integer"),
        ({"per_rank": True}, TypeError, "per_rank"),
        ({"batch_size": 10, "drop_last": True}, ValueError, "9 samples do not fill a batch of 10"),
    ],
)
def test_options_that_cannot_be_right_are_refused_at_once(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    (alone,) = SimulatedBackend.create_group(1)
    given: dict[str, Any] = {"dataset": range(9), "batch_size": 3, **options}
    with pytest.raises(error, match=words):
        loader(given.pop("dataset"), alone, **given)
