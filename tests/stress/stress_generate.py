"""From a seed to a random program. The same seed gives the same program, everywhere.

Actions are appended to the timeline so that each can be completed with what came before:

    blocking collective      all members do it, one after the other
    asynchronous ones        all members start it; each finishes it at some later point
    a burst                  several of several groups, which each member starts in another order
    messages                 sent before they are received, or asked for before they are sent,
                             or by turns; other things happen in between
"""

from __future__ import annotations

import random

from stress_choices import DTYPES, LAYOUTS, a_shape, algorithms_for, ops_for
from stress_kinds import KINDS
from stress_program import BEFORE, WORLD, Action, GroupPlan, Message, Op, Program, Receive

MESSAGES = 0.4  # of all operations
BURSTS = 0.15
HUGE = 0.1  # of the impatient messages: more than a socket takes
MANY_ROWS = 5000  # as many for each rank would be too many


def generate(seed: int) -> Program:
    """The program of this seed: 1 to 5 ranks, 1 to 3 threads each, 5 to 30 operations."""
    return _Writer(seed).program()


class _Writer:
    """Writes one program."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.draw = random.Random(f"program {seed}")
        self.size = self.draw.choice((1, 2, 2, 3, 3, 3, 4, 4, 5))
        self.lanes = self.draw.choice((1, 1, 1, 2, 3))
        self.groups = {WORLD: GroupPlan(WORLD, WORLD, tuple(range(self.size)), 0)}
        self.ops: dict[int, Op] = {}
        self.timeline: list[Action] = []
        self.open: list[Action] = []  # what has been started, and can be finished
        self.queues: list[list[Action]] = []  # of each operation that is not all written yet

    def program(self) -> Program:
        for _ in range(self.draw.randint(0, 5)):
            self.new_group(BEFORE)
        self.make_groups()
        for _ in range(self.draw.randint(5, 30)):
            roll = self.draw.random()
            if roll < MESSAGES:
                self.messages()
            elif roll < MESSAGES + BURSTS:
                self.burst()
            elif roll < 0.97:
                self.collective()
            else:
                self.new_group(None)
            self.go_on(self.draw.choice((0.0, 0.3, 0.8)))
        self.go_on(1.0)
        return Program(
            self.seed, self.size, self.lanes, self.groups, self.ops, tuple(self.timeline)
        )

    # Groups -------------------------------------------------------------------------------

    def new_group(self, lane: int | None) -> None:
        """A group of some members of another; in `lane` None, made in the middle of everything."""
        draw = self.draw
        chosen = self.a_group()
        if chosen.number != WORLD and draw.random() < 0.3:  # the same members once more
            parent, ranks = self.groups[chosen.parent], chosen.ranks
        else:
            parent, count = chosen, len(chosen.ranks)
            few = 1 if draw.random() < 0.1 else min(2, count)
            ranks = tuple(sorted(draw.sample(parent.ranks, draw.randint(few, count))))
        number = len(self.groups)
        runs_in = draw.randrange(self.lanes) if lane == BEFORE else parent.lane
        self.groups[number] = GroupPlan(number, parent.number, ranks, runs_in)
        if lane is None:
            self.timeline += [Action(rank, runs_in, "make", number) for rank in ranks]

    def a_group(self, least: int = 1) -> GroupPlan:
        """One of the groups with that many members; rather a large one than a small one."""
        groups = [group for group in self.groups.values() if len(group.ranks) >= least]
        return self.draw.choices(groups, [len(group.ranks) ** 2 for group in groups])[0]

    def make_groups(self) -> None:
        """Every rank makes its groups, in an order of its own but for parents and twins."""
        for rank in range(self.size):
            mine = [g for g in self.groups.values() if rank in g.ranks and g.number != WORLD]
            self.draw.shuffle(mine)
            done = {WORLD}
            while mine:
                group = next(
                    g
                    for g in mine
                    if g.parent in done
                    and not any(o.number < g.number and o[1:3] == g[1:3] for o in mine)
                )
                mine.remove(group)
                done.add(group.number)
                self.timeline.append(Action(rank, BEFORE, "make", group.number))

    # Collectives --------------------------------------------------------------------------

    def new_collective(self, group: GroupPlan, *, asynchronous: bool) -> Op:
        draw = self.draw
        names = [name for name, kind in KINDS.items() if kind.background or not asynchronous]
        name = draw.choice(names)
        kind = KINDS[name]
        dtype = draw.choice(DTYPES)
        shape = a_shape(draw)
        size = len(group.ranks)
        if kind.cuts:
            rows = shape[0] if shape else 1
            shape = (size * (rows if rows <= MANY_ROWS else rows // size), *shape[1:])
        op = Op(
            number=len(self.ops),
            kind=name,
            group=group.number,
            lane=group.lane,
            dtype=dtype,
            shape=shape or ((1,) if kind.joins else ()),
            reduce=draw.choice(ops_for(dtype)) if kind.reduces else "",
            root=draw.randrange(size) if kind.rooted or name == "exchange" else 0,
            algorithm=draw.choice(algorithms_for(name)),
            form=draw.choice(kind.forms),
            layout=draw.choice(LAYOUTS),
            asynchronous=asynchronous,
            tag=self.new_tag(group.lane),
        )
        self.ops[op.number] = op
        return op

    def collective(self) -> None:
        group = self.a_group()
        op = self.new_collective(group, asynchronous=self.draw.random() < 0.5)
        verb = "start" if op.asynchronous else "do"
        for rank in group.ranks:
            self.act(Action(rank, op.lane, verb, op.number))

    def burst(self) -> None:
        """Rank 0 starts A, B; rank 1 starts B, A: in order only inside each group."""
        draw = self.draw
        many = [self.a_group() for _ in range(draw.randint(2, 5))]
        ops = [self.new_collective(group, asynchronous=True) for group in many]
        for rank in range(self.size):
            mine = [op for op in ops if rank in self.groups[op.group].ranks]
            order = [op.group for op in mine]
            draw.shuffle(order)
            for group in order:
                op = next(op for op in mine if op.group == group)
                mine.remove(op)
                self.act(Action(rank, op.lane, "start", op.number))

    # Messages -----------------------------------------------------------------------------

    def messages(self) -> None:
        draw = self.draw
        if self.size == 1:
            self.collective()
            return
        group = self.a_group(least=2)
        lane = draw.randrange(self.lanes) if group.number == WORLD else group.lane
        dst = draw.randrange(len(group.ranks))
        others = [rank for rank in range(len(group.ranks)) if rank != dst]
        from_any = draw.random() < 0.3
        sources = draw.sample(others, draw.randint(1, len(others)) if from_any else 1)
        shape = a_shape(draw)
        sent = []
        for _ in range(draw.randint(1, 4)):
            blocking, patient = self.how_to_wait()
            each = shape if from_any else a_shape(draw)
            if blocking and not (patient or from_any) and draw.random() < HUGE:
                each = (draw.randint(1 << 20, 2 << 20),)  # given up in the middle
            sent.append(Message(draw.choice(sources), each, blocking, patient))
        # Whoever asks for one sender's messages first leaves the others to those who take any.
        of_first = [message.shape for message in sent if message.src == sources[0]]
        named = min(draw.randint(0, 4), len(of_first)) if from_any else len(sent)
        asked = [Receive(sources[0], of_first[i], *self.how_to_wait()) for i in range(named)]
        asked += [Receive(None, shape, *self.how_to_wait()) for _ in sent[named:]]
        op = Op(
            number=len(self.ops),
            kind="messages",
            group=group.number,
            lane=lane,
            dtype=draw.choice(DTYPES),
            shape=shape,
            root=dst,
            layout=draw.choice(LAYOUTS),
            tag=self.new_tag(lane),
            messages=tuple(sent),
            receives=tuple(asked),
        )
        self.ops[op.number] = op
        self.queues.append(self.in_some_order(op, group))

    def how_to_wait(self) -> tuple[bool, bool]:
        """Whether a message is sent or received by a blocking call, and whether patiently."""
        return self.draw.random() < 0.6, self.draw.random() < 0.7

    def in_some_order(self, op: Op, group: GroupPlan) -> list[Action]:
        """Sends and receives of one operation, so that each can be completed with what precedes."""
        dst = group.ranks[op.root]
        sends, asks = [], []
        for i, message in enumerate(op.messages):
            src = group.ranks[message.src]
            verb = "do" if message.blocking else "start"
            sends.append(Action(src, op.lane, verb, op.number, "send", i))
        waits = [not receive.blocking for receive in op.receives]
        for i, may_wait in enumerate(waits):
            verb = "start" if may_wait else "do"
            asks.append(Action(dst, op.lane, verb, op.number, "recv", i))
        leading = waits.index(False) if False in waits else len(waits)
        early, late = asks[:leading], asks[leading:]
        if self.draw.random() < 0.5:  # asked for before they are sent
            return [*early, *sends, *late]
        if any(receive.src is None for receive in op.receives):
            return [*sends, *asks]
        return [action for pair in zip(sends, asks, strict=True) for action in pair]

    def new_tag(self, lane: int) -> int:
        """A tag that no other lane uses: a new one, or that of messages that have all come.

        Not one of messages received from anyone: these could take the new ones.
        """
        mine = [op for op in self.ops.values() if op.kind == "messages" and op.lane == lane]
        busy = {a.op for a in self.open} | {a.op for queue in self.queues for a in queue}
        spent = {
            op.tag
            for op in mine
            if op.number in busy or any(receive.src is None for receive in op.receives)
        }
        again = sorted({op.tag for op in mine} - spent)
        if again and self.draw.random() < 0.5:
            return self.draw.choice(again)
        return len(self.ops) * self.lanes + lane

    # What goes on meanwhile ---------------------------------------------------------------

    def act(self, action: Action) -> None:
        self.timeline.append(action)
        if action.verb == "start":
            self.open.append(action._replace(verb="finish"))

    def go_on(self, share: float) -> None:
        """Some of what waits in queues happens, and some of what was started is finished."""
        draw = self.draw
        for _ in range(round(share * sum(map(len, self.queues)) + 0.5)):
            queues = [queue for queue in self.queues if queue]
            if queues:
                self.act(draw.choice(queues).pop(0))
        self.queues = [queue for queue in self.queues if queue]
        can_end = [action for action in self.open if self.may_finish(action)]
        draw.shuffle(can_end)
        for action in can_end[: round(share * len(can_end) + 0.5)]:
            self.open.remove(action)
            self.timeline.append(action)

    def may_finish(self, action: Action) -> bool:
        """A receive can be waited for when all that is asked for has been sent."""
        if action.part != "recv":
            return True
        unsent = (a for queue in self.queues for a in queue if a.op == action.op)
        return not any(a.part == "send" for a in unsent)
