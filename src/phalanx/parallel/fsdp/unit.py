"""A unit: the parameters that are gathered, used, freed and reduced together.

      freed ----gather----> on its way ----wait----> present ----free----> freed

and in a backward pass its gradients:  put, put, ... all in: reduce -> means of this rank's shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakSet

from torch import nn

from phalanx.parallel.fsdp.flat import Flat
from phalanx.parallel.fsdp.gradients import Gradients
from phalanx.parallel.fsdp.whole import Presence


class Call:
    """One forward pass of a unit, for its backward pass.

    epoch    of the parameters that it has read
    earlier  the units that were called before it in its pass, the last one first
    outer    the call of a unit around it, in which it was made
    through  the numbers of outputs by which the backward pass under way has come in
    spent    those by which one came in that did not keep the graph
    inputs   how many of its inputs a backward pass has still to reach; -1: nobody knows
    """

    __slots__ = (
        *("__weakref__", "earlier", "epoch", "inputs", "outer", "spent", "through", "unit"),
    )

    def __init__(self, unit: Unit, epoch: int, earlier: Sequence[Unit], outer: Call | None) -> None:
        self.unit = unit
        self.epoch = epoch
        self.earlier = earlier
        self.outer = outer
        self.through: set[int] = set()
        self.spent: set[int] = set()
        self.inputs = -1


class Unit:
    """One unit on this rank.

    name       of its module in the model; "" is the model itself
    surrounds  whether there are other units inside it
    waiting    calls that no backward pass has come to, as long as their graph is there
    reached    calls that the backward pass under way has come to, and whose inputs it has not
    touched    whether the backward pass under way has come to it
    reduced    whether its gradients are, or are on their way
    finished   whether that pass is thought to have no more to do here
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        flats: list[Flat],
        gradients: list[Gradients],
        presence: Presence,
    ) -> None:
        self.name = name
        self.module = module
        self.flats = flats
        self.surrounds = False
        self.waiting: WeakSet[Call] = WeakSet()
        self.reached: set[Call] = set()
        self.touched = self.reduced = self.finished = False
        self._gradients = gradients
        self.presence = presence
        self._awaited = self._trained = 0

    def is_around(self, other: Unit) -> bool:
        """Whether the other one is inside this one."""
        return other is not self and (not self.name or other.name.startswith(f"{self.name}."))

    @property
    def title(self) -> str:
        """For messages."""
        return self.name or "the model itself"

    # Parameters -----------------------------------------------------------------------------

    def begin_gather(self) -> None:
        """Let the full parameters come, if they are not here."""
        for number, flat in enumerate(self.flats):
            flat.begin_gather(f"FSDP gathers {self.title}, {number}")

    def gather(self) -> None:
        """See to it that they are here."""
        self.begin_gather()
        for flat in self.flats:
            flat.finish_gather()
        self.presence.now = True

    def free(self) -> None:
        """They are not needed now."""
        self.presence.now = False
        for flat in self.flats:
            flat.free()

    # Gradients ------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """A backward pass has come to this unit."""
        if not self.touched:
            self.touched = True
            self._awaited = self._trained = sum(len(flat.trainable()) for flat in self.flats)

    @property
    def has_frozen(self) -> bool:
        """Whether some parameters need no gradients, so that gradients do not tell of the end."""
        return any(not p.requires_grad for flat in self.flats for p in flat.parameters)

    @property
    def owes(self) -> bool:
        """Whether the other ranks may wait for gradients of this one."""
        return (
            (self.touched and not self.reduced)
            or any(g.begun for g in self._gradients)
            or any(whole.grad is not None for flat in self.flats for whole in flat.wholes)
        )

    def drop_accumulated(self) -> None:
        """Gradients of full parameters are not wanted any more."""
        for flat in self.flats:
            for whole in flat.wholes:
                whole.grad = None

    def count(self) -> bool:
        """A parameter's gradient is complete on this rank; True if it is the last one."""
        self._awaited -= 1
        if self._awaited:
            return False
        self._awaited = self._trained  # a reentrant checkpoint may bring all of them once more
        return True

    def put(self, flat: int, number: int) -> None:
        """Take that gradient in."""
        self._gradients[flat].put(number)

    def reduce(self) -> None:
        """Begin to average with the other ranks what is in, and zeros for what is not."""
        self.reduced = True
        for number, (flat, gradients) in enumerate(zip(self.flats, self._gradients, strict=True)):
            gradients.put_rest()
            if flat.trainable():
                gradients.reduce(f"FSDP reduces {self.title}, {number}")

    def finish_scattering(self) -> None:
        """Wait until memory for full gradients is free again."""
        for number, gradients in enumerate(self._gradients):
            gradients.finish_scattering(f"FSDP averages {self.title}, {number}")

    def finish(self) -> None:
        """Wait until this rank has its means."""
        for number, gradients in enumerate(self._gradients):
            gradients.finish(f"FSDP averages {self.title}, {number}")

    def came(self) -> list[bool]:
        """For each parameter, whether it had a gradient on this rank, or has a mean now."""
        return [
            gradients.came(number)
            for flat, gradients in zip(self.flats, self._gradients, strict=True)
            for number in range(len(flat.parameters))
        ]

    @property
    def finite(self) -> bool:
        """Whether all means are."""
        return all(gradients.finite for gradients in self._gradients)

    @property
    def bytes_sent(self) -> int:
        """Of its gradients, by this rank so far, but for what was compressed."""
        return sum(gradients.bytes_sent for gradients in self._gradients)

    def give(self, used: list[bool]) -> None:
        """Means become the parameters' gradients."""
        start = 0
        for flat, gradients in zip(self.flats, self._gradients, strict=True):
            stop = start + len(flat.parameters)
            gradients.give({n for n, any_rank in enumerate(used[start:stop]) if any_rank})
            start = stop

    def end_backward(self) -> None:
        """The pass is over."""
        self.touched = self.reduced = self.finished = False
        self.reached.clear()

    def forget(self) -> None:
        """The pass has failed: drop what is there of it."""
        self.end_backward()
        for gradients in self._gradients:
            gradients.forget()
