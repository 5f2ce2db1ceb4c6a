"""Plans of collectives in shared memory: pictures, and what every plan has to keep. No memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch
from forms import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.collectives.plan import Key
from phalanx.collectives.shm import plan as plans
from phalanx.collectives.shm.plan import FORMS, SHM_ALGORITHM, ShmPlan, Thresholds, make_shm_plan
from phalanx.core.shared_group import SharedGroup
from phalanx.transport.shm.control import RunAhead
from phalanx.transport.shm.peer_slot import AHEAD

SHORT = Thresholds(small=64, piece=512, staged_by_all=512, block=256)


def plan_of(
    collective: str, elements: int, *, place: int = 0, size: int = 2, root: int = 0
) -> ShmPlan:
    key = Key(collective, SHM_ALGORITHM[collective], (elements,), torch.float32, None, root)
    sizes = {"slot_size": 1 << 16, "part_size": 2 << 20}
    cores = {"is_readable": True, "share_of_cores": 1}
    shared = SimpleNamespace(place=place, size=size, **sizes, **cores)
    return make_shm_plan(key, cast("SharedGroup", shared), SHORT)


def staged(plan: ShmPlan) -> str:
    """What a member does, between epochs."""
    turns = [f"stage {0 if plan.gives else None}"]
    reduces = "reduce" if plan.form.reduced else "take"
    for collect, take, stage in plan.staged():
        parts = [("collect", collect), (reduces, take), ("stage", stage if plan.gives else None)]
        turns.append(", ".join(f"{verb} {n}" for verb, n in parts if n is not None))
    return " | ".join(turns)


def in_place(plan: ShmPlan) -> str:
    numbers = [first // plan.block for first, _, _ in plan.blocks]
    turns = [f"collect {n - 1}, reduce {n}" if n else f"reduce {n}" for n in numbers]
    return " | ".join(["show", *turns, f"collect {numbers[-1]} |"])


def test_the_docstring_draws_an_all_reduce_of_three_pieces() -> None:
    drawn = {
        line.split()[0]: " ".join(line.split())
        for line in (plans.__doc__ or "").replace("in place ", "in_place ").splitlines()
        if " | " in line
    }
    three = plan_of("all_reduce", 3 * 256 // 4 * 2)
    assert drawn["staged"] == f"staged {staged(three)}"
    assert drawn["in_place"] == f"in_place {in_place(three)}"


@pytest.mark.parametrize(
    ("collective", "place", "drawn"),
    [
        ("reduce", 0, "stage 0 | reduce 0, stage 1 | collect 0, reduce 1 | collect 1"),
        ("reduce", 1, "stage 0 | reduce 0, stage 1 | reduce 1 | "),
        ("reduce_scatter", 0, "stage 0 | reduce 0, stage 1 | reduce 1"),
        ("all_to_all", 0, "stage 0 | take 0, stage 1 | take 1"),
        ("scatter", 0, "stage 0 | take 0, stage 1 | take 1"),
        ("scatter", 1, "stage None | take 0 | take 1"),
    ],
)
def test_what_a_member_does_between_epochs_if_inputs_are_staged(
    collective: str, place: int, drawn: str
) -> None:
    assert staged(plan_of(collective, 2 * 256 // 4 * 2, place=place)) == drawn


@pytest.mark.checkered
@pytest.mark.parametrize("collective", FORMS)
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("elements", [4, 1000])
def test_only_members_who_give_in_vain_for_themselves_wait_for_nobody(
    collective: str, place: int, elements: int
) -> None:
    plan = plan_of(collective, elements, place=place, size=2)
    small = elements == 4
    if collective in ("broadcast", "scatter"):
        assert plan.waits_for == (() if place == 0 else (0,))
    elif collective in ("reduce", "gather") and small:
        assert plan.waits_for == (None if place == 0 else ())
    else:
        assert plan.waits_for is None


lengths = st.integers(1, 900)


@settings(max_examples=examples(200))
@given(st.sampled_from(sorted(FORMS)), lengths, st.integers(2, 5), st.data())
def test_each_byte_of_a_result_is_taken_once(
    collective: str, elements: int, size: int, data: st.DataObject
) -> None:
    """Of each giver a member takes its part in pieces that follow each other; of the others it
    collects their slices: together all of the result, once."""
    sliced_by_rank = collective not in ("all_reduce", "reduce", "broadcast")
    elements = elements * size if sliced_by_rank else elements
    root = data.draw(st.integers(0, size - 1))
    members = [plan_of(collective, elements, place=p, size=size, root=root) for p in range(size)]
    for plan in members:
        count = -(-plan.longest // plan.piece)
        takes = [turn.take for turn in plan.staged() if turn.take is not None]
        assert takes == list(range(count))
        collects = [turn.collect for turn in plan.staged() if turn.collect is not None]
        assert collects == (takes if plan.form.passed_on and plan.gets else [])
        start, stop = plan.mine
        covered = [0] * (plan.given if plan.form.passed_on else stop - start)
        for number in takes:
            first = number * plan.piece
            for at in range(first, min(first + plan.piece, stop - start)):
                covered[at + (start if plan.form.passed_on else 0)] += 1
        for number in collects:
            for _, begin, length in plan.others(number * plan.piece, plan.piece):
                covered[begin : begin + length] = [c + 1 for c in covered[begin : begin + length]]
        if plan.takes and (plan.gets or not plan.form.passed_on):
            assert set(covered) <= {1}
        reduced = [at for first, last, _ in plan.blocks for at in range(first, last)]
        assert reduced == list(range(plan.mine[1] - plan.mine[0]))


@settings(max_examples=examples(100))
@given(st.sampled_from(sorted(FORMS)), lengths, st.integers(2, 5))
def test_all_members_do_equally_many_epochs(collective: str, elements: int, size: int) -> None:
    elements = elements if collective in ("all_reduce", "reduce", "broadcast") else elements * size
    members = [plan_of(collective, elements, place=place, size=size) for place in range(size)]
    assert len({plan.is_small for plan in members}) == 1
    assert len({len(list(plan.staged())) for plan in members}) == 1
    assert len({len(plan.blocks) for plan in members}) == 1


def test_a_piece_is_staged_before_it_is_taken_and_overwritten_after_all_have_read_it() -> None:
    """Two parts in turn: a piece goes where the last but one was, whose epoch is over."""
    for collective in FORMS:
        turns = list(plan_of(collective, 9 * 256 // 4 * 2).staged())
        for number, turn in enumerate(turns):
            assert turn.take in (number, None)
            assert turn.stage in (number + 1, None)
            assert turn.collect in (number - 1, None)


def test_an_all_reduce_reads_what_a_ring_would_send() -> None:
    size, elements = 4, 4000
    plan = plan_of("all_reduce", elements, size=size)
    read = sum(plan.bytes_read(0, giver, 0) for giver in range(1, size))
    assert read == 2 * (size - 1) * elements * 4 // size


# Running ahead --------------------------------------------------------------------------------


def test_the_docstring_draws_the_entries_of_a_member_that_has_begun_collective_19() -> None:
    member = RunAhead()
    collectives = {}
    for number in range(1, 20):
        collectives[member.begin(number + 1)] = number
    assert (member.turn, member.needed) == (3, 6)
    rows = {
        "entry": [*range(7), 14, 15],
        "collective": [f"#{collectives[entry]}" for entry in (*range(7), 14, 15)],
        "flag": [member.starts[entry] for entry in (*range(7), 14, 15)],
    }
    drawn = [line.split() for line in (RunAhead.__doc__ or "").splitlines()]
    for name, values in rows.items():
        line = next(line for line in drawn if line[:1] == [name])
        shown = line[1 : 1 + 10]
        shown.remove("...")
        assert shown == [str(value) for value in values], name


def test_a_member_that_runs_ahead_has_a_slot_for_each_entry_and_the_others_two() -> None:
    member = RunAhead()
    slots = []
    for number in range(2 * AHEAD):
        slots.append(member.next_slot(ahead=True))
        member.begin(number + 1)
    assert sorted(slots[:AHEAD]) == list(range(2, 2 + AHEAD))
    assert slots[AHEAD:] == slots[:AHEAD]
    assert [member.next_slot(ahead=False) for _ in range(4)] == [1, 0, 1, 0]


def test_a_part_is_free_when_all_others_have_come_to_the_epoch_after_it() -> None:
    root = RunAhead()
    for flag in range(4):
        assert root.part(ahead=True) == flag
        assert root.part_free(ahead=True) == 0
        root.leave_part(flag + 1, ahead=True, gave=True)
    assert root.part(ahead=True) == 0
    assert root.part_free(ahead=True) == 2  # staged for epoch 1, read by those who come to 2
    assert root.part_free(ahead=False) == 5  # all that it has staged
    root.leave_stage(9)
    assert root.part_free(ahead=True) == 10
