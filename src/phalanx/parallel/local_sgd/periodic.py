"""A module that each rank trains by itself, and whose parameters are synchronized now and then.

    rank 0   step step step |      | step step step |      |
                             \\    /                  \\    /
    network                  [sync]                  [sync]         every 3 steps
                             /    \\                  /    \\
    rank 1   step step step |      | step step step |      |

`_step_is_over` finds the end of a period of H steps, `_sync` does the rest. Read
`naive_local_sgd.py` first.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx.collectives import ReduceOp, all_reduce_
from phalanx.compression.compressor import is_finite
from phalanx.core.backend import Backend
from phalanx.errors import DesyncError, DistributedError
from phalanx.parallel.averaging import GradientAveraging, broadcast_all_
from phalanx.parallel.guards import check_same_model, explain
from phalanx.parallel.joined_step import MicroBatches, sum_of_weights
from phalanx.parallel.local_sgd.outer import OuterStep, not_finite
from phalanx.parallel.local_sgd.state import (
    load_outer_state,
    local_state,
    outer_state,
    saved_local,
    without_values_of_others,
)
from phalanx.parallel.local_sgd.steps import StepCounter
from phalanx.parallel.uneven import Join, JoinPhase, check_joinable, check_may_join
from phalanx.parallel.wrapper import Wrapper, claim, owner_of
from phalanx.torch_internals import backward_number

log = logging.getLogger("phalanx")


class PeriodicSync(Wrapper):
    """The common part of `LocalSGD` and `DiLoCo`: counts steps, and synchronizes parameters.

    every        steps between two syncs
    start_after  number of first steps with a sync after each, which leaves nothing out

    A step is one of a torch optimizer with parameters of this module. If there are several such
    optimizers, one step of each, in any order, is one step. Passes that only accumulate gradients,
    and steps that a gradient scaler skips, do not count. Writes by hand are not noticed. Freeze
    parameters without an optimizer, or the first step is over only when the second one begins.
    """

    averages = True
    optimizers_apart = True
    start_after = 0

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
        self._counter = StepCounter(self._trained.values())
        self._alike = True  # parameters were the same on all ranks, and this one took no step since
        self._in_averaged = False
        self._open: MicroBatches | None = None
        self._join: Join | None = None
        self._dense = GradientAveraging(backend)

    def _begin(self, outer: OuterStep | None, options: Mapping[str, object]) -> None:
        """Compare with the other ranks, copy rank 0's values, and notice steps from now on.

        outer   the sync; None: parameters become their mean over the ranks (Stich 2019)
        """
        who = type(self).__name__
        check_same_model(self.module, self.backend, {"every": self.every, **options}, who=who)
        tensors = [*self.module.parameters(), *self.module.buffers()]
        broadcast_all_(tensors, self.backend, 0)
        self._outer = outer
        if outer is not None:
            outer.begin()
        self.attach()

    def attach(self) -> None:
        """Take an optimizer whose steps write the module's parameters."""
        self._check_not_in_averaged("a copy")
        for parameter in self.module.parameters():
            claim(parameter, self)

    def regrouped(self) -> None:
        super().regrouped()
        self._dense.regrouped()
        if self._outer is not None:
            self._outer.regrouped()
        self._counter = StepCounter(self._trained.values())
        self._alike = True

    def check_regroupable(self) -> None:
        super().check_regroupable()
        if self._in_averaged or self._open is not None or self._join is not None:
            self._refuse("regrouped() inside averaged(), step() or join(): leave it first")

    # As a module ----------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward. Nothing is sent, here or in backward."""
        return self.module(*args, **kwargs)

    @property
    def steps(self) -> int:
        """Number of steps that this rank has taken."""
        return self._counter.steps

    @property
    def between_syncs(self) -> bool:
        """True if ranks have different parameters now, as each has taken steps since a sync."""
        return not self._alike

    @property
    def meetings(self) -> int:
        """Number of syncs so far; the same on every rank."""
        return self._counter.syncs

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent so far in syncs of parameters and buffers, as rings and
        direct messages send them; without those of `averaged` and of checkpoints.
        """
        compressed = self._outer.compressed if self._outer is not None else None
        return self._dense.bytes_sent + (compressed.bytes_sent if compressed is not None else 0)

    # Steps ----------------------------------------------------------------------------------

    def before_step(self, optimizer: Optimizer) -> None:
        """Take an optimizer's step as about to write: the last period may be over by that."""
        given = {p for group in optimizer.param_groups for p in group["params"]}
        for name, parameter in self._frozen.items():
            if parameter in given and parameter.requires_grad:
                self._refuse(
                    f"{name} is trained, and was frozen when the module was wrapped: wrap it after "
                    "requires_grad_(True)"
                )
        if self._counter.trained.isdisjoint(given):
            return
        self._check_not_in_averaged("a step")
        if self._open is not None:
            self._refuse("an optimizer steps inside step(), whose weight is not complete: leave it")
        if self._counter.before(given):
            self._step_is_over(before_step=True)
        self._alike = False

    def after_step(self, optimizer: Optimizer) -> None:
        """Take an optimizer's step as done: a period may be over."""
        if self._counter.after(p for group in optimizer.param_groups for p in group["params"]):
            self._step_is_over()

    def after_skip(self, optimizer: Optimizer) -> None:
        """Take an optimizer's step as skipped; it counts if another optimizer's does."""
        given = [p for group in optimizer.param_groups for p in group["params"]]
        if self._counter.before(given) | self._counter.skip(given):
            self._step_is_over()

    def _step_is_over(self, *, before_step: bool = False) -> None:
        """Synchronize if a period is over: H steps, or one at the start (post-local SGD)."""
        self.backend.progress.count(self)
        early = self.steps <= self.start_after
        period = 1 if early else self.every
        if self._counter.since >= period:
            if before_step and backward_number() >= 0:
                self._refuse(
                    "an optimizer steps inside a backward pass, as in a hook, and a sync is due "
                    "before that: it would write parameters that the pass still needs. Not all "
                    "parameters were written since the last step, so a pass failed or did not use "
                    "some: call sync() before this pass, or step after backward()"
                )
            self._sync(f"every {period} steps", whole=early)

    # Syncs ----------------------------------------------------------------------------------

    def sync(self) -> None:
        """Synchronize now, after any number of steps on each rank; begin the next period.

        Call it at the end of training, and before a look at parameters. Every rank calls it; blocks
        until all have. Only sends a message of 8 bytes if parameters are the same on all ranks
        already.
        """
        self._check_not_in_averaged("sync()")
        self._counter.close()
        if self._join is not None or self._any_rank_differs("sync()"):
            self._sync("sync()", whole=True)

    def _sync(self, why: str, *, whole: bool, share: float | None = None) -> None:
        if share is None:
            share = self._exchange(JoinPhase.WHOLE_SYNC if whole else JoinPhase.SYNC)[1]
        why = why if self._join is None else "join()"
        label = f"{type(self).__name__}'s sync {self.meetings}, {why}"
        several, alike = self.backend.world_size > 1, True
        with self._explaining():
            if self._outer is not None:
                alike = self._outer.sync(label, whole=whole, share=share)  # t <- t', t_i <- t'
            elif several:
                self._take_mean(label, share)  # t_i <- mean of all t_j
            if several:
                self._sync_buffers(f"{label}, buffers", share)
        self._alike = alike
        self._counter.since, self._counter.seen, self._counter.syncs = 0, None, self.meetings + 1
        if self._join is not None:
            self._before_weights()

    def _exchange(self, phase: JoinPhase) -> tuple[JoinPhase, float]:
        """Tell what this rank does, and has seen since the last sync. Return what those with a
        batch do, and how much this rank counts in a mean (1 on average). One message of 16 bytes,
        if there are weights, or in `join`.
        """
        who, seen = type(self).__name__, self._counter.seen
        if seen is None and self._join is None:
            return phase, 1.0
        join = self._join or Join(self, self.backend)
        kind = int(self._counter.now()[1] > 0) if seen is None else 2  # 0: no step since
        with self._explaining():
            weight = float(kind) if seen is None else seen
            common = join.exchange(phase, weight, kind + 3 * self.steps)
        kinds = {count % 3 for count in join.counts} - {0}
        if len(kinds) > 1:
            problem = "since the last sync some ranks have trained in step(), and others without it"
            self._refuse(f"{problem}: use it on all or on none", DesyncError)
        if not kinds or common is JoinPhase.OVER:
            return common, 1.0
        op = f"{who}: weights in step() since the last sync"
        total = sum_of_weights(join.samples, self.backend.rank, op)
        return common, join.samples[self.backend.rank] * self.backend.world_size / total

    def _before_weights(self) -> None:
        """Keep this rank's parameters, if they have a part that was left out of the last sync."""
        outer = self._outer
        if outer is not None and not (self._alike or outer.began or self._counter.now()[1]):
            outer.began = {p: p.detach().clone() for p in self._trained.values()}

    @torch.no_grad()
    def _take_mean(self, label: str, share: float) -> None:
        buckets = self._dense.means_of(self._trained.values(), label=label, share=share)
        if not all(is_finite(bucket.flat) for bucket in buckets):
            log.warning(
                "rank %d: LocalSGD: parameters are not finite, and by their mean on no rank any "
                "more: %s. Go back to a checkpoint",
                self.backend.rank,
                not_finite(self._trained, self.backend),
            )
        for bucket in buckets:
            _copy(bucket.views)

    def _sync_buffers(self, label: str, share: float) -> None:
        """Make buffers equal, in place: floating ones, such as statistics of batch norm, become
        their mean; others, such as counters and masks, rank 0's.
        """
        buffers = persistent_buffers(self.module).values()
        means = [buffer for buffer in buffers if buffer.is_floating_point()]
        for bucket in self._dense.means_of(means, label=label, share=share):
            _copy(bucket.views)
        others = [buffer for buffer in buffers if not buffer.is_floating_point()]
        broadcast_all_(others, self.backend, 0, label=f"{label} of rank 0")

    def _any_rank_differs(self, why: str, timeout: float | None = None) -> bool:
        """Return whether ranks may have different parameters. One message of 8 bytes. If others
        have weights, a rank without a step since the last sync has weight 0.
        """
        since, seen = self._counter.now()[1], self._counter.seen
        apart = since > 0 or not self._alike
        apart_anywhere = torch.tensor([int(apart) if seen is None else 2])
        label = f"{type(self).__name__}'s {why} after {self.meetings} syncs"
        with self._explaining():
            all_reduce_(apart_anywhere, self.backend, ReduceOp.MAX, label=label, timeout=timeout)
        if apart_anywhere.item() == 2 and not since:
            self._counter.seen = seen or 0.0
        return bool(apart_anywhere.item())

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        steps, since, _ = self._counter.now()
        text = (
            f"this rank has taken {steps} steps, {since} of them since the last sync, and "
            "another one does something else: if its batches ran out, train in join(), or leave "
            "the loop together and call sync() on all; call step() on all ranks or on none"
        )
        try:
            yield
        except DistributedError as error:
            explain(error, text, who=type(self).__name__)
            raise

    # The mean, without a sync ---------------------------------------------------------------

    def means(self, *, timeout: float | None = None) -> dict[Tensor, Tensor]:
        """Return the means over the ranks of trained parameters and floating buffers: new.

        By tensor; empty if they are the same on all ranks. Nothing is changed. Every rank calls it;
        blocks for a message of 8 bytes, for which it waits `timeout` seconds (by default the
        backend's), and the all-reduce.
        """
        self._check_not_in_averaged("means()")
        if not self._any_rank_differs("means", timeout):
            return {}
        share = self._exchange(JoinPhase.WHOLE_SYNC)[1]
        kept = self._outer.began if self._outer is not None else None
        buffers = persistent_buffers(self.module).values()
        tensors = [*self._trained.values(), *(b for b in buffers if b.is_floating_point())]
        label = f"{type(self).__name__}'s means after {self.meetings} syncs"
        with self._explaining():
            averaging = GradientAveraging(self.backend)
            found = averaging.means_of(tensors, label=label, share=share, kept=kept)
        return {tensor: mean for bucket in found for tensor, mean in bucket.views.items()}

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Give the module the means over the ranks; afterwards this rank's own values again.

            with model.averaged():
                loss = evaluate(model)

        Training goes on unchanged. Every rank enters it, as it calls `means`; takes the parameters'
        memory twice. Steps in here are refused.
        """
        means = self.means()
        own = {tensor: tensor.detach().clone() for tensor in means}
        _copy(means)
        self._in_averaged = True
        try:
            yield
        finally:
            self._in_averaged = False
            _copy(own)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Do nothing: backward passes send nothing. For scripts that are written for DDP, too."""
        yield

    # Work of different sizes ----------------------------------------------------------------

    @contextmanager
    def step(self, weight: float | Tensor, *, micro_batches: int = 1) -> Iterator[MicroBatches]:
        """Take a step of all micro-batches of this rank together, in the form of `DDP.step`.

        Gradients are of (sum of losses) / weight, as `step.loss` is: zeros with weight 0. Nothing
        is sent. In the next sync this rank counts by the sum of its weights since the last one, in
        the means of parameters, outer gradients and floating buffers: a message of 16 bytes more.
        A step that a gradient scaler skips does not count, nor one without this in between.

        Raises ValueError for a bad weight, and, in the sync, on every rank, if all have seen 0;
        `DesyncError` there if only some ranks use it; `MisuseError` for an optimizer's step in it,
        and as `DDP.step`.
        """
        step = MicroBatches(self, weight, micro_batches)
        if self._open is not None:
            self._refuse("step() inside step()")
        with step.alone():
            self._open = step
            self._before_weights()
            try:
                yield step
            finally:
                self._open = None
        self._counter.weight = step.weight
        for p in self._trained.values():
            if p.requires_grad and not step.weight:  # whose gradient may be NaN, or there is none
                p.grad = torch.zeros_like(p if p.grad is None else p.grad)

    @contextmanager
    def join(self, *, throw_on_early_termination: bool = False) -> Iterator[None]:
        """Let each rank train in here on its own number of batches; none at all, too.

        A rank that leaves the block takes part in the syncs of the others until all have left: with
        what it has seen since the last one, then with weight 0 (without `step()`, ranks that took a
        step since count alike). The block begins and ends with a sync, if ranks differ; each costs
        a message of 16 bytes more. Each rank's optimizer is its own: there is no `step=` as in
        `DDP.join`. Early termination shows at a sync. `steps` become those of the rank with most.
        """
        who, throws = type(self).__name__, throw_on_early_termination
        layers = nn.Identity() if throws else self.module
        check_may_join(who, self.backend)
        check_joinable(layers, who, self.backend, self._join or self._open)
        self.sync()
        self._join = join = Join(self, self.backend, throw_on_early_termination=throws)
        try:
            yield
            self._counter.close()
            while (met := self._exchange(JoinPhase.OVER))[0] is not JoinPhase.OVER:
                self._sync("join()", whole=met[0] is JoinPhase.WHOLE_SYNC, share=met[1])
            if self._any_rank_differs("join()"):
                self.sync()
        finally:
            self._join = None
        self._counter.steps = max([self.steps, *(count // 3 for count in join.counts)])

    # State: see state.py --------------------------------------------------------------------

    def own_state(self) -> dict[str, Tensor]:
        """Return this rank's counts, the syncs' state, and its parameters if ranks differ."""
        self._check_not_in_averaged("a state dict")
        apart, outer = not self._alike, self._outer
        values = self._local_tensors() if apart else {}
        seen = [] if self._counter.seen is None else [self._counter.seen]
        state = local_state([*self._counter.now(), *seen], values, self.backend)
        if outer is not None:
            state |= outer_state(outer.optimizer, outer.copies, apart=apart)
        return state | super().own_state()

    @torch.no_grad()
    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Continue from such states, of any number of ranks, joined into one dict.

        As many ranks as before take their own; others begin from the module's loaded values, or
        from the mean of all. Without any a new period begins. Nothing is sent.
        """
        self._check_not_in_averaged("load_state_dict")
        super().load_own_state(state)
        began: Mapping[str, Tensor] = {}
        backend, outer = self.backend, self._outer
        if outer is not None:
            began = load_outer_state(state, outer.optimizer, outer.copies, backend.rank)
            if not began:
                outer.begin()
            outer.began = {p: torch.empty_like(p) for p in self._trained.values()}
        own = self._local_tensors()
        counts, values = saved_local(state, own, backend, type(self).__name__)
        self._counter.load(counts)
        since = self._counter.since
        self._alike = not (began or since)
        if not values and not since:
            values = began  # this rank had taken no step, and others had
        _copy({own[name]: value for name, value in values.items()})
        if outer is not None and not any(name.startswith(".") for name in values):
            outer.began = {}

    def needs(self, keys: Iterable[str]) -> list[str]:
        """Return the keys without those of other ranks' values."""
        return super().needs(without_values_of_others(keys, self.backend))

    def _local_tensors(self) -> dict[str, Tensor]:
        began = self._outer.began if self._outer is not None else {}
        kept = {f".{name}": began[p] for name, p in self._trained.items() if p in began}
        return {**self._trained, **persistent_buffers(self.module), **kept}

    def _check_not_in_averaged(self, what: str) -> None:
        if self._in_averaged:
            self._refuse(f"{what} inside averaged(): leave it first")


@torch.no_grad()
def _copy(values: Mapping[Tensor, Tensor]) -> None:
    """Overwrite each tensor with its value."""
    for tensor, value in values.items():
        tensor.copy_(value)


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of the state dict, by their first name. Others are computed anew from
    other values, and stay each rank's.
    """
    return {
        f"{prefix}.{key}" if prefix else key: buffer
        for prefix, each in module.named_modules()
        for key, buffer in each._buffers.items()
        if buffer is not None and key not in each._non_persistent_buffers_set
    }
