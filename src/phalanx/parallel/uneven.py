"""Uneven inputs: ranks with fewer batches (`join`).

Ranks that have no batch left answer those that have one, until none has:

    rank 0   batch 1 | batch 2 | -------- answers -------- | parameters of rank 1
    rank 1   batch 1 | batch 2 | batch 3 | batch 4 | over  | parameters of rank 1
    rank 2   batch 1 | batch 2 | batch 3 | -- answers ---- | parameters of rank 1

An answer is the collective that the others wait for, with zeros in it. (Li et al. 2020 leave uneven
inputs open; torch's `Join` context manager is the same idea.) `joined_step.py` is about ranks with
less of one step.
"""

from __future__ import annotations

import enum
from typing import Any, cast

import torch
from torch import Tensor, nn

from phalanx.collectives import PendingCollective, async_all_gather
from phalanx.core.backend import Backend
from phalanx.errors import DesyncError
from phalanx.parallel.guards import check_agreement, check_ranks_stay, refuse
from phalanx.parallel.sync_batch_norm import SyncBatchNorm
from phalanx.parallel.wrapper import Wrapper


def check_may_join(who: str, backend: Backend) -> None:
    """Raise `MisuseError` in an elastic job: its steps are the same on all ranks."""
    instead = (
        "a step counts on all ranks or on none, so they have as many batches. job.sampler deals "
        "them; for parts of other sizes see step.weight and step()"
    )
    check_ranks_stay(f"{who}.join()", backend, instead)


def check_joinable(module: nn.Module, who: str, backend: Backend, already: object | None) -> None:
    """Raise `MisuseError` if no rank could answer for this module, or it is in `join` already."""
    problem = "join() inside join(), or inside step()" if already is not None else None
    for name, layer in module.named_modules():
        if isinstance(layer, SyncBatchNorm):
            problem = (
                "a rank with fewer micro-batches than another, or none, cannot answer for "
                f"{name or 'the module'}, a SyncBatchNorm, which needs every rank in each forward "
                "pass. Pass empty ones of weight 0; or join(throw_on_early_termination=True)"
            )
    if problem is not None:
        refuse(who, backend.rank, problem)


# The join header: each rank says which phase of training it is about to begin, before it does.
#
#     rank 0   forward  | backward | over    | over
#     rank 1   forward  | backward | forward | over        a column is one message of 16 bytes
#
# So ranks that have no batch left know the others' waits, and samples can be counted.


OPEN_STEP = "the step under way"
"""Its key in what a backend keeps: wrappers that are not in it do not average meanwhile."""
_HEADERS = "headers exchanged"


def headers(backend: Backend) -> int:
    """Return the number of headers that its ranks have exchanged: the same on all of them."""
    return cast("int", backend.kept.get(_HEADERS, 0))


def check_no_step(who: str, backend: Backend) -> None:
    """Raise `MisuseError` if a step is under way on this backend, of another wrapper."""
    if OPEN_STEP in backend.kept:
        problem = "a backward pass averages inside the step() of another wrapper, without weights"
        refuse(who, backend.rank, f"{problem}: call step() of one around the whole model")


class JoinPhase(enum.IntEnum):
    """The next action of a rank."""

    OVER = 0  # nothing: it has no batch left
    FORWARD = 1  # a forward pass, which begins with rank 0's buffers
    WEIGHTING = 2  # a loss is weighted with a number of samples
    BACKWARD = 3  # a backward pass that averages gradients
    CATCHING_UP = 4  # accumulated gradients are averaged, outside a backward pass
    STEP = 5  # a step of a joined batch, with a weight, and a number of micro-batches
    # In a pass of FSDP, for a parameter group; told by the leader alone (`joined_step.py`)
    CALL = 6  # forward of its module
    UNSHARD = 7
    REDUCE = 8
    FINISH = 9  # to reduce, all groups
    SYNC = 10  # of LocalSGD and DiLoCo
    WHOLE_SYNC = 11  # one that leaves nothing out


_WORDS = {
    JoinPhase.FORWARD: "begins a forward pass",
    JoinPhase.WEIGHTING: "weights a loss",
    JoinPhase.BACKWARD: "begins a backward pass",
    JoinPhase.CATCHING_UP: "averages accumulated gradients",
    JoinPhase.STEP: "begins a step()",
    JoinPhase.SYNC: "synchronizes parameters",
    JoinPhase.WHOLE_SYNC: "synchronizes whole parameters",
}
_PHASES = len(JoinPhase)
_REMEDY = "Ranks that have parts of the same layers train on the same batches, to the same last"


class NothingCounts(ValueError):  # noqa: N818
    """All ranks' weights are 0."""


class Join:
    """The ranks' common state while their numbers of batches may differ.

    module    the wrapper. Ranks with other parts of its layers, as tensor parallel ones have, do
              the same as this one
    active    the ranks that had a batch in the last header in which any had
    samples   of each rank, in the last header
    counts    of the micro-batches of each rank, in the last header
    throws    whether to raise an error if one rank is over and another is not
    """

    def __init__(
        self,
        module: Wrapper,
        backend: Backend,
        *,
        divide_by_initial_world_size: bool = True,
        throw_on_early_termination: bool = False,
    ) -> None:
        self.throws = throw_on_early_termination
        self.active = list(range(backend.world_size))
        self.samples: list[float] = []
        self.counts: list[int] = []
        self._who = type(module).__name__
        self._backend = backend
        self._headers: PendingCollective[Tensor]
        layers: list[Any] = [m for m in module.communicating if not isinstance(m, Wrapper)]
        groups = [m.other_parts()[0] for m in layers if hasattr(type(m), "other_parts")]
        self._with_parts = [each for each in dict.fromkeys(groups) if each.world_size > 1]
        self._divide_by_all = divide_by_initial_world_size

    def check_backward(self) -> None:
        """Any backward pass is right here."""

    @property
    def leader(self) -> int:
        """First rank with a batch, whose buffers, and in the end parameters, count."""
        return self.active[0]

    @property
    def divisor(self) -> int:
        """Return the divisor of a sum of gradients."""
        return self._backend.world_size if self._divide_by_all else len(self.active)

    def exchange(self, phase: JoinPhase, samples: float = 0.0, count: int = 0) -> JoinPhase:
        """Tell the ranks this one's next action; block until all have told theirs. Return that of
        the ranks with a batch; OVER if none has.

        Raises `DesyncError`, on every rank, if two of them do different things, or two with parts
        of the same layers (8 bytes more); `MisuseError` if one rank is over, another is not, and
        `throws` is set.
        """
        self.announce(phase, samples, count)
        return self.agree()

    def announce(self, phase: JoinPhase, samples: float = 0.0, count: int = 0) -> None:
        """Tell the ranks this one's next action; `agree` waits for theirs."""
        backend = self._backend
        for group in self._with_parts:
            next_ = f"{phase.name} next, of weight {samples}, in {count} micro-batches"
            try:
                check_agreement([next_], group, op=self._who, remedy=_REMEDY)
            except DesyncError as error:
                backend.fail(error, culprit=group.ranks[error.peer or 0])  # others wait here
                raise
        row = torch.tensor([[count * _PHASES + phase, samples]], dtype=torch.float64)
        backend.kept[_HEADERS] = headers(backend) + 1
        self._headers = async_all_gather(row, backend, label=f"{self._who}: next")

    def agree(self) -> JoinPhase:
        """Block until all ranks have told theirs; return and raise as `exchange`."""
        backend, rows = self._backend, self._headers.wait().tolist()
        phases = [JoinPhase(int(row[0]) % _PHASES) for row in rows]
        active = [rank for rank, theirs in enumerate(phases) if theirs is not JoinPhase.OVER]
        if not active:
            return JoinPhase.OVER
        self.active, self.samples = active, [row[1] for row in rows]
        self.counts = [int(row[0]) // _PHASES for row in rows]
        first, common = active[0], phases[active[0]]
        other = next((rank for rank in active if phases[rank] is not common), None)
        if other is not None:
            problem = (
                f"rank {first} {_WORDS[common]} while rank {other} {_WORDS[phases[other]]}. Every "
                "rank that has a batch has to do the same with it"
            )
            peer = other if other != backend.rank else first
            refuse(self._who, backend.rank, problem, DesyncError, peer)
        over = [rank for rank, theirs in enumerate(phases) if theirs is JoinPhase.OVER]
        if self.throws and over:
            noun = "ranks" if len(over) > 1 else "rank"
            problem = (
                f"{noun} {', '.join(map(str, over))} ran out of batches, and others have not "
                "(throw_on_early_termination=True)"
            )
            refuse(self._who, backend.rank, problem, peer=over[0])
        return common
