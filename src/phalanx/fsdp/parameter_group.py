"""A parameter group: the parameters that are unsharded, used, resharded and reduced together.

In a backward pass a group is in one of five phases:

                    enter            reduce             end
          IDLE ----------> BACKWARD --------> REDUCED --------> IDLE
                            |    |               |
          IDLE <--- end ----+    | leave         | leave
                                 v    reduce     v      end
          IDLE <----- end ----- LEFT ---------> DONE ---------> IDLE

    phase      enter      reduce    leave   end
    IDLE       BACKWARD   -         -       -
    BACKWARD   .          REDUCED   LEFT    IDLE
    REDUCED    .          .         DONE    IDLE
    LEFT       .          DONE      .       IDLE
    DONE       .          .         .       IDLE

The pass enters a group by `pre_backward`, or its first gradient, and leaves it by `post_backward`.
A dot: the event changes nothing, as when a checkpoint brings gradients once more. A dash: it is an
error of FSDP itself. `runtime.py` decides when all this happens; `unsharded.py` draws the states of
parameters. Of every field that changes, brackets name the methods that write it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from weakref import WeakKeyDictionary

import torch
from torch import nn

from phalanx.errors import DistributedError
from phalanx.fsdp.flat_param import FlatParameter, ShardingPlan
from phalanx.fsdp.gradients import CompressedReduction, FlatGradient
from phalanx.fsdp.unsharded import UnshardState
from phalanx.parallel.guards import refuse


class Phase(str, Enum):
    """The phase of the backward pass under way, for one parameter group."""

    IDLE = "IDLE"  # it has not come to the group, or there is no pass
    BACKWARD = "BACKWARD"  # it computes the group's gradients
    REDUCED = "REDUCED"  # those of the calls that it came to are there, and reduced, or being so
    LEFT = "LEFT"  # it has gone on, and nothing was reduced: under no_sync, in autograd.grad
    DONE = "DONE"  # it has gone on, and they are reduced, or being so


IDLE, BACKWARD, REDUCED, LEFT, DONE = Phase
TRANSITIONS: Mapping[tuple[Phase, str], Phase] = {
    (IDLE, "enter"): BACKWARD,
    (BACKWARD, "reduce"): REDUCED,
    (BACKWARD, "leave"): LEFT,
    (REDUCED, "leave"): DONE,
    (LEFT, "reduce"): DONE,
    **{(phase, "end"): IDLE for phase in (BACKWARD, REDUCED, LEFT, DONE)},
}
"""The arrows of the picture above: a phase and an event, and the phase after it."""


@dataclass(eq=False)
class ForwardPass:
    """A forward pass of the model: the one under way, or the last one."""

    order: list[ParameterGroup] = field(default_factory=list)  # that were called [pre_forward]
    # Calls under way, inside each other; the error that was being handled when each began; the
    # autograd nodes of its inputs, of a leaf None [pre_forward, post_forward, abandon_forward]
    stack: list[tuple[ForwardCall, BaseException | None, set[object]]] = field(default_factory=list)
    # Whether there is a graph of a backward pass, which will read parameters, too
    has_graph: bool = False  # [pre_backward, _close_backward]
    prefetched_next: bool = False  # were groups unsharded for the one after it [prefetch_first]


@dataclass(eq=False)
class ForwardCall:
    """One forward pass of a group's module, for its backward pass."""

    group: ParameterGroup
    forward: ForwardPass  # in which it was made
    epoch: int  # the write epoch whose parameters it has read
    earlier: Sequence[ParameterGroup]  # that were called before it in its pass, the last one first
    outer: ForwardCall | None  # of a group around it, in which it was made
    # How many of its inputs a backward pass has still to reach; 0: it has left the call; less than
    # that: nobody knows [_watch, _at_input, _open]
    inputs: int = -1
    # The outputs by which a pass came that did not keep the graph [_end_backward]
    spent: set[int] = field(default_factory=set)


@dataclass(eq=False)
class BackwardPass:
    """A backward pass that is under way, or was cut short by an error."""

    keeps_graph: bool  # was it asked to keep the graph that it goes along
    accumulates: bool  # does it add to gradients of parameters [post_accumulate_grad]
    makes_graph: bool = False  # of itself [pre_backward]
    # The groups that it has entered, in order [_open, post_accumulate_grad]
    reached: list[ParameterGroup] = field(default_factory=list)


class ParameterGroup:
    """One parameter group on this rank.

    name        of its module in the model; "" is the model itself
    title       the name, for messages
    flats       its flat parameters, one for each dtype, device and requires_grad
    gradients   the gradients of each of these
    state       sharded, unsharding, unsharded or summoned
    surrounds   whether there are other groups inside it
    phase       in the backward pass under way [after]
    waiting     calls that no backward pass has come to, while their graph is there; True: one has,
                and kept it [_watch, _open, _end_backward, abandon_forward, write_epoch]
    calls       those that it has come to; by which outputs [_open, _at_output, _close_backward]
    missing     the parameters of which it lacks the gradient; empty before the first one comes, and
                after the last [count_gradient, _close_backward]
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        names: Collection[str],
        flats: Sequence[FlatParameter],
        state: UnshardState,
        compression: CompressedReduction | None,
        rank: int,
    ) -> None:
        """`names` are those of all groups."""
        self.name = name
        self.title = state.group
        self.module = module
        self.state = state
        self.flats = flats
        self.gradients = [FlatGradient(flat, compression) for flat in flats]
        self.surrounds = any(map(self.is_around, names))
        self._rank = rank
        self.phase = IDLE
        self.waiting: WeakKeyDictionary[ForwardCall, bool] = WeakKeyDictionary()
        self.calls: dict[ForwardCall, set[int]] = {}
        self.missing: set[tuple[FlatGradient, int]] = set()

    @classmethod
    def of(
        cls,
        name: str,
        module: nn.Module,
        cuts: Mapping[str, Mapping[str, nn.Parameter]],
        plan: ShardingPlan,
        compression: CompressedReduction | None,
    ) -> ParameterGroup:
        """Return the group of this name, with its parameters, whole before, as flat ones."""
        state = UnshardState(name or "the model itself")
        plans = plan, plan._replace(precision=None)
        norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        exact = {p for norm in norms for p in norm.parameters() if plan.precision is not None}
        alike: dict[tuple[torch.dtype, torch.device, bool, bool], dict[str, nn.Parameter]] = {}
        for of, p in cuts[name].items():
            alike.setdefault((p.dtype, p.device, p.requires_grad, p in exact), {})[of] = p
        flats = [
            FlatParameter(some, f"{state.group}, {number}", state, plans[of_norms])
            for number, ((*_, of_norms), some) in enumerate(alike.items())
        ]
        return cls(name, module, cuts, flats, state, compression, plan.world.rank)

    def regrouped(
        self, names: Collection[str], plan: ShardingPlan, compression: CompressedReduction | None
    ) -> ParameterGroup:
        """Return a group of the same parameters, for other ranks."""
        state = UnshardState(self.title)
        flats = [flat.regrouped(state, plan) for flat in self.flats]
        rank = plan.world.rank
        return ParameterGroup(self.name, self.module, names, flats, state, compression, rank)

    def close(self) -> None:
        """Forget a pass, and free unsharded memory. Full parameters are of no use any more."""
        self.state.after("reshard")
        self.state.on_backward = None
        self.waiting.clear()
        self.calls.clear()
        for flat in self.flats:
            flat.close()

    def is_around(self, name: str) -> bool:
        """Return whether the group of this name is inside this one."""
        return name != self.name and (not self.name or name.startswith(f"{self.name}."))

    # Parameters -----------------------------------------------------------------------------

    def unshard(self) -> None:
        """Begin to unshard the parameters, if that has not begun."""
        if self.state.now != "UNSHARDED":  # summoned, too: autograd may have saved views of them
            self.state.after("unshard")
            for flat in self.flats:
                flat.unshard()

    def wait_for_unshard(self) -> None:
        """Wait until they are unsharded."""
        for flat in self.flats:
            flat.wait_for_unshard()
        self.state.after("wait")

    def reshard(self) -> None:
        """Reshard the parameters, which are not needed now."""
        if self.state.now != "SHARDED":
            self.state.after("reshard")
            for flat in self.flats:
                flat.reshard()

    # A backward pass ------------------------------------------------------------------------

    def after(self, event: str) -> None:
        """Go along the arrow of this event, if there is one. `DistributedError` for a dash."""
        if self.phase is IDLE and event != "enter":
            problem = (
                f"{event} of {self.title}, which no backward pass has come to: a fault of FSDP"
            )
            refuse("FSDP", self._rank, problem, DistributedError)
        self.phase = TRANSITIONS.get((self.phase, event), self.phase)

    def count_gradient(self, gradient: FlatGradient, number: int) -> bool:
        """Count a complete gradient of this rank; return whether it is the last one.

        Reentrant checkpoints may bring some of them several times, and all of them once more.
        """
        if not self.missing:
            for each in self.gradients:
                parameters = enumerate(each.flat.parameters)
                self.missing |= {(each, at) for at, p in parameters if p.requires_grad}
        self.missing.discard((gradient, number))
        return not self.missing

    @property
    def owes(self) -> bool:
        """True if the other ranks may wait for gradients of this one."""
        return self.phase in (BACKWARD, LEFT) or any(each.owes for each in self.gradients)
