"""Random programs on every kind of backend; `make stress` runs thousands of them.

A program that fails here is printed with its seed by
`python tests/stress/run.py --seed <seed> --cluster <cluster>`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from clusters import CLUSTERS, Cluster
from forms import sizes
from stress_generate import generate
from stress_kinds import KINDS
from stress_perform import Performer, Reference
from stress_places import run_in_processes, run_on
from stress_program import WORLD, Action, GroupPlan, Message, Op, Program, Receive
from stress_shrink import shrunk
from stress_values import WrongResultError, laid_out

from phalanx import Backend

MANY = range(150)
SOME = range(1000, sizes(1002, 1008))  # on every cluster; make stress does the others
COOPERATIVE = next(cluster for cluster in CLUSTERS if not cluster.keeps_time)


def smallest_seed(size: int) -> int:
    return next(seed for seed in MANY if generate(seed).size == size)


@pytest.mark.checkered
@pytest.mark.parametrize("seed", SOME)
def test_a_random_program_gives_what_a_plain_reference_gives(cluster: Cluster, seed: int) -> None:
    run_on(cluster, generate(seed))


def test_random_programs_in_processes_give_it_too() -> None:
    programs = [program for program in map(generate, MANY) if program.size == 3]
    run_in_processes(programs[:5])


# ------------------------------------------------------------------------------ the programs


def test_the_same_seed_gives_the_same_program() -> None:
    for seed in MANY:
        assert generate(seed) == generate(seed)
    assert len({str(generate(seed)) for seed in MANY}) == len(MANY)


def test_programs_have_everything_in_them() -> None:
    programs = [generate(seed) for seed in MANY]
    ops = [op for program in programs for op in program.ops.values()]
    kinds = Counter((op.kind, op.asynchronous, op.form) for op in ops)
    for name, kind in KINDS.items():
        for form in kind.forms:
            assert kinds[name, False, form], (name, form)
            assert kinds[name, True, form] or not kind.background, (name, form)
    messages = [op for op in ops if op.kind == "messages"]
    assert any(receive.src is None for op in messages for receive in op.receives)
    assert any(not op.shape or 0 in op.shape for op in ops)
    assert any(max(op.shape, default=0) > 1 << 16 for op in ops)
    assert {program.lanes for program in programs} == {1, 2, 3}
    twins = [Counter(group[1:3] for group in program.groups.values()) for program in programs]
    assert any(max(counts.values()) > 1 for counts in twins), "equal members, made twice"


@pytest.mark.parametrize("part", ["send", "recv"])
def test_some_messages_are_sent_before_their_receive_and_some_are_asked_for_before(
    part: str,
) -> None:
    first = [
        next(action.part for action in program.timeline if action.op == op.number and action.part)
        for program in map(generate, MANY)
        for op in program.ops.values()
        if op.kind == "messages"
    ]
    assert first.count(part) > len(first) // 10


def test_the_timeline_can_be_completed_one_action_after_the_other() -> None:
    """What is finished was started, what is received was sent, and collectives are everybody's."""
    for program in map(generate, MANY):
        sent: Counter[int] = Counter()
        started: set[Action] = set()
        for action in program.timeline:
            if action.verb == "finish":
                started.remove(action._replace(verb="start"))
            elif action.verb == "start":
                started.add(action)
            sent[action.op] += action.part == "send" and action.verb != "finish"
            if action.part == "recv" and action.verb != "start":
                op = program.ops[action.op]
                src = op.receives[action.which].src
                asked = sum(receive.src == src for receive in op.receives[: action.which + 1])
                assert sent[op.number] >= (len(op.messages) if src is None else asked)
        assert not started
        for op in program.ops.values():
            if op.kind != "messages":
                begun = {a.rank for a in program.timeline if a.op == op.number and a.verb != "make"}
                assert begun == set(program.ranks_of(op))


# -------------------------------------------------------------------------- the test of the test


def test_under_the_cooperative_scheduler_the_same_seed_gives_the_same_interleaving() -> None:
    def interleaving(program: Program) -> list[Action]:
        seen: list[Action] = []
        run_on(COOPERATIVE, program, observe=seen.append)
        return seen

    program = generate(smallest_seed(4))
    assert interleaving(program) == interleaving(program)
    assert interleaving(program) != interleaving(replace(program, seed=program.seed + 1))


def two_ranks(*ops: Op, timeline: list[Action]) -> Program:
    world = GroupPlan(WORLD, WORLD, (0, 1), 0)
    return Program(0, 2, 1, {WORLD: world}, {op.number: op for op in ops}, tuple(timeline))


def test_a_message_in_the_place_of_another_one_is_found_out(cluster: Cluster) -> None:
    """Received in the other order: right with two tags, and wrong with one."""
    message, receive = Message(0, (4,), blocking=True), Receive(0, (4,), blocking=True)
    ops = [
        Op(n, "messages", WORLD, 0, root=1, tag=n, messages=(message,), receives=(receive,))
        for n in range(2)
    ]
    timeline = [Action(0, 0, "do", n, "send") for n in (0, 1)]
    timeline += [Action(1, 0, "do", n, "recv") for n in (1, 0)]
    run_on(cluster, two_ranks(*ops, timeline=timeline))
    mixed = [replace(op, tag=5) for op in ops]
    with pytest.raises(WrongResultError, match=r"#1 messages .* receive 0, from 0"):
        run_on(cluster, two_ranks(*mixed, timeline=timeline))


def test_a_wrong_result_is_told_with_its_operation_and_both_values(cluster: Cluster) -> None:
    op = Op(0, "all_reduce", WORLD, 0, shape=(5,), reduce="SUM", layout="gaps")
    program = two_ranks(op, timeline=[Action(rank, 0, "do", 0) for rank in (0, 1)])
    other = replace(program, ops={0: replace(op, number=1)})  # which brings other values

    def be_a_rank(backend: Backend) -> None:
        mine = program if backend.rank == 0 else other
        Performer(mine, backend, Reference(mine), threads=cluster.keeps_time).run()

    with pytest.raises(WrongResultError, match=r"#. all_reduce of group 0(?s:.*)the first at 1: "):
        cluster.run(be_a_rank, 2)


def test_a_tensor_that_must_not_change_and_what_lies_around_a_result_are_looked_at() -> None:
    for layout in ("offset", "gaps"):
        memory = laid_out(torch.zeros(3), layout)
        assert memory.is_intact()
        memory.around[-1][-1] = 9
        assert not memory.is_intact()


def test_a_program_that_fails_is_made_as_small_as_it_can_be() -> None:
    program = generate(smallest_seed(4))
    wanted = sorted(program.ops)[1:20:9]

    def fails(smaller: Program) -> bool:
        return set(wanted) <= set(smaller.ops)

    smallest = shrunk(program, fails)
    assert sorted(smallest.ops) == wanted
    assert len(smallest.groups) <= len(wanted) + 4
    run_on(COOPERATIVE, smallest)
