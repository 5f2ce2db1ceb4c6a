"""A module that each rank trains by itself, and that all ranks make alike now and then.

    rank 0   step step step |      | step step step |      |
                             \\    /                  \\    /
    network                  [meet]                  [meet]         every 3 steps
                             /    \\                  /    \\
    rank 1   step step step |      | step step step |      |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx.aggregation.saved import needed
from phalanx.backends.base import Backend
from phalanx.collectives import ReduceOp
from phalanx.collectives.run import start
from phalanx.collectives.task import in_place
from phalanx.errors import MisuseError
from phalanx.parallel.averaging import AllReduced
from phalanx.parallel.hints import hint
from phalanx.parallel.local.buffers import Buffers, floating, kept_buffers
from phalanx.parallel.local.counter import StepCounter
from phalanx.parallel.local.flats import averaged
from phalanx.parallel.local.meeting import Meeting
from phalanx.parallel.local.saved import (
    is_value_of_another,
    local_state,
    put_values,
    saved_counts,
    saved_values,
)
from phalanx.parallel.optimizers import claim, owner_of
from phalanx.parallel.replicas import check_same_model
from phalanx.parallel.tensors import broadcast_all_
from phalanx.parallel.wrapper import Wrapper


class Periodic(Wrapper):
    """What `LocalSGD` and `DiLoCo` have in common: they count steps, and meet.

    every   steps between two meetings

    A step is one of torch's optimizers with parameters of this module; where there are several of
    them for it, one of each, in any order, is one step. What accumulates gradients is none, nor is
    a step that a gradient scaler skips. Parameters that are written by hand are not noticed; those
    that no optimizer has should be frozen, or the first step is over when the second one begins.
    """

    averages = True
    optimizers_apart = True

    def __init__(self, module: nn.Module, backend: Backend, *, every: int) -> None:
        super().__init__(module, backend)
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every must be a number of steps, at least 1, not {every!r}")
        self.every = every
        named = dict(module.named_parameters())
        self._trained = {name: p for name, p in named.items() if p.requires_grad}
        self._frozen = {name: p for name, p in named.items() if not p.requires_grad}
        for name, parameter in named.items():
            if owner_of(parameter) is not None:
                self._refuse(f"{name} is in another wrapper already: delete that one first")
        self._counter = StepCounter(self._trained)
        self._fresh = True  # the ranks were alike, and this one has taken no step since
        self._shown = False  # inside `averaged`
        self._statistics = Buffers(module, backend)

    def _begin_with(self, meeting: Meeting, options: Mapping[str, object]) -> None:
        """Compare with the other ranks, become like rank 0, and notice steps from now on."""
        who = type(self).__name__
        check_same_model(self.module, self.backend, {"every": self.every, **options}, who=who)
        tensors = [*self.module.parameters(), *self.module.buffers()]
        broadcast_all_(tensors, self.backend, 0)
        meeting.begin()
        self._meeting = meeting
        for parameter in self.module.parameters():
            claim(parameter, self)

    # As a module ----------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward. Nothing is sent, here or in backward."""
        return self.module(*args, **kwargs)

    @property
    def steps(self) -> int:
        """How many steps this rank has taken."""
        return self._counter.counts.steps

    @property
    def meetings(self) -> int:
        """How often the ranks have met; the same on every rank."""
        return self._counter.counts.meetings

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent so far to make parameters and buffers alike, as rings and
        direct messages send them; those of `averaged` and of checkpoints are not among them.
        """
        return self._meeting.bytes_sent + self._statistics.bytes_sent

    # Steps ----------------------------------------------------------------------------------

    def before_step(self, optimizer: Optimizer) -> None:
        """An optimizer is about to write: a period may begin by that."""
        self._check_trained(optimizer)
        if not self._counter.written_by(optimizer):
            return
        self._check_not_shown("a step")
        if self._counter.before(optimizer):
            self._meet_if_it_is_time()
        self._fresh = False

    def after_step(self, optimizer: Optimizer) -> None:
        """It has: a period may be over."""
        if self._counter.after(optimizer):
            self._meet_if_it_is_time()

    def _check_trained(self, optimizer: Optimizer) -> None:
        given = {p for g in optimizer.param_groups for p in g["params"] if p.requires_grad}
        for name, parameter in self._frozen.items():
            if parameter in given:
                self._refuse(
                    f"{name} is trained, and was frozen when the module was wrapped: wrap it after "
                    "requires_grad_(True)"
                )

    def _meet_if_it_is_time(self) -> None:
        if self._counter.counts.since >= self._period():
            self._meet(f"every {self._period()} steps", whole=self._whole())

    def _period(self) -> int:
        """How many steps the period has that is under way."""
        return self.every

    def _whole(self) -> bool:
        """Whether it ends with the same parameters on all ranks, whatever that sends."""
        return False

    # Meetings -------------------------------------------------------------------------------

    def sync(self) -> None:
        """Meet now, whatever number of steps each rank has taken; the next period begins.

        At the end of training, and before parameters are looked at. Every rank calls it; blocks
        until all have. Does nothing, but for a message of 8 bytes, where parameters are the same on
        all ranks already.
        """
        self._check_not_shown("sync()")
        self._counter.close()
        if self._anybody_is_apart("sync()"):
            self._meet("sync()", whole=True)

    def _meet(self, why: str, *, whole: bool) -> None:
        label = f"{type(self).__name__}'s meeting {self.meetings}, {why}"
        with self._explaining():
            self._meeting.meet(label, whole=whole)
            self._statistics.meet(label)
        self._counter.met()
        self._fresh = self._meeting.alike

    def _anybody_is_apart(self, why: str, timeout: float | None = None) -> bool:
        """Whether ranks may have different parameters. One message of 8 bytes."""
        apart = self._counter.now().since > 0 or not self._fresh
        apart_anywhere = torch.tensor([int(apart)])
        label = f"{type(self).__name__}'s {why} after {self.meetings} meetings"
        with self._explaining():
            task = in_place("all_reduce", apart_anywhere, op=ReduceOp.MAX)
            start(task, self.backend, label=label, timeout=timeout).wait()
        return bool(apart_anywhere.item())

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        steps, since, _ = self._counter.now()
        text = (
            f"this rank has taken {steps} steps, {since} of them since the ranks last met, and "
            "another one does something else: if its batches ran out, let every rank take as many "
            "steps, or leave the loop together and call sync() on all"
        )
        with hint(text, who=type(self).__name__):
            yield

    # Looking --------------------------------------------------------------------------------

    def means(self, *, timeout: float | None = None) -> dict[Tensor, Tensor]:
        """The means over the ranks of trained parameters and floating buffers, by tensor; new.

        Empty where they are the same on all ranks. Nothing is changed. Every rank calls
        it; blocks for a message of 8 bytes, for which it waits `timeout` seconds (by default the
        backend's), and the all-reduce.
        """
        self._check_not_shown("means()")
        if not self._anybody_is_apart("means", timeout):
            return {}
        tensors = [*self._trained.values(), *floating(self.module).values()]
        label = f"{type(self).__name__}'s means after {self.meetings} meetings"
        with self._explaining():
            flats = averaged(tensors, AllReduced(self.backend), self.backend, label=label)
        return {tensor: mean for flat in flats for tensor, mean in flat.views()}

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """In here the module has the means over the ranks; afterwards this rank's own again.

            with model.averaged():
                loss = evaluate(model)

        Training goes on as if nobody had looked. Every rank enters it, as `means` says; takes the
        parameters' memory twice. Steps in here are refused.
        """
        means = self.means()
        own = {tensor: tensor.detach().clone() for tensor in means}
        self._copy(means)
        self._shown = True
        try:
            yield
        finally:
            self._shown = False
            self._copy(own)

    @staticmethod
    @torch.no_grad()
    def _copy(values: Mapping[Tensor, Tensor]) -> None:
        for tensor, value in values.items():
            tensor.copy_(value)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Nothing: backward passes send nothing. For scripts that are written for DDP, too."""
        yield

    # State ----------------------------------------------------------------------------------

    def own_state(self) -> dict[str, Tensor]:
        """How far this rank is; where ranks have different parameters, its own; what meetings
        remember.
        """
        self._check_not_shown("a state dict")
        apart = not self._fresh
        values = self._local_values() if apart else {}
        mine = local_state(self._counter.now(), values, self.backend)
        return mine | self._meeting.own_state(apart=apart)

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Go on from such states, of any number of ranks, joined into one dict.

        As many ranks as before take their own; others begin from what has been loaded into the
        module, or from the mean of all. Without any a new period begins. Nothing is sent.
        """
        self._check_not_shown("load_state_dict")
        began = self._meeting.load_own_state(state)
        if not began:
            self._meeting.begin()
        self._counter.go_on_from(saved_counts(state, self.backend))
        since = self._counter.counts.since
        self._fresh = not (began or since)
        values = saved_values(state, self.backend)
        if not values and not since:
            values = dict(began)  # this rank had taken no step, and others had
        put_values(values, self._local_values(), self.backend, type(self).__name__)

    def needs(self, keys: Iterable[str]) -> list[str]:
        """Without what other ranks had of the module."""
        listed = [key for key in keys if not is_value_of_another(key, self.backend)]
        return needed(listed, self.backend)

    def _local_values(self) -> dict[str, Tensor]:
        return {**self._trained, **kept_buffers(self.module)}

    def _check_not_shown(self, what: str) -> None:
        if self._shown:
            self._refuse(f"{what} inside averaged(): leave it first")

    def _refuse(self, problem: str) -> NoReturn:
        rank, who = self.backend.rank, type(self).__name__
        raise MisuseError(f"rank {rank}: {who}: {problem}", rank=rank, op=who)
