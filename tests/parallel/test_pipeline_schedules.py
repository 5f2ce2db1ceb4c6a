"""The schedules by themselves: they end, leave nothing out, and wait no longer than in theory."""

from __future__ import annotations

import inspect
import random
import re
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_checker import ALIVE, BrokenScheduleError, check, picture, stage_of, timeline

from phalanx.pipeline import pipeline as pipeline_file
from phalanx.pipeline.schedules import SCHEDULES, Action, ActionKind, B, F, W

SHAPES = [
    (name, p, m, v)
    for name, row in SCHEDULES.items()
    for p, m in product(range(1, 9), (1, 2, 3, 5, 8, 9, 16))
    for v in ((2, 3) if row.more_chunks else (row.chunks,))
]
DRAWN = re.compile(r"With (\d+) stages(?:,| and) (\d+) micro-batches(?: and (\d+) chunks)?:")


def actions_of(name: str, i: int, p: int, m: int, v: int) -> list[Action]:
    return list(SCHEDULES[name].generator(i, p, m, v))


def test_gpipe_is_all_forward_then_all_backward() -> None:
    assert actions_of("gpipe", 1, 3, 3, 1) == [F(0), F(1), F(2), B(2), B(1), B(0)]


def test_an_action_is_written_as_in_the_papers() -> None:
    actions = (F(3), B(1), W(1), F(3, 2), B(12, 1))
    assert [str(action) for action in actions] == ["F3", "B1", "W1", "F3.2", "B12.1"]


PICTURES = {
    ("gpipe", 4, 4, 1): """
        rank 0   F0 F1 F2 F3 .  .  .  .  .  .  B3 B2 B1 B0
        rank 1   .  F0 F1 F2 F3 .  .  .  .  B3 B2 B1 B0 .
        rank 2   .  .  F0 F1 F2 F3 .  .  B3 B2 B1 B0 .  .
        rank 3   .  .  .  F0 F1 F2 F3 B3 B2 B1 B0 .  .  .
        """,
    ("1f1b", 4, 6, 1): """
        rank 0   F0 F1 F2 F3 .  .  .  B0 F4 B1 F5 B2 .  B3 .  B4 .  B5
        rank 1   .  F0 F1 F2 .  .  B0 F3 B1 F4 B2 F5 B3 .  B4 .  B5 .
        rank 2   .  .  F0 F1 .  B0 F2 B1 F3 B2 F4 B3 F5 B4 .  B5 .  .
        rank 3   .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 .  .  .
        """,
    ("interleaved_1f1b", 2, 2, 2): """
        rank 0   F0 F1 F0.1 F1.1 .    B0.1 .    B1.1 B0 B1
        rank 1   .  F0 F1   F0.1 B0.1 F1.1 B1.1 B0   B1 .
        """,
    ("zb_h1", 4, 6, 1): """
        rank 0   F0 F1 F2 F3 .  .  .  B0 W0 F4 B1 W1 F5 B2 W2 B3 W3 B4 W4 B5 W5
        rank 1   .  F0 F1 F2 .  .  B0 F3 B1 W0 F4 B2 W1 F5 B3 W2 B4 W3 B5 W4 W5
        rank 2   .  .  F0 F1 .  B0 F2 B1 F3 B2 W0 F4 B3 W1 F5 B4 W2 B5 W3 W4 W5
        rank 3   .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 F5 B5 W2 W3 W4 W5
        """,
    ("zb_v", 2, 2, 2): """
        rank 0   F0 F1 .    F0.1 B0.1 W0.1 F1.1 B1.1 W1.1 B0   W0   .  B1 W1
        rank 1   .  F0 F0.1 F1   F1.1 B0.1 W0.1 B0   W0   B1.1 W1.1 B1 W1 .
        """,
}


@pytest.mark.parametrize("drawn", PICTURES)
def test_a_schedule_looks_like_this(drawn: tuple[str, int, int, int]) -> None:
    lines = PICTURES[drawn].split("\n")[1:-1]
    assert picture(*drawn).split("\n") == [line.strip() for line in lines]


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_picture_of_a_schedule_is_what_it_does(name: str) -> None:
    text = inspect.getdoc(SCHEDULES[name].generator) or ""
    drawn = DRAWN.search(text)
    assert drawn, "every schedule has its picture"
    p, m, v = (int(number or 1) for number in drawn.groups())
    assert indented(text) == picture(name, p, m, v)


def test_the_other_pictures_are_of_the_same_schedules() -> None:
    assert indented(pipeline_file.__doc__ or "") == picture("1f1b", 3, 4)
    example = (inspect.getdoc(picture) or "").split('picture("1f1b", 2, 3))\n')[1]
    assert example == picture("1f1b", 2, 3)


def test_every_schedule_ends_and_every_micro_batch_passes_every_stage_once_each_way() -> None:
    chance = random.Random(0)
    for name, p, m, v in SHAPES:
        row = SCHEDULES[name]
        report = check([iter(actions_of(name, i, p, m, v)) for i in range(p)], v, chance, row)
        every = dict.fromkeys(product(range(p * v), range(m)), 1)
        assert report.forward == report.backward == every, (name, p, m, v)
        assert report.weights == (every if row.passes == 3 else {}), (name, p, m, v)


def test_no_more_activations_live_than_the_table_says_and_as_many_in_some_step() -> None:
    for name, p, m, v in SHAPES:
        schedules = [iter(actions_of(name, i, p, m, v)) for i in range(p)]
        report = check(schedules, v, random.Random(1), SCHEDULES[name])
        bounds = [ALIVE[name](i, p, m, v) for i in range(p)]
        assert report.most_alive == bounds, (name, p, m, v)


@settings(max_examples=40)
@given(data=st.data())
def test_a_schedule_is_valid_for_any_numbers_of_ranks_and_micro_batches(data: Any) -> None:
    name = data.draw(st.sampled_from(list(SCHEDULES)))
    row, p, m = SCHEDULES[name], data.draw(st.integers(1, 12)), data.draw(st.integers(1, 40))
    v = data.draw(st.integers(row.chunks, 5)) if row.more_chunks else row.chunks
    schedules = [iter(actions_of(name, i, p, m, v)) for i in range(p)]
    report = check(schedules, v, random.Random(data.draw(st.integers())), row)
    assert len(report.forward) == len(report.backward) == p * v * m
    assert report.most_alive == [ALIVE[name](i, p, m, v) for i in range(p)]
    assert bubble_of(name, p, m, v, forward=1, backward=1) == pytest.approx(row.bubble(p, m, v))


def test_zero_bubble_schedules_hold_no_more_activations_than_the_rank_of_1f1b_that_holds_most() -> (
    None
):
    for p, m in product(range(1, 9), range(1, 20)):
        most = max(ALIVE["1f1b"](i, p, m, 1) for i in range(p))
        assert max(ALIVE["zb_h1"](i, p, m, 1) for i in range(p)) == most
        assert max(ALIVE["zb_v"](i, p, m, 2) for i in range(p)) <= 2 * most, "each half a stage's"


def test_a_stage_of_a_v_is_beside_the_one_before_it() -> None:
    """So the first and the last stage are on rank 0, and the two in the middle on the last one."""
    row = SCHEDULES["zb_v"]
    assert [row.rank_of(s, 3) for s in range(6)] == [0, 1, 2, 2, 1, 0]
    assert [SCHEDULES["interleaved_1f1b"].rank_of(s, 3) for s in range(6)] == [0, 1, 2, 0, 1, 2]


def test_in_1f1b_no_more_activations_live_than_there_are_stages() -> None:
    for p, m in product(range(1, 9), range(1, 20)):
        schedules = [iter(actions_of("1f1b", i, p, m, 1)) for i in range(p)]
        assert max(check(schedules, 1, random.Random(1)).most_alive) <= p


@pytest.mark.parametrize(("forward", "backward"), [(1, 1), (1, 2), (3, 5)])
def test_the_bubble_is_the_theory_s(forward: int, backward: int) -> None:
    """(p-1) / (m+p-1) for GPipe and 1F1B; interleaved, p-1 passes of a v-th of the layers."""
    for name, p, m, v in SHAPES:
        if SCHEDULES[name].passes == 2:
            bubble = bubble_of(name, p, m, v, forward=forward, backward=backward)
            if m >= p or v == 1:
                assert bubble == pytest.approx((p - 1) / (v * m + p - 1)), (name, p, m, v)
            assert bubble == pytest.approx(SCHEDULES[name].bubble(p, m, v)), (name, p, m, v)


def test_the_bubble_of_zero_bubble_schedules_is_one_pass_for_each_further_rank() -> None:
    for name, p, m, v in SHAPES:
        if SCHEDULES[name].passes == 3:
            bubble = bubble_of(name, p, m, v, forward=1, backward=1)
            if m >= 2 * p - 1:
                assert bubble == pytest.approx((p - 1) / (3 * v * m + p - 1)), (name, p, m, v)
            assert bubble == pytest.approx(SCHEDULES[name].bubble(p, m, v)), (name, p, m, v)


@pytest.mark.parametrize(("f", "b", "w"), [(1, 1, 1), (2, 2, 1), (2, 3, 2), (4, 5, 3)])
def test_zb_h1_waits_as_long_as_in_the_paper(f: int, b: int, w: int) -> None:
    """(p-1) (F+B-W), if W is not longer than F; 1F1B waits (p-1) (F+B+W)."""
    for p, m in ((2, 3), (4, 12), (7, 8)):
        ours = timeline("zb_h1", p, m, forward=f, backward=b, weights=w)
        plain = timeline("1f1b", p, m, forward=f, backward=b + w)
        assert ours[0][-1][1] - m * (f + b + w) == (p - 1) * (f + b - w)
        assert plain[0][-1][1] - m * (f + b + w) == (p - 1) * (f + b + w)


def test_interleaving_divides_the_time_in_the_bubble_by_the_number_of_chunks() -> None:
    p, m = 4, 8
    plain = timeline("1f1b", p, m, forward=12, backward=24)
    for v in (2, 3, 4):
        slots = timeline("interleaved_1f1b", p, m, v, forward=12 // v, backward=24 // v)
        idle = slots[0][-1][1] - m * 36
        assert idle * v == plain[0][-1][1] - m * 36 == (p - 1) * 36


def test_messages_between_two_stages_are_sent_and_awaited_in_one_order() -> None:
    for name, p, m, v in SHAPES:
        orders: dict[tuple[ActionKind, int], list[int]] = {}
        for i in range(p):
            for kind, j, c in actions_of(name, i, p, m, v):
                stage = stage_of(SCHEDULES[name], i, c, p)
                orders.setdefault((kind, stage), []).append(j)
        for kind in (ActionKind.F, ActionKind.B):
            assert len({tuple(orders[kind, stage]) for stage in range(p * v)}) == 1, (name, p, m, v)


def test_forward_passes_alone_end_too() -> None:
    """That is what evaluate does."""
    for name, p, m, v in SHAPES:
        forward = [
            iter([a for a in actions_of(name, i, p, m, v) if a.kind is ActionKind.F])
            for i in range(p)
        ]
        assert len(check(forward, v, random.Random(2), SCHEDULES[name]).forward) == p * v * m


def test_the_checker_finds_a_deadlock_and_a_backward_pass_too_early() -> None:
    backwards_first = [iter([F(0), B(0), F(1), B(1)]), iter([F(1), B(1), F(0), B(0)])]
    with pytest.raises(BrokenScheduleError, match="deadlock: rank 0 waits in B0; rank 1 waits"):
        check(backwards_first, 1, random.Random(0))
    with pytest.raises(BrokenScheduleError, match="rank 0: B0 before its forward pass"):
        check([iter([B(0), F(0)])], 1, random.Random(0))
    with pytest.raises(BrokenScheduleError, match="rank 0: W0 before B0"):
        check([iter([F(0), W(0), B(0)])], 1, random.Random(0))


def bubble_of(name: str, p: int, m: int, v: int, *, forward: int, backward: int) -> float:
    slots = timeline(name, p, m, v, forward=forward, backward=backward)
    length = max(own[-1][1] for own in slots)
    return 1 - sum(end - begin for own in slots for begin, end, _ in own) / (p * length)


def indented(text: str) -> str:
    """The picture in a docstring."""
    lines = [line.strip() for line in text.splitlines() if line.startswith("    rank ")]
    return "\n".join(lines)
