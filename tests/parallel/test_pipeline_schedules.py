"""The schedules by themselves: they end, leave nothing out, and wait no longer than in theory."""

from __future__ import annotations

import inspect
import random
import re
from itertools import product

import pytest
from pipeline_checker import ALIVE, BrokenScheduleError, check, picture, timeline

from phalanx.pipeline import pipeline as pipeline_file
from phalanx.pipeline.schedules import SCHEDULES, Action, ActionKind, B, F

SHAPES = [
    (name, p, m, v)
    for name, row in SCHEDULES.items()
    for p, m in product(range(1, 9), (1, 2, 3, 5, 8, 9, 16))
    for v in ((2, 3) if row.interleaved else (1,))
]
DRAWN = re.compile(r"With (\d+) stages(?:,| and) (\d+) micro-batches(?: and (\d+) chunks)?:")


def actions_of(name: str, i: int, p: int, m: int, v: int) -> list[Action]:
    return list(SCHEDULES[name].generator(i, p, m, v))


def test_gpipe_is_all_forward_then_all_backward() -> None:
    assert actions_of("gpipe", 1, 3, 3, 1) == [F(0), F(1), F(2), B(2), B(1), B(0)]


def test_an_action_is_written_as_in_the_papers() -> None:
    assert [str(a) for a in (F(3), B(1), F(3, 2), B(12, 1))] == ["F3", "B1", "F3.2", "B12.1"]


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
        report = check([iter(actions_of(name, i, p, m, v)) for i in range(p)], v, chance)
        every = dict.fromkeys(product(range(p * v), range(m)), 1)
        assert report.forward == report.backward == every, (name, p, m, v)


def test_no_more_activations_live_than_the_table_says_and_as_many_in_some_step() -> None:
    for name, p, m, v in SHAPES:
        report = check([iter(actions_of(name, i, p, m, v)) for i in range(p)], v, random.Random(1))
        bounds = [ALIVE[name](i, p, m, v) for i in range(p)]
        assert report.most_alive == bounds, (name, p, m, v)


def test_in_1f1b_no_more_activations_live_than_there_are_stages() -> None:
    for p, m in product(range(1, 9), range(1, 20)):
        schedules = [iter(actions_of("1f1b", i, p, m, 1)) for i in range(p)]
        assert max(check(schedules, 1, random.Random(1)).most_alive) <= p


@pytest.mark.parametrize(("forward", "backward"), [(1, 1), (1, 2), (3, 5)])
def test_the_bubble_is_the_theory_s(forward: int, backward: int) -> None:
    """(p-1) / (m+p-1) for GPipe and 1F1B; interleaved, p-1 passes of a v-th of the layers."""
    for name, p, m, v in SHAPES:
        slots = timeline(name, p, m, v, forward=forward, backward=backward)
        length = max(own[-1][1] for own in slots)
        busy = sum(end - begin for own in slots for begin, end, _ in own)
        bubble = 1 - busy / (p * length)
        if m >= p or v == 1:
            assert bubble == pytest.approx((p - 1) / (v * m + p - 1)), (name, p, m, v)
        assert bubble == pytest.approx(SCHEDULES[name].bubble(p, m, v)), (name, p, m, v)


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
                orders.setdefault((kind, c * p + i), []).append(j)
        for kind in ActionKind:
            assert len({tuple(orders[kind, stage]) for stage in range(p * v)}) == 1, (name, p, m, v)


def test_forward_passes_alone_end_too() -> None:
    """That is what evaluate does."""
    for name, p, m, v in SHAPES:
        forward = [
            iter([a for a in actions_of(name, i, p, m, v) if a.kind is ActionKind.F])
            for i in range(p)
        ]
        assert len(check(forward, v, random.Random(2)).forward) == p * v * m


def test_the_checker_finds_a_deadlock_and_a_backward_pass_too_early() -> None:
    backwards_first = [iter([F(0), B(0), F(1), B(1)]), iter([F(1), B(1), F(0), B(0)])]
    with pytest.raises(BrokenScheduleError, match="deadlock: rank 0 waits in B0; rank 1 waits"):
        check(backwards_first, 1, random.Random(0))
    with pytest.raises(BrokenScheduleError, match="rank 0: B0 before its forward pass"):
        check([iter([B(0), F(0)])], 1, random.Random(0))


def indented(text: str) -> str:
    """The picture in a docstring."""
    lines = [line.strip() for line in text.splitlines() if line.startswith("    rank ")]
    return "\n".join(lines)
