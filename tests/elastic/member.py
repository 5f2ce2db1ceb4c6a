"""A member of an elastic training, made of its parts, for the tests that they fit.

Replicas are whole, so whoever is left has the state of all: of those who have taken a step that the
others have not, since a rank was lost before their vote, the others take it over.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cache

import msgspec
import torch
from torch import Tensor, nn

from phalanx import (
    DDP,
    FSDP,
    Backend,
    CollectiveTimeoutError,
    PeerLostError,
    ShardingStrategy,
    SimulatedBackend,
)
from phalanx.core.replaceable import ReplaceableBackend
from phalanx.elastic.membership import (
    Decision,
    HeldPart,
    JoinGeneration,
    NextAction,
    Propose,
    View,
    WriteReport,
    next_action,
)
from phalanx.elastic.moves import holding, move
from phalanx.elastic.stores import JobStore
from phalanx.parallel.wrapper import Wrapper

STEPS = 3
WRAPPERS: Mapping[str, Callable[[nn.Module, Backend], Wrapper]] = {
    "ddp": DDP,
    "no_shard": lambda model, backend: FSDP(model, backend, strategy=ShardingStrategy.NO_SHARD),
}


def fresh() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)).double()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) / 8 + number)
    return model


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.1)


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """The same batch on every rank, so the mean is the same for any number of ranks."""
    optimizer.zero_grad()
    inputs = torch.arange(6, dtype=torch.float64).reshape(2, 3) + step
    model(inputs).square().mean().backward()
    optimizer.step()


@cache
def reference(steps: int = STEPS) -> Mapping[str, Tensor]:
    """What one process comes to."""
    model = fresh()
    optimizer = adam(model)
    for step in range(steps):
        take_step(model, optimizer, step)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def check(state: Mapping[str, Tensor], steps: int = STEPS) -> None:
    """That it is what one process comes to, but for the rounding of a mean."""
    for name, expected in reference(steps).items():
        torch.testing.assert_close(state[name].view_as(expected), expected, rtol=1e-12, atol=0)


class Place(ABC):
    """Where a process lives: its clock, and how it meets others."""

    @abstractmethod
    def address(self) -> str:
        """Where it listens, as rank 0 of the next generation would."""

    @abstractmethod
    def meet(self, generation: int, rank: int, size: int, address: str) -> Backend:
        """Be this rank of the generation's group, when all have come."""

    @abstractmethod
    def now(self) -> float:
        """Seconds."""


class Member:
    """One process's training. Version N is the state before step N."""

    def __init__(self, me: str, wrap: str, place: Place, store: JobStore) -> None:
        self.me, self.place, self.store = me, place, store
        self.backend = ReplaceableBackend(SimulatedBackend.create_group(1)[0])
        self.model = WRAPPERS[wrap](fresh(), self.backend)
        self.optimizer = adam(self.model)
        self.version = 0
        self.generation, self.members = 0, tuple[str, ...]()
        self.entered = 0  # the generation whose group the backend is

    def train(self, steps: int = STEPS, counted: Callable[[int], object] = lambda _: None) -> None:
        """Take so many steps, with whoever is left; `counted` is told of each that counts."""
        while self.version < steps:
            step = self.version
            try:
                take_step(self.model, self.optimizer, step)
                self.version = step + 1
                self.backend.barrier(label=f"vote {step}")
            except PeerLostError:
                self.form_anew()
            else:
                counted(step)

    def enter(self, generation: int, members: tuple[str, ...], address: str) -> None:
        """Go on as one of these."""
        self.generation, self.members = generation, members
        group = self.place.meet(generation, members.index(self.me), len(members), address)
        self.backend.inner.abort()
        self.backend.enter(group)
        self.entered = generation
        self.model.regrouped()

    def form_anew(self) -> None:
        """Form generations, until one has a state that all its members have."""
        mine = holding(self.backend.rank, self.model, [self.optimizer])
        held = HeldPart(self.version, self.generation, 0, 1)
        gone: set[int] = set()
        while True:
            decision = self.decide(gone, held)
            gone = set()
            try:
                self.enter(decision.generation, decision.members, decision.address)
                newest = decision.version == held.version
                move([mine] if newest else [], self.backend, self.model, [self.optimizer])
            except CollectiveTimeoutError as error:
                gone = set() if error.peer is None else {error.peer}
            except PeerLostError:
                pass
            else:
                assert decision.version is not None
                self.version = decision.version
                return

    def decide(self, gone: set[int], held: HeldPart) -> Decision:
        began = self.place.now()
        view = View(
            self.me,
            self.place.address(),
            generation=self.generation,
            members=self.members,
            held=(held,),
        )

        def look() -> NextAction | None:
            if self.entered == view.generation:  # the group before stays open, and tells who dies
                gone.update(self.backend.lost())
            reports = [
                self.store.report(view.generation, each) for each in range(len(self.members))
            ]
            known = msgspec.structs.replace(
                view,
                lost=tuple(sorted(gone)),
                reports=tuple(report for report in reports if report is not None),
                decision=self.store.decision(view.generation + 1),
                overdue=self.place.now() > began + 10.0,
            )
            action = next_action(known)
            if isinstance(action, WriteReport):
                self.store.write_report(action.report)
            elif isinstance(action, Propose):
                self.store.propose(action.decision)
            return action if isinstance(action, JoinGeneration) else None

        action = self.store.wait(look, 600.0)
        assert isinstance(action, JoinGeneration)
        return action.decision
