"""One rank carries out its part of a random program, and compares all that it gets."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from clusters import whole
from stress_kinds import KINDS, Value, begin
from stress_messages import Finish, Messages
from stress_program import BEFORE, WORLD, Action, Op, Program
from stress_values import WrongResultError, difference, laid_out, same
from torch import Tensor

from phalanx import Backend
from phalanx.core.matching import CHANNEL, MESSAGE, Matching

Observer = Callable[[Action], None]


class Reference:
    """What every rank brings to and gets from each collective, worked out once for all ranks."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._known: dict[int, tuple[list[Value], list[Value]]] = {}

    def of(self, op: Op) -> tuple[list[Value], list[Value]]:
        """(what all ranks of the group bring, what all of them get), in the operation's dtype."""
        known = self._known.get(op.number)
        if known is None:  # by two threads at once: both find the same
            kind, size = KINDS[op.kind], len(self._program.ranks_of(op))
            given = [kind.given(op, rank, size) for rank in range(size)]
            expected = kind.expected(op, size, given)
            known = _of_dtype(given, op.dtype), _of_dtype(expected, op.dtype)
            self._known[op.number] = known
        return known


def _of_dtype(value: Value, dtype: torch.dtype) -> Value:
    if isinstance(value, Tensor):
        return value.to(dtype)
    if isinstance(value, list):
        return [_of_dtype(part, dtype) for part in value]
    return value


class Performer:
    """A rank of the program, on a backend.

    threads    whether its lanes are threads of their own; else it does all in the timeline's order
    observe    is told of each action before it is begun
    """

    def __init__(
        self,
        program: Program,
        backend: Backend,
        reference: Reference,
        *,
        threads: bool,
        observe: Observer = lambda action: None,
    ) -> None:
        self._program = program
        self._groups: dict[int, Backend] = {WORLD: backend}
        self._rank = backend.rank
        self._reference = reference
        self._threads = threads
        self._observe = observe
        self._pending: dict[Action, Finish] = {}
        self._messages = Messages()
        self._failures: list[BaseException] = []

    def run(self) -> None:
        """Do everything. At the end nothing is under way, and no message is left."""
        world = self._groups[WORLD]
        if self._threads:
            self._carry_out(self._program.actions(self._rank, BEFORE))
            self._run_lanes()
        else:
            self._carry_out(self._program.of(self._rank))
        world.barrier()  # all that was sent has been received
        with world.engine.lock:
            left = self._left(world.engine.matching)
        world.barrier()  # nobody begins with another program before everybody has looked
        if left:
            raise WrongResultError(f"rank {self._rank}: bytes of messages are left: {left}")

    def _left(self, matching: Matching) -> dict[int, int]:
        """Bytes that kept messages take, by peer, but for those of peers in the next barrier."""
        left = dict(matching.unexpected_bytes)
        for (_, peer), queue in matching.unexpected.items():
            if not any(message.total for message in queue):
                left[peer] -= CHANNEL + MESSAGE * len(queue)
        return {peer: count for peer, count in left.items() if count}

    def _run_lanes(self) -> None:
        lanes = [self._program.actions(self._rank, lane) for lane in range(self._program.lanes)]
        threads = [
            threading.Thread(target=self._lane, args=(lane,), name=f"rank {self._rank} lane {n}")
            for n, lane in enumerate(lanes[1:], start=1)
        ]
        for thread in threads:
            thread.start()
        self._lane(lanes[0])
        for thread in threads:
            thread.join()
        if self._failures:
            raise self._failures[0]

    def _lane(self, actions: list[Action]) -> None:
        try:
            self._carry_out(actions)
        except BaseException as error:
            self._failures.append(error)
            whole(self._groups[WORLD]).abort()  # or the other lanes wait in vain

    def _carry_out(self, actions: list[Action]) -> None:
        for step, action in enumerate(actions):
            self._observe(action)
            try:
                self._do(action)
            except BaseException as error:
                if hasattr(error, "add_note"):  # since Python 3.11
                    op = "" if action.verb == "make" else f" ({self._program.ops[action.op]})"
                    error.add_note(
                        f"seed {self._program.seed}, rank {self._rank}, lane {action.lane}, "
                        f"step {step}: {action}{op}"
                    )
                raise

    def _do(self, action: Action) -> None:
        if action.verb == "make":
            group = self._program.groups[action.op]
            parent = self._program.groups[group.parent]
            members = [parent.ranks.index(rank) for rank in group.ranks]
            self._groups[action.op] = self._groups[group.parent].subgroup(members)
            return
        if action.verb == "finish":
            self._pending.pop(action)()
            return
        op = self._program.ops[action.op]
        waits = action.verb == "do"
        begin_it = {
            "": self._collective,
            "send": self._messages.send,
            "recv": self._messages.receive,
        }[action.part]
        finish = begin_it(op, self._groups[op.group], action.which, waits)
        if waits:
            finish()
        else:
            self._pending[action._replace(verb="finish")] = finish

    # Collectives --------------------------------------------------------------------------

    def _collective(self, op: Op, backend: Backend, index: int, waits: bool) -> Finish:
        given, expected = (each[backend.rank] for each in self._reference.of(op))
        tensors = given if isinstance(given, list) else [given]
        if not all(isinstance(tensor, Tensor) for tensor in tensors):
            result = begin(op, backend, given, None)
            return partial(self._check, op, result, waits, expected)
        mine = [laid_out(tensor, op.layout) for tensor in tensors]
        into = None
        if op.form == "into" and isinstance(expected, Tensor):
            into = laid_out(torch.ones_like(expected), op.layout)
        brought = [memory.tensor for memory in mine]
        result = begin(
            op,
            backend,
            brought if isinstance(given, list) else brought[0],
            into.tensor if into is not None else None,
        )
        in_memory = brought if op.form == "in_place" else None if into is None else [into.tensor]

        def finish() -> None:
            got = self._check(op, result, waits, expected)
            if in_memory is not None:
                got = got if isinstance(got, list) else [got]
                if any(one is not other for one, other in zip(got, in_memory, strict=True)):
                    raise WrongResultError(f"{op}: the result is not in the memory that was given")
            for memory, values in zip(mine, tensors, strict=True):
                if in_memory is not brought and not same(memory.tensor, values):
                    raise WrongResultError(f"{op}: the tensor that was given has changed")
            for memory in [*mine, *([] if into is None else [into])]:
                memory.check_around(op)
            for memory in mine:
                memory.tensor.zero_()  # nobody reads it any more

        return finish

    def _check(self, op: Op, result: Any, waits: bool, expected: Value) -> Any:
        got = result.wait() if op.asynchronous else result
        if not same(got, expected):
            raise WrongResultError(f"{op}: {difference(got, expected)}")
        return got
