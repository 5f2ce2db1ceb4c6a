"""One step of a joined batch, of which each rank has a part of its own size (`step`).

    gradients  =  those of  (sum of all ranks' losses) / (sum of all ranks' weights)

    rank 0   F B | F B | F B, averages        3 micro-batches
    rank 1   F B | ....| ..., averages        1, and zeros: as rank 0 tells it
    rank 2   ....| ....| ..., averages        0

Wrappers average over p ranks, so losses are scaled by p / (sum of weights) before. A rank that has
fewer micro-batches than others follows the leader, the first of those with the most: the leader
tells what it is about to send or average, and such a rank takes part, with zeros. DDP's ranks need
each other in one pass only, and FSDP's in all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from math import inf, isfinite, nan
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Protocol

import torch
from torch import Tensor, nn

from phalanx.collectives import PendingCollective, async_all_reduce_, recv, send
from phalanx.core.backend import Backend
from phalanx.errors import DistributedError, MisuseError
from phalanx.parallel.averaging import RowGradient
from phalanx.parallel.guards import refuse
from phalanx.parallel.uneven import (
    OPEN_STEP,
    Join,
    JoinPhase,
    NothingCounts,
    check_joinable,
    check_may_join,
    headers,
)
from phalanx.parallel.wrapper import Wrapper

if TYPE_CHECKING:
    from typing_extensions import Self

TAG = 0x57E9  # of the leader's messages
FAILED = -1  # in place of a wrapper's number: the leader has left the step


class Passes(Protocol):
    """The part of a wrapper that runs its passes, as far as `step` and `join` set it.

    synchronize   whether backward passes average; if not, they accumulate on this rank
    join          the ranks' common state in `join` or `step`, which is told of each phase
    zero_weight   whether the backward pass that runs is of a loss with zero weight
    owes          whether there are gradients on this rank that were not averaged
    """

    synchronize: bool
    join: Any
    zero_weight: bool

    @property
    def owes(self) -> bool: ...


class AveragingWrapper(Wrapper):
    """A wrapper that averages gradients in backward passes.

    in_rounds   whether ranks need each other in each micro-batch, and not only in the last one
    """

    averages = True
    in_rounds: ClassVar[bool] = False

    @property
    def passes(self) -> Passes:
        """The part of it that runs its passes."""
        raise NotImplementedError

    @property
    def leaves(self) -> Iterable[Tensor]:
        """The parameters, as autograd computes their gradients."""
        return self.module.parameters()

    def answer(self, phase: JoinPhase, group: int = 0) -> None:
        """Take part, without a batch, in what other ranks do next."""
        raise NotImplementedError

    def begin_answers(self) -> None:
        """Forget a backward pass that failed on this rank, which has no batch left."""

    def end_join(self, join: Join) -> None:
        """Make what ranks without a batch have missed alike."""

    def check_regroupable(self) -> None:
        super().check_regroupable()
        if self.passes.join is not None or not self.passes.synchronize:
            self._refuse("regrouped() inside join(), step() or no_sync(): leave it first")

    def step(self, weight: float | Tensor, *, micro_batches: int = 1) -> JoinedStep:
        """Return a context for one step of a joined batch: all ranks' micro-batches of it together.

            with model.step(tokens, micro_batches=len(parts)) as step:
                for inputs, labels in parts:
                    step.backward(sum_of_losses(model(inputs), labels))
            optimizer.step()
            log(step.loss)                          # of the joined batch, the same on every rank

        Gradients are then those of (sum of all losses) / (sum of all weights), as in one process
        that has the joined batch; whatever the ranks' weights and numbers of micro-batches are. All
        but the last micro-batch only accumulate.

        weight         of all that this rank has in the step: rows, tokens that count, ...; a number
                       of at least 0. With 0 it adds nothing, even if its loss is NaN
        micro_batches  number of `step.backward` calls of this rank; 0 if it has no batch

        Every rank enters it, in `join` too, where ranks without a batch left are as with 0. Costs
        two messages. One of 16 bytes at its beginning is under way during the first forward pass;
        with FSDP, and layers that communicate, it blocks. One of 8 bytes blocks at the end; with
        DDP it is under way during the last backward pass.

        Raises, on every rank, at its beginning or in the first `backward`: ValueError if a rank's
        weight is negative, infinite, NaN or has a gradient, or all are 0; `DesyncError` if ranks
        with parts of the same layers give others. Raises `MisuseError` for a step in a step, for
        gradients that were accumulated before it and not averaged, for backward passes by another
        way, and if there are more or fewer than said.
        """
        return JoinedStep(self, weight, micro_batches)

    @contextmanager
    def join(
        self,
        step: Callable[[], object] | None = None,
        *,
        divide_by_initial_world_size: bool = False,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """Let each rank train in here on its own number of batches; none at all, too.

            def step():                      # whatever follows backward, without communication
                optimizer.step()
                optimizer.zero_grad()

            with model.join(step):
                for x, y in batches:
                    loss_of(model(x), y).backward()
                    step()

        A rank that leaves the block answers those that have not, with zeros, until all have: it
        blocks, and its `.grad`s become theirs. In the end parameters and buffers are those of a
        rank that trained to the last.

        step        called on a rank that waits, after each averaging backward pass of the others,
            so that its optimizer and schedule stay those of the others (count the calls, if several
            are one step). Leave it out only if they hold no state (plain SGD): momentum that stayed
            behind pulls the ranks apart in the next epoch
        divide_by_initial_world_size  divide sums of gradients by the number of all ranks; else by
            that of the ranks that have a batch, which gives the gradient of the joined batch
            (torch's default is the former). With `weighted` both are the same
        throw_on_early_termination  when a rank is over, and others are not, raise `MisuseError` on
            every rank

        Every rank enters and leaves the block. Costs a message of 16 bytes for each averaging
        backward pass, each forward pass that broadcasts buffers (FSDP: each), and each `weighted`.
        `no_sync` and `sync_gradients` work; gradients that a rank leaves accumulated and not
        averaged are dropped. One wrapper at a time on one backend. FSDP needs `step`, since each
        rank writes its own part of the parameters; buffers stay each rank's. Raises `MisuseError`
        for a model with `SyncBatchNorm`, which needs every rank, unless it is to throw.
        """
        passes, who = self.passes, type(self).__name__
        layers = nn.Identity() if throw_on_early_termination else self.module
        check_may_join(who, self.backend)
        check_joinable(layers, who, self.backend, passes.join)
        if (self.in_rounds or self.owners) and step is None and not throw_on_early_termination:
            self._refuse("join() needs step: a rank that waits steps its own part of parameters")
        passes.join = join = (LeadingJoin if self.in_rounds else Join)(
            self,
            self.backend,
            divide_by_initial_world_size=divide_by_initial_world_size,
            throw_on_early_termination=throw_on_early_termination,
        )
        try:
            yield
            self._answer_the_others(join, step or (lambda: None))
        finally:
            passes.join = None
        self.end_join(join)

    def _answer_the_others(self, join: Join, step: Callable[[], object]) -> None:
        self.begin_answers()
        while (phase := join.exchange(JoinPhase.OVER)) is not JoinPhase.OVER:
            if phase is JoinPhase.STEP:
                JoinedStep(self, 0.0, 0).answer(join)
                step()
                continue
            self.answer(phase, max(join.counts))
            if phase in (JoinPhase.BACKWARD, JoinPhase.CATCHING_UP):
                step()
            if self.in_rounds and phase is JoinPhase.FORWARD:
                follow([self], join.leader, step)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward passes in here only accumulate; the next one outside averages the sum."""
        passes = self.passes
        before, passes.synchronize = passes.synchronize, False
        try:
            yield
        finally:
            passes.synchronize = before


class MicroBatches:
    """This rank's micro-batches in a step that is under way, or over; see `step` of the wrappers.

    loss      (sum of losses) / (sum of weights), when the step is over: of all ranks, or, where
              ranks train by themselves, of this one (NaN with weight 0)
    weight    the sum of weights
    """

    def __init__(self, wrapper: Wrapper, weight: float | Tensor, micro_batches: int) -> None:
        self.loss = nan
        self.weight = nan
        self._wrapper = wrapper
        self._backend = wrapper.backend
        self._given = weight, micro_batches
        self._losses: list[Tensor] = []
        self._count = self._done = 0  # micro-batches
        self._factor = 0.0  # of losses; 0 with weight 0
        self._passes: Sequence[Passes] = ()

    def _checked(self, weight: float | Tensor, count: int) -> tuple[float, int]:
        """Return weight and count; raise for one that is none, and where a step cannot begin."""
        number = checked_weight(weight, "step()")
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ValueError(f"step(): micro_batches must be 0 or more, not {count!r}")
        if not count and number:
            raise ValueError(f"step(): a weight of {number} needs a micro-batch, and there is none")
        return number, count

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Run the backward pass of one micro-batch; in a step of all ranks the last one averages.

        loss      the sum of the losses of the micro-batch, of one element
        options   of `Tensor.backward`, such as `retain_graph`
        """
        if self._done >= self._count:
            self._fail(f"a micro-batch more than the {self._count} that step() was told of")
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            self._fail(f"step.backward() takes the sum of the losses, with a graph, not {loss!r}")
        if self._factor:
            self._losses.append(loss.detach().to(torch.float64, copy=True).view(()))
        Scaled.apply(loss, self._factor, self._passes).backward(**options)  # type: ignore[no-untyped-call]
        self._done += 1

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Be the step of a rank that trains by itself."""
        self.weight, self._count = self._checked(*self._given)
        self._factor = 1 / self.weight if self.weight else 0.0
        yield
        self._check_complete()
        total = float(self._total())
        self.loss = total / self.weight if self.weight else nan

    def _total(self) -> Tensor:
        """Return the sum of the losses."""
        return sum((loss.cpu() for loss in self._losses), torch.zeros((), dtype=torch.float64))

    def _check_complete(self) -> None:
        if self._done < self._count:
            self._fail(
                f"step() was told of {self._count} micro-batches, and there were {self._done} "
                "backward passes"
            )

    def _fail(self, problem: str) -> NoReturn:
        who, rank = type(self._wrapper).__name__, self._backend.rank
        error = MisuseError(f"rank {rank}: {who}: {problem}", rank=rank, op=who)
        self._backend.fail(error)  # the others wait for this rank
        raise error


class JoinedStep(MicroBatches):
    """A step that all ranks take together; see `step` of DDP and FSDP."""

    leader = -1  # not known before `agree`

    def __init__(self, wrapper: Wrapper, weight: float | Tensor, micro_batches: int) -> None:
        super().__init__(wrapper, weight, micro_batches)
        self.keeps = False  # were there gradients of earlier steps
        self._all = [m for m in wrapper.communicating if isinstance(m, AveragingWrapper)]
        self._in_rounds = any(each.in_rounds for each in self._all)
        layers = [m for m in wrapper.communicating if not isinstance(m, Wrapper)]
        self._meets_in_forward = self._in_rounds or bool(layers)
        self._short: list[int] = []  # the ranks that follow the leader
        self._agreed: Join | None = None  # as long as its headers were not looked at
        self._added: PendingCollective[Tensor] | None = None  # the sum of the ranks' losses
        self._hooks: list[Any] = []
        self._in_backward = False

    # The agreement --------------------------------------------------------------------------
    #
    #     step()     a header to the others
    #     forward    meanwhile; ranks that meet in it wait for the others' headers before
    #     backward   waits for them: losses are scaled by the sum of all weights

    def __enter__(self) -> Self:
        agreed = self._all[0].passes.join if self._all else None
        if OPEN_STEP in self._backend.kept:
            self._fail("step() inside step()")
        problem, weight, count = None, nan, 0
        try:
            weight, count = self._checked(*self._given)
        except Exception as error:  # which the others, who wait, are told of
            problem = error
        agreed = agreed or Join(self._wrapper, self._backend)
        try:
            agreed.announce(JoinPhase.STEP, weight, count)
            if problem is not None:
                agreed.agree()
        finally:
            if problem is not None:
                raise problem
        self.begin(agreed, weight, count)
        return self

    def _checked(self, weight: float | Tensor, count: int) -> tuple[float, int]:
        number, count = super()._checked(weight, count)
        for each in self._all:
            if not each.passes.synchronize or each.passes.owes:
                refuse(
                    type(each).__name__,
                    self._backend.rank,
                    "step() inside no_sync(), or with gradients from before that were not "
                    "averaged: step() accumulates all its micro-batches by itself. Call "
                    "sync_gradients() before, or zero_grad() of the model",
                )
            if each.backend is not self._backend:
                refuse(
                    type(each).__name__,
                    self._backend.rank,
                    "step() of a model in which some wrappers average over other ranks",
                )
        return number, count

    def begin(self, agreed: Join, weight: float = 0.0, count: int = 0) -> None:
        """Begin, with this rank's part of it: nothing, on a rank that `join` has left."""
        self._agreed, self._count = agreed, count
        self._passes = [each.passes for each in self._all]
        self._before = [each.join for each in self._passes]
        if self._meets_in_forward:
            self.agree()
        for number, each in enumerate(self._passes):
            each.join = InStep(self, number)
        if not weight and count:  # no NaN of this rank may reach the others
            leaves: list[Any] = [leaf for each in self._all for leaf in each.leaves]
            self._hooks = [p.register_hook(torch.zeros_like) for p in leaves if p.requires_grad]
        self._backend.kept[OPEN_STEP] = self
        self._synchronize()

    def agree(self) -> None:
        """Block until all ranks have told what they have of this step; once."""
        if self._agreed is None:
            return
        agreed, self._agreed = self._agreed, None
        agreed.agree()
        rank, counts = self._backend.rank, agreed.counts
        self.weight = sum_of_weights(agreed.samples, rank, "step()")
        if len(set(counts)) > 1:
            check_joinable(self._wrapper.module, type(self._wrapper).__name__, self._backend, None)
        self._factor = self._backend.world_size / self.weight if agreed.samples[rank] else 0.0
        self._counts, self.active = counts, list(agreed.active)
        self._rounds = max(counts)
        self.leader = counts.index(self._rounds)
        needed = self._rounds if self._in_rounds else 1
        self._short = [r for r, count in enumerate(counts) if count < needed]

    # Micro-batches --------------------------------------------------------------------------

    def backward(self, loss: Tensor, **options: Any) -> None:
        if self._in_backward:
            self._fail("a backward pass of this step has failed: begin anew after zero_grad()")
        if any(each.synchronize is not self._last for each in self._passes):
            self._fail("no_sync() inside step(), which accumulates by itself")
        self.agree()
        if not self._done and len(self.active) < self._backend.world_size:
            self.keeps = has_gradients(self._wrapper.parameters())
        self._in_backward = True  # for good, if it fails
        super().backward(loss, **options)
        self._in_backward = False
        self._synchronize()

    @property
    def _last(self) -> bool:
        """Whether the next micro-batch of this rank averages."""
        return self._done + 1 == (self._rounds if self._in_rounds else self._count)

    def _synchronize(self) -> None:
        for each in self._passes:
            each.synchronize = self._last

    def check_turn(self) -> None:
        """Refuse a pass by a rank that is through, and has to follow the others."""
        if self._done == self._count and self._backend.rank in self._short:
            self._fail("a forward pass after this rank's last micro-batch, and others have more")

    def check_backward(self) -> None:
        """Refuse gradients that come in a step by another way than `backward`."""
        if not self._in_backward:
            self._fail("a backward pass inside step(), and not by step.backward(loss)")

    # The end --------------------------------------------------------------------------------

    def __exit__(
        self, kind: object, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._finish()
            else:
                with suppress(DistributedError, ValueError):
                    self.agree()
                    if self._backend.rank == self.leader:
                        tell(self._short, self._backend, JoinPhase.OVER, FAILED)
        finally:
            self._close()

    def _finish(self) -> None:
        self.agree()
        self._check_complete()
        rank = self._backend.rank
        if rank in self._short:
            follow(self._all, self.leader, before=self.begins)
        if rank == self.leader:
            tell(self._short, self._backend, JoinPhase.OVER)
        self._average_rest()
        if any(each.owes for each in self._passes):
            self._fail("the last micro-batch's loss does not depend on the model: nothing averaged")
        self.loss = float(self.add_losses().wait()) / self.weight

    def add_losses(self) -> PendingCollective[Tensor]:
        """Begin to add the ranks' losses, if that has not begun."""
        if self._added is None:
            total, label = self._total(), "the loss of a step"
            self._added = async_all_reduce_(total, self._backend, label=label)
        return self._added

    def begins(self, phase: JoinPhase) -> None:
        """Hear of a wrapper's phase before it begins: the losses are on their way before DDP's
        gradients, which take longer.
        """
        if phase is JoinPhase.BACKWARD:
            self.add_losses()

    def _average_rest(self) -> None:
        """Average what no micro-batch has: here nothing is left."""

    def _close(self) -> None:
        self._backend.kept.pop(OPEN_STEP, None)
        for hook in self._hooks:
            hook.remove()
        for each, before in zip(self._passes, self._before, strict=True):
            each.join, each.synchronize = before, True

    def answer(self, agreed: Join) -> None:
        """Take part in the step of other ranks, on one whose batches are over."""
        self.begin(agreed)
        self.__exit__(None, None, None)

    def tell(self, number: int, phase: JoinPhase, group: int) -> None:
        """Tell those without a micro-batch in this round, if this is the leader."""
        if self._backend.rank == self.leader:
            others = [r for r in self._short if self._counts[r] <= self._done]
            tell(others, self._backend, phase, number, group)


class InStep:
    """A step as one of its wrappers sees it, in the place of a `Join`.

    leader, active, divisor, throws   as of `Join`; all ranks count
    """

    throws = False

    def __init__(self, step: JoinedStep, number: int) -> None:
        self.divisor = step._backend.world_size
        self.check_backward = step.check_backward
        self._step = step
        self._number = number

    @property
    def leader(self) -> int:
        self._step.agree()
        return self._step.leader

    @property
    def active(self) -> list[int]:
        self._step.agree()
        return self._step.active

    def exchange(self, phase: JoinPhase, samples: float = 0.0, count: int = 0) -> None:
        """Begin a phase, of which the other ranks know."""
        self._step.agree()
        self._step.check_turn()
        self._step.begins(phase)
        self.tell(phase, self._step.keeps if phase is JoinPhase.BACKWARD else 0)

    def tell(self, phase: JoinPhase, group: int = 0) -> None:
        """Tell the ranks that follow, if this one is the leader."""
        self._step.tell(self._number, phase, group)


class LeadingJoin(Join):
    """A `Join` whose leader tells ranks without a batch all of a pass, until its next header."""

    _leads = False

    def announce(self, phase: JoinPhase, samples: float = 0.0, count: int = 0) -> None:
        self.tell(JoinPhase.OVER)
        super().announce(phase, samples, count)

    def agree(self) -> JoinPhase:
        common = super().agree()
        self._leads = common is JoinPhase.FORWARD and self._backend.rank == self.leader
        return common

    def tell(self, phase: JoinPhase, group: int = 0) -> None:
        """Tell the ranks without a batch, if this one is the leader."""
        if self._leads:
            others = set(range(self._backend.world_size)).difference(self.active)
            tell(sorted(others), self._backend, phase, 0, group)


def has_gradients(parameters: Iterable[Tensor]) -> bool:
    """Return whether any of these has a gradient that is not zero."""
    return any(p.grad is not None and bool(RowGradient(p).flat.any()) for p in parameters)


def tell(
    ranks: Sequence[int], backend: Backend, phase: JoinPhase, wrapper: int = 0, group: int = 0
) -> None:
    """Tell ranks that follow this one about a phase of a wrapper, and of a group of its."""
    for rank in ranks:
        send(torch.tensor([headers(backend), wrapper, phase, group]), backend, rank, tag=TAG)


def follow(
    wrappers: Sequence[AveragingWrapper],
    leader: int,
    after: Callable[[], object] | None = None,
    before: Callable[[JoinPhase], object] = lambda _: None,
) -> None:
    """Do as the leader tells until it is through. `before` is called with each phase, and `after`
    after each averaging pass.
    """
    backend, told = wrappers[0].backend, torch.empty(4, dtype=torch.int64)
    while True:
        recv(told, backend, leader, tag=TAG)
        header, number, phase, group = told.tolist()
        if header != headers(backend):  # of a step that this rank has left by an error of its own
            continue
        if number == FAILED:
            who, rank = type(wrappers[0]).__name__, backend.rank
            problem = f"rank {leader}, which this one follows, has left step() by an error"
            refuse(who, rank, problem, peer=leader)
        if phase == JoinPhase.OVER:
            return
        before(JoinPhase(phase))
        wrappers[number].answer(JoinPhase(phase), group)
        if phase == JoinPhase.FINISH and after is not None:
            after()


def checked_weight(weight: float | Tensor, op: str) -> float:
    """Return it as a number; raise ValueError for one that is no weight."""
    if isinstance(weight, Tensor) and weight.requires_grad:
        raise ValueError(f"{op}: weight has a gradient: give its .item()")
    number = float(weight) if not isinstance(weight, (bool, str)) else nan
    if not (isfinite(number) and number >= 0):
        raise ValueError(f"{op}: weight must be a number of at least 0, not {weight!r}")
    return number


def sum_of_weights(weights: Sequence[float], rank: int, op: str) -> float:
    """Return the sum of all ranks' weights; raise ValueError if one is NaN, or all are 0."""
    bad = [r for r, weight in enumerate(weights) if not isfinite(weight)]
    total = sum(weights)
    if bad or not 0 < total < inf:
        problem = f"the sum of all weights is {total:g}" if total else "all weights are 0"
        problem = f"rank {bad[0]} cannot begin it; see its error" if bad else problem
        raise (ValueError if total else NothingCounts)(f"rank {rank}: {op}: {problem}")
    return total


class Scaled(torch.autograd.Function):
    """A loss, scaled so that the mean over the ranks is that of the joined batch.

    With n_r samples on rank r, N on all p ranks, and S_r the sum of rank r's losses,

        L = sum over r of S_r / N  =  1/p * sum over r of p / N * S_r

    is the mean loss of all samples. Wrappers average over ranks, so rank r's loss is scaled by p/N.
    The loss is scaled, and not the averaged gradient, since `SyncBatchNorm` mixes the ranks' losses
    on their way back, and compressors keep parts of scaled gradients. With weight 0 it is 0, and so
    is its gradient (the mean of no samples is NaN, and so is its gradient: neither may reach the
    other ranks).
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, factor: float, passes: Sequence[Passes]) -> Tensor:
        ctx.factor, ctx.passes = factor, passes
        return loss * factor if factor else torch.zeros_like(loss)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        for each in ctx.passes:
            each.zero_weight = ctx.factor == 0
        return (grad * ctx.factor if ctx.factor else torch.zeros_like(grad)), None, None
