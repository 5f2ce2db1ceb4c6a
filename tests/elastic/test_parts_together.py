"""The parts of elastic training fit: ranks that crash at any turn, and the others train on.

A training in simulated processes, whose replicas are whole: who is left agrees on the next
generation in the store, forms its group, and takes over the newest state that one of them has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache

import msgspec
import pytest
import torch
from elastic_stores import TOKEN
from forms import LONG, examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import phalanx
from phalanx import DDP, FSDP, Backend, CollectiveTimeoutError, PeerLostError, ShardingStrategy
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
from phalanx.elastic.stores import JobStore, KeyValueStore
from phalanx.parallel.wrapper import Wrapper
from phalanx.transport.simulated import SimulatedBackend
from phalanx.transport.simulated_process import SimulatedProcess

STEPS = 3
WRAPPERS = {
    "ddp": DDP,
    "no_shard": lambda model, backend: FSDP(model, backend, strategy=ShardingStrategy.NO_SHARD),
}


class SimulatedEntries(KeyValueStore):
    """The store of a simulation. Who waits for it sleeps until it changes."""

    name, timeout = "the simulated store", 1.0

    def __init__(self, process: SimulatedProcess) -> None:
        self._process = process

    def get(self, key: str) -> str:
        store = self._process.store
        return store.get(key).decode() if store.check([key]) else ""

    def set(self, key: str, value: str) -> None:
        self._process.store.set(key, value)

    def compare_set(self, key: str, expected: str, value: str) -> str:
        return self._process.store.compare_set(key, expected, value).decode()

    def pauses(self, seconds: float) -> Iterator[object]:
        end = self._process.now() + seconds
        while self._process.now() < end:
            yield None
            self._process.store.wait_for_change(1.0)

    def close(self) -> None:
        """There is nothing to close."""


def gradient_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """The same batch on every rank, so the mean is the same for any number of ranks."""
    optimizer.zero_grad()
    inputs = torch.arange(6, dtype=torch.float64).reshape(2, 3) + step
    model(inputs).square().mean().backward()
    optimizer.step()


def fresh() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)).double()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) / 8 + number)
    return model


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.1)


@cache
def reference() -> Mapping[str, Tensor]:
    """What one process comes to."""
    model = fresh()
    optimizer = adam(model)
    for step in range(STEPS):
        gradient_step(model, optimizer, step)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


class Member:
    """One process's training. Version N is the state before step N."""

    def __init__(self, backend: Backend, wrap: str) -> None:
        assert isinstance(backend, SimulatedBackend)
        assert backend.process is not None
        self.process = backend.process
        self.me = f"p{self.process.number}"
        self.store = JobStore(SimulatedEntries(self.process), "job", TOKEN.encode())
        self.backend = ReplaceableBackend(SimulatedBackend.create_group(1)[0])
        self.model: Wrapper = WRAPPERS[wrap](fresh(), self.backend)
        self.optimizer = adam(self.model)
        self.version = 0
        self.backend.enter(backend)
        self.model.regrouped()
        self.generation, self.members = 1, tuple(f"p{rank}" for rank in range(backend.world_size))
        self.entered = 1  # the generation whose group the backend is

    def train(self) -> tuple[int, int]:
        while self.version < STEPS:
            try:
                step = self.version
                gradient_step(self.model, self.optimizer, step)
                self.version = step + 1  # it counts for all once one of them has seen all votes
                self.backend.barrier(label=f"vote {step}")
            except PeerLostError:
                self.form_anew()
        return self.generation, len(self.members)

    def form_anew(self) -> None:
        """Form generations until one has a state that all its members have."""
        mine = holding(self.backend.rank, self.model, [self.optimizer])
        held = HeldPart(self.version, self.generation, 0, 1)
        gone: set[int] = set()
        while True:
            decision = self.decide(gone, held)
            self.generation, self.members = decision.generation, decision.members
            newest = decision.version == held.version
            try:
                self.enter(decision.members.index(self.me))
                move([mine] if newest else [], self.backend, self.model, [self.optimizer])
            except CollectiveTimeoutError as error:
                gone = set() if error.peer is None else {error.peer}
            except PeerLostError:
                gone = set()
            else:
                assert decision.version is not None
                self.version = decision.version
                return

    def enter(self, rank: int) -> None:
        name, size = f"generation {self.generation}", len(self.members)
        group = self.process.form(name, rank, size, seconds=5.0)
        self.backend.inner.abort()
        self.backend.enter(group)
        self.entered = self.generation
        self.model.regrouped()

    def decide(self, gone: set[int], held: HeldPart) -> Decision:
        began = self.process.now()
        view = View(
            self.me,
            f"{self.me}:1",
            generation=self.generation,
            members=self.members,
            held=(held,),
        )

        def look() -> NextAction | None:
            reports = [
                self.store.report(view.generation, each) for each in range(len(self.members))
            ]
            if self.entered == view.generation:  # the group before stays open, and tells who dies
                gone.update(self.backend.lost())
            known = msgspec.structs.replace(
                view,
                lost=tuple(sorted(gone)),
                reports=tuple(report for report in reports if report is not None),
                decision=self.store.decision(view.generation + 1),
                overdue=self.process.now() > began + 10.0,
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


def run(wrap: str, size: int, crashes: Mapping[int, int], seed: int = 0) -> phalanx.Simulation[int]:
    """Train, and compare what each survivor comes to with the reference, bit for bit alike."""
    ends: list[dict[str, Tensor]] = []

    def train(backend: Backend) -> int:
        member = Member(backend, wrap)
        generation, _ = member.train()
        ends.append({name: p.detach().clone() for name, p in member.model.named_parameters()})
        return generation

    ended = phalanx.simulate(train, size, seed, crashes=crashes)
    for state in ends:
        for name, expected in reference().items():
            torch.testing.assert_close(state[name].view_as(expected), expected, rtol=1e-12, atol=0)
            assert torch.equal(state[name], ends[0][name])
    assert len(ends) >= size - len(crashes)
    return ended


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_the_others_train_on_wherever_one_of_them_crashes(wrap: str) -> None:
    turns = run(wrap, 3, {}).turns
    for process in range(3):
        for turn in range(0, turns[process], 1 if LONG else 3):
            generations = run(wrap, 3, {process: turn})
            assert generations[process] is None
            assert {each for each in generations if each is not None} <= {1, 2}


@settings(max_examples=examples(40))
@given(
    st.sampled_from(sorted(WRAPPERS)),
    st.dictionaries(st.integers(0, 3), st.integers(0, 40), min_size=2, max_size=3),
    st.integers(0, 99),
)
def test_several_crashes_also_while_a_generation_forms_leave_the_others_training(
    wrap: str, crashes: dict[int, int], seed: int
) -> None:
    run(wrap, 4, crashes, seed)
