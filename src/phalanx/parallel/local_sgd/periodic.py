"""A module that each rank trains by itself, and that all ranks make alike now and then.

    rank 0   step step step |      | step step step |      |
                             \\    /                  \\    /
    network                  [meet]                  [meet]         every 3 steps
                             /    \\                  /    \
    rank 1   step step step |      | step step step |      |
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx.collectives import ReduceOp
from phalanx.collectives.request import in_place
from phalanx.collectives.resolve import start
from phalanx.core.backend import Backend
from phalanx.errors import DistributedError, MisuseError, SizeMismatchError
from phalanx.parallel.averaging import AllReduceAveraging
from phalanx.parallel.buckets import broadcast_all_
from phalanx.parallel.compressor_state import needed
from phalanx.parallel.guards import check_same_model, explain
from phalanx.parallel.local_sgd.sync import Buffers, Meeting, averaged, floating, kept_buffers
from phalanx.parallel.optimizer_hooks import claim, owner_of
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
        try:
            yield
        except DistributedError as error:
            explain(error, text, who=type(self).__name__)
            raise

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
            flats = averaged(tensors, AllReduceAveraging(self.backend), self.backend, label=label)
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


# ------------------------------------------------------------------------------
# What a rank has of its own between two meetings, as part of a state dict.
#
#     local@2/4.count            rank 2 of 4: steps, steps since the ranks last met, meetings
#     local@2/4.value.<name>     its parameter or buffer, while ranks have different ones
#
# As many ranks as before get their own back; of another number each begins from the mean.

_KEY = re.compile(r"local@(\d+)/(\d+)\.(count$|value\..*)", re.DOTALL)
_VALUE = "value."


def is_value_of_another(key: str, backend: Backend) -> bool:
    """Whether it is a parameter or buffer that another rank has had."""
    match = _KEY.fullmatch(key)
    return (
        match is not None
        and match[3].startswith(_VALUE)
        and (int(match[1]), int(match[2])) != (backend.rank, backend.world_size)
    )


def local_state(
    counts: Counts, values: Mapping[str, Tensor], backend: Backend
) -> dict[str, Tensor]:
    """This rank's state; `values` are empty where all ranks have the same."""
    prefix = f"local@{backend.rank}/{backend.world_size}."
    state = {prefix + "count": torch.tensor(counts, dtype=torch.int64)}
    return state | {f"{prefix}{_VALUE}{name}": value.detach() for name, value in values.items()}


def saved_counts(state: Mapping[str, Any], backend: Backend) -> Counts | None:
    """This rank's, or with another number of ranks the first one's; None if there is none."""
    found: dict[tuple[int, int], Counts] = {}
    for key, value in state.items():
        match = _KEY.fullmatch(key)
        if match is not None and match[3] == "count":
            found[int(match[2]), int(match[1])] = Counts(*map(int, value.tolist()))
    mine = (backend.world_size, backend.rank)
    return found.get(mine, found[min(found)] if found else None)


def saved_values(state: Mapping[str, Any], backend: Backend) -> dict[str, Tensor]:
    """By name what this rank is to have: its own; or the mean of all ranks', if all are there and
    they were another number; else nothing.
    """
    by_rank: dict[int, dict[str, Tensor]] = {}
    size = 0
    for key, value in state.items():
        match = _KEY.fullmatch(key)
        if match is not None and match[3].startswith(_VALUE):
            size = int(match[2])
            by_rank.setdefault(int(match[1]), {})[match[3][len(_VALUE) :]] = value
    if size == backend.world_size:
        return by_rank.get(backend.rank, {})
    if len(by_rank) < size or not by_rank:
        return {}
    first = by_rank[min(by_rank)]
    return {
        name: torch.stack([each[name].double() for each in by_rank.values()]).mean(0)
        if value.is_floating_point()
        else value
        for name, value in first.items()
    }


@torch.no_grad()
def put_values(
    values: Mapping[str, Tensor], tensors: Mapping[str, Tensor], backend: Backend, who: str
) -> None:
    """Overwrite tensors of these names. Raises `SizeMismatchError` for those of another model."""
    for name, value in values.items():
        if name not in tensors or tensors[name].shape != value.shape:
            has = f"{list(tensors[name].shape)}" if name in tensors else "none"
            raise SizeMismatchError(
                f"rank {backend.rank}: {who}: the state dict has {name} of shape "
                f"{list(value.shape)} for one rank, and this model has {has}: it is the state of "
                "another model",
                rank=backend.rank,
            )
    for name, value in values.items():
        tensors[name].copy_(value)


# ------------------------------------------------------------------------------
# How many steps a rank has taken by itself, as its optimizers tell.


class Counts(NamedTuple):
    """How far a rank is.

    steps      of optimizers, in all
    since      of these since the ranks last met
    meetings   how many
    """

    steps: int
    since: int
    meetings: int


class StepCounter:
    """Counts a module's steps.

    trained  the parameters whose writing is a step, by name
    """

    def __init__(self, trained: Mapping[str, nn.Parameter]) -> None:
        self.counts = Counts(0, 0, 0)
        self._trained = frozenset(trained.values())
        self._writes = Writes(trained.values())

    def before(self, optimizer: Optimizer) -> bool:
        """An optimizer is about to write: whether a step is over by that."""
        over = self._writes.before(self.written_by(optimizer))
        return self._count() if over else False

    def after(self, optimizer: Optimizer) -> bool:
        """It has: whether a step is over by that."""
        over = self._writes.after(self.written_by(optimizer))
        return self._count() if over else False

    def written_by(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """Those of the parameters that it has."""
        return [p for g in optimizer.param_groups for p in g["params"] if p in self._trained]

    def close(self) -> None:
        """A step that is under way is over."""
        if self._writes.begun:
            self._writes.close()
            self._count()

    def met(self) -> None:
        """The ranks have met."""
        self.counts = self.counts._replace(since=0, meetings=self.counts.meetings + 1)

    def now(self) -> Counts:
        """The counts, a step that is under way included."""
        return _one_more(self.counts) if self._writes.begun else self.counts

    def go_on_from(self, counts: Counts | None) -> None:
        """From saved counts; None: the ranks are alike now."""
        self._writes.close()
        self.counts = counts or self.counts._replace(since=0)

    def _count(self) -> bool:
        self.counts = _one_more(self.counts)
        return True


def _one_more(counts: Counts) -> Counts:
    return Counts(counts.steps + 1, counts.since + 1, counts.meetings)


# ------------------------------------------------------------------------------
# When a step is over, whatever number of optimizers it takes.
#
# one optimizer             [ w b ]      [ w b ]         each is a step
# two, one after the other  [ w ] [ b ]  [ w ] [ b ]     two of them are a step
# nobody has b              [ w ]     |  [ w ]           over when w comes again; from then on,
#                                                        at once


class Writes:
    """Which parameters have been written since the last step was over.

    A step is over when all of them are, or before one of them is written a second time. Those that
    are not written by then are nobody's: they are not waited for until somebody writes them.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._all = frozenset(parameters)
        self._written: set[nn.Parameter] = set()
        self._nobodys: set[nn.Parameter] = set()

    @property
    def begun(self) -> bool:
        """Whether some are written, and not all."""
        return bool(self._written)

    def before(self, parameters: Iterable[nn.Parameter]) -> bool:
        """These are about to be written: whether a step is over by that."""
        if self._written.isdisjoint(parameters):
            return False
        self._nobodys |= self._all - self._written
        self._written.clear()
        return True

    def after(self, parameters: Iterable[nn.Parameter]) -> bool:
        """They have been: whether a step is over by that."""
        mine = self._all.intersection(parameters)
        self._nobodys -= mine
        self._written |= mine
        if not mine or not self._written >= self._all - self._nobodys:
            return False
        self._written.clear()
        return True

    def close(self) -> None:
        """Whatever is written belongs to a step that is over."""
        self._written.clear()
