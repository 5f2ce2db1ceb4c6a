"""The reducer: averages gradients while a backward pass still runs.

    hook on a parameter     its gradient is complete on this rank     -> copy it into its bucket
    bucket full             and all buckets before it have started    -> start to average it
    end of the pass         no more gradients come                    -> wait for all buckets
    all averaged            unused, not finite, drifted apart?        -> agree with the other ranks

Buckets start in one order, the same on every rank, for any order of the gradients. The first
pass fills them in reverse order of the parameters; then they are built anew in the order in which
gradients arrived on rank 0.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence, Set
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from xxhash import xxh3_64_hexdigest

from phalanx.collectives import ReduceOp, all_reduce_, broadcast
from phalanx.collectives.layout import chunk_ranges
from phalanx.collectives.pieces import join
from phalanx.compression.compressor import check_floating
from phalanx.core.backend import Backend
from phalanx.errors import DistributedError, MisuseError, UnsupportedOperationError
from phalanx.parallel.averaging import (
    LARGE,
    Bucket,
    GradientAveraging,
    PendingAverage,
    RowGradient,
    average_rows_,
    batches,
    copy_others_part,
)
from phalanx.parallel.gradient_parts import GradientPart, mark_part
from phalanx.parallel.guards import AVERAGING, UNANSWERED, DriftCheck, FiniteCheck, explain, refuse
from phalanx.parallel.joined_step import InStep
from phalanx.parallel.owners import OwnedGradients
from phalanx.parallel.uneven import OPEN_STEP, Join, JoinPhase, check_no_step
from phalanx.parallel.wrapper import WrapperHook, remove_hooks
from phalanx.torch_internals import (
    accumulates_everywhere,
    at_end_of_backward,
    backward_number,
    disable_dynamo,
    post_accumulate_hooks,
    pytree,
)

NAMES_SHOWN = 10


class Reducer:
    """Averages the gradients of parameters, given by name, over the ranks of a backend.

    sparse         parameters with sparse gradients, which are averaged at the end of a pass
    synchronize    whether backward passes average; if not, they accumulate on this rank
    join           the state of ranks without a batch left, inside of `DDP.join`
    zero_weight    whether the backward pass that runs is of a loss with zero weight
    unanswered     forward passes since an averaging pass last began
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        backend: Backend,
        *,
        sparse: Set[Tensor],
        bucket_size: int,
        find_unused_parameters: bool,
        averaging: GradientAveraging,
        finite: FiniteCheck | None,
        drift: DriftCheck | None,
    ) -> None:
        self.synchronize = True
        self.join: Join | InStep | None = None
        self.zero_weight = False
        self.unanswered = 0
        self._backend = backend
        self._sparse = sparse
        self._bucket_size = bucket_size
        self._find_unused = find_unused_parameters
        self._averaging = averaging
        self._finite, self._drift = finite, drift
        self._progress = backend.progress
        self._owned = OwnedGradients({}, backend.rank)
        self._names: dict[Tensor, str] = {p: name for name, p in parameters.items()}
        self._handles: list[Any] = []
        weakref.finalize(self, remove_hooks, self._handles)  # so that others may wrap the module
        self._closed = False
        self._without_hook = set(self._names)
        self._unsynchronized: set[Tensor] = set()  # have gradients that were never averaged
        self._callback_queued = False
        self._open = False  # a pass that averages is under way
        self._left_out = False  # before it there was a forward pass without one
        self._arrivals: dict[Tensor, None] | None = {}  # in the first pass, in order
        self._order = list(self._names)[::-1]  # of parameters in buckets
        self._started: list[PendingAverage | None] = []  # averages of the first buckets
        # How many passes ended well, and how many were cut short: so that buckets of different
        # passes are not taken for each other, nor a pass that only one rank has given up.
        self._passes = self._failed = 0
        for parameter, name in self._names.items():
            if any(isinstance(hook, WrapperHook) for hook in post_accumulate_hooks(parameter)):
                problem = f"another DDP averages the gradients of {name} already; "
                refuse("DDP", backend.rank, problem + "delete that one first")
        self._put_hooks()
        self._averaged = self._built = tuple(p.requires_grad for p in self._names)
        self._make_buckets()

    def _put_hooks(self) -> None:
        """Put hooks on parameters that require gradients and lack them: torch takes no others."""
        hook = WrapperHook(Reducer._gradient_ready, weakref.ref(self))  # keeps no reducer alive
        for parameter in [p for p in self._without_hook if p.requires_grad]:
            handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            self._handles.append(handle)
            self._without_hook.remove(parameter)

    def _make_buckets(self) -> None:
        """Make buckets of the parameters that are averaged. Nothing is sent."""
        self._trained = [p for p, yes in zip(self._names, self._averaged, strict=True) if yes]
        self._changes = ""
        if self._averaged != self._built:
            now = zip(self._names.values(), self._averaged, self._built, strict=True)
            changed = _listed([name for name, after, before in now if after != before])
            digest = xxh3_64_hexdigest(bytes(self._averaged))
            self._changes = f", requires_grad switched for {changed} ({digest})"
        self._rows = [p for p in self._trained if p in self._sparse]
        in_buckets = set(self._trained).difference(self._rows)
        in_pieces = self._finite is None and self._averaging.in_pieces
        owners = self._owned.rank_of if self._averaging.compressor is None else {}
        place = {p: at for at, p in enumerate(self._order)}
        size = self._bucket_size // (self._backend.world_size if owners else 1)  # as many are open
        runs = batches((p for p in place if p in in_buckets), size, owners)
        self._buckets: list[BackwardBucket] = []
        for run in sorted(runs, key=lambda run: place[run[-1]]) if owners else runs:
            owner = owners.get(run[0])
            self._buckets.append(BackwardBucket(run, self._backend, owner, in_pieces=in_pieces))
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.views}

    @property
    def owes(self) -> bool:
        """True if there are gradients that were never averaged."""
        return any(p.grad is not None for p in self._unsynchronized)

    def give_to(self, owners: Mapping[nn.Parameter, int]) -> None:
        """Average the gradients of parameters for these ranks alone from now on, between passes."""
        self.begin_forward()
        self._owned = OwnedGradients(owners, self._backend.rank)
        for parameter, owner in owners.items():
            if owner != self._backend.rank and parameter not in self._unsynchronized:
                parameter.grad = None
        self._make_buckets()

    def close(self) -> None:
        """Leave the parameters to another reducer, whatever pass is under way: wait for nothing,
        and keep no memory, though a graph keeps this one. A pass through that is refused.
        """
        remove_hooks(self._handles)
        self._closed, self._callback_queued = True, False
        self._started.clear()
        self._buckets.clear()
        self._bucket_of.clear()

    # Forward passes -------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """Begin anew: forget a backward pass that an error cut short."""
        if self._without_hook:
            self._put_hooks()
        filled = any(len(bucket.pending) < len(bucket.views) for bucket in self._buckets)
        self._failed += self._open or filled
        self._callback_queued = self._open = self.zero_weight = False
        if not filled:
            return
        if self._arrivals is not None:
            self._arrivals.clear()
        if self._finite is not None:
            self._finite.forget()
        try:
            self._finish_buckets()
        except DistributedError as error:
            self._explain(error)
            raise
        self._averaging.end_pass(self._buckets, skipped=True)

    @disable_dynamo()
    def watch(self, outputs: Any) -> Any:
        """Let the backward pass from these outputs end with averaged gradients. Return them.

        A hook on the outputs queues the callback, so that it belongs to the outermost backward
        pass, also when activation checkpointing runs others inside it.
        """
        if not torch.is_grad_enabled():
            return outputs
        leaves = pytree.tree_leaves(outputs)
        nodes = {leaf.grad_fn for leaf in leaves if isinstance(leaf, Tensor)} - {None}
        for node in nodes:
            node.register_prehook(self._output_gradients_ready)  # type: ignore[union-attr]
        if nodes and self.synchronize and backward_number() < 0:  # not if a checkpoint repeats it
            self.unanswered += 1
        return outputs

    def check_complete(self, parameters: dict[str, nn.Parameter]) -> None:
        """Refuse to train parameters that came after DDP was built."""
        late = [n for n, p in parameters.items() if p.requires_grad and p not in self._names]
        if late:
            self._refuse(
                f"{_listed(late)} came to the module after DDP was built, and would be "
                "trained on each rank alone: build DDP when the module is complete"
            )

    # A backward pass, and other ways to end one ---------------------------------------------

    def _output_gradients_ready(self, grads: tuple[Tensor | None, ...]) -> Any:
        # A pass for chosen tensors (autograd.grad, inputs=) averages if a parameter is among them:
        # its hook begins. There is no reentrant checkpointing in it, for which that is too late.
        if self._owned.rank_of and not self._callback_queued:
            self._owned.begin_pass(self._unsynchronized)
            join = self.join
            ranks_left = isinstance(join, InStep) and len(join.active) < self._backend.world_size
            if self._owned.earlier and ranks_left:
                self._refuse(
                    "a step() in join() adds to means that owners have, some of whom join() has "
                    "left: call zero_grad() before it"
                )
        if self.synchronize and not self._callback_queued and accumulates_everywhere():
            self._begin_pass(JoinPhase.BACKWARD)
        if not self.zero_weight:
            return None
        # The loss of no samples may have made NaN of the zeros that came into it.
        return tuple(g if g is None else torch.where(g.isfinite(), g, 0) for g in grads)

    def _begin_pass(self, phase: JoinPhase) -> None:
        if self._closed:
            self._refuse(
                "a backward pass through outputs from before regrouped(): run forward again"
            )
        if phase is JoinPhase.BACKWARD:
            self._callback_queued = True
            at_end_of_backward(self._finish_pass)
        if not self._open:
            self._open = True
            self._left_out = self.unanswered > 1
            self.unanswered = 0
            self._follow_freezing()
            if self.join is not None:
                self.join.exchange(phase, count=int(bool(self._owned.earlier)))
            elif OPEN_STEP in self._backend.kept:
                check_no_step("DDP", self._backend)

    def _follow_freezing(self) -> None:
        """Average the parameters trained now in this pass; the labels tell ranks that differ."""
        averaged = tuple(p.requires_grad or p in self._unsynchronized for p in self._names)
        if averaged != self._averaged:
            for parameter, name in self._names.items():
                if parameter.requires_grad and self._averaging.compressor is not None:
                    check_floating(parameter, f"rank {self._backend.rank}: DDP: {name}")
            self._averaged = averaged
            self._put_hooks()
            self._make_buckets()

    @staticmethod
    def _gradient_ready(reference: weakref.ref[Reducer], parameter: Tensor) -> None:
        """Take a parameter's gradient as complete on this rank: a hook, in the backward pass."""
        self = reference()
        if self is None or not parameter.requires_grad:  # frozen since: torch adds nothing
            return
        if self.join is not None:
            self.join.check_backward()
        if not self.synchronize:
            self._unsynchronized.add(parameter)
            return
        if not self._callback_queued:
            self._begin_pass(JoinPhase.BACKWARD)
        if parameter in self._sparse:
            return
        if parameter not in self._bucket_of[parameter].pending:
            self._refuse(
                f"the gradient of {self._names[parameter]} came twice in one backward pass: it is "
                "used in more than one reentrant checkpoint; pass use_reentrant=False to them"
            )
        if self._arrivals is not None:
            self._arrivals[parameter] = None
        self._put(parameter)

    def _put(self, parameter: Tensor) -> None:
        """Put a parameter's gradient into its bucket; start the buckets that are ready."""
        bucket, grad = self._bucket_of[parameter], parameter.grad
        if grad is not None and grad.layout is not torch.strided:
            self._refuse(
                f"the gradient of {self._names[parameter]} is {grad.layout}; of sparse ones only "
                "those of nn.Embedding and EmbeddingBag(sparse=True) are averaged (sparse=False)",
                UnsupportedOperationError,
            )
        if self._owned.rank_of and not self._owned.knows_mean_in(parameter):
            self._refuse(
                f"a backward pass not through the model's outputs adds to the mean of "
                f"{self._names[parameter]}, which its owner alone has: call zero_grad() before it"
            )
        bucket.put(parameter)
        if self._owned.earlier:
            divisor = self.join.divisor if self.join is not None else self._backend.world_size
            self._owned.add_earlier_(parameter, bucket.views[parameter], divisor)
        bucket.pending.discard(parameter)
        while (number := len(self._started)) < len(self._buckets):
            bucket = self._buckets[number]
            if bucket.pending:
                return
            if self._finite is not None:
                self._finite.look(bucket)
            try:
                self._started.append(self._averaging.begin_bucket(bucket, self._label(number)))
            except DistributedError as error:
                self._explain(error)
                raise

    def _label(self, number: int) -> str:
        failed = f" after {self._failed} that failed" if self._failed else ""
        return f"DDP's pass {self._passes}{failed}, bucket {number}{self._changes}"

    def catch_up(self) -> None:
        """Average the gradients that were accumulated and not averaged since, if any."""
        if self._unsynchronized:
            self._begin_pass(JoinPhase.CATCHING_UP)
            self._finish_pass(JoinPhase.CATCHING_UP)

    @torch.no_grad()
    def answer(self, phase: JoinPhase, *, drop: bool) -> None:
        """Average zeros with the gradients of the ranks that have a batch, into `.grad`.

        drop   this rank's earlier gradients; else they are averaged as on the other ranks
        """
        self._follow_freezing()
        for parameter in self._trained if drop else ():
            parameter.grad = None
        self._owned.begin_pass(self._unsynchronized)
        for parameter in self._bucket_of:
            self._put(parameter)
        self._average(set(self._trained), phase)

    @torch.no_grad()
    def _finish_pass(self, phase: JoinPhase = JoinPhase.BACKWARD) -> None:
        if phase is JoinPhase.BACKWARD:
            self._callback_queued = self.zero_weight = False
        missing: list[Tensor] = []
        if len(self._started) < len(self._buckets):
            missing = [p for b in self._buckets for p in b.views if p in b.pending]
        unused = [p for p in [*missing, *self._rows] if p.grad is None]
        if unused and not self._find_unused:
            self._refuse(
                f"no gradient came for {_listed([self._names[p] for p in unused])}: on this rank "
                f"the loss does not depend on {'them' if len(unused) > 1 else 'it'}, or "
                "backward(inputs=) asks for others. Freeze what is not trained, on every rank, or "
                "pass find_unused_parameters=True"
            )
        for parameter in missing:  # gradients accumulated by no_sync, or zeros
            self._put(parameter)
        self._average(set(unused), phase)

    def _average(self, unused: set[Tensor], phase: JoinPhase) -> None:
        """Wait for the averages of all buckets, and agree with the other ranks on their use."""
        world, join = self._backend.world_size, self.join
        try:
            if self._changes and not self._buckets:  # there is no label that tells the others
                all_reduce_(torch.zeros(1), self._backend, label=self._label(0))
            self._passes += 1
            divisor = join.divisor if join is not None else world
            self._finish_buckets(world / divisor)
            averaged = [*self._buckets, *(self._average_rows(divisor) if self._rows else ())]
            self._open = False
            self._unsynchronized.clear()
            if self._find_unused:
                self._drop_unused(unused)
            skipped = self._finite is not None and self._finite.agree(averaged)
            if self._averaging.compressor is not None:
                self._averaging.end_pass(averaged, skipped=skipped)
        except DistributedError as error:
            self._explain(error)
            raise
        if skipped:
            for parameter in self._trained:
                parameter.grad = None
        if self._owned.rank_of:
            self._owned.end_pass(self._buckets)
        if self._drift is not None:
            self._drift.pass_is_over(join.active if join is not None else list(range(world)))
        if phase is JoinPhase.BACKWARD and self._arrivals is not None:
            self._adopt_arrival_order(self._arrivals)
        self._progress.count(self)

    def _average_rows(self, divisor: int) -> list[RowGradient]:
        if self._finite is not None:
            for parameter in self._rows:
                self._finite.look(RowGradient(parameter))
        label, ranks = self._label(len(self._buckets)), self._backend.world_size
        rounds = [average_rows_(parameter, ranks, divisor) for parameter in self._rows]
        self._averaging.finish([self._averaging.begin(each, label) for each in rounds])
        return [RowGradient(parameter) for parameter in self._rows]

    def _finish_buckets(self, scale: float = 1) -> None:
        """Wait until every started bucket is averaged; scale it. Then raise the first error."""
        started, self._started = self._started, []
        for bucket in self._buckets:
            bucket.pending.update(bucket.views)
            if bucket.pieces:  # of a pass that was cut short
                join(bucket.flat, tuple(bucket.pieces.items()))
                bucket.pieces = {}
        self._averaging.finish(started)
        if scale != 1:
            for bucket in self._buckets[: len(started)]:
                bucket.flat.mul_(scale)

    def _drop_unused(self, unused: set[Tensor]) -> None:
        """Leave gradients of parameters that no rank has used None, as in one process; unless error
        feedback now sends an earlier one's residual.
        """
        used = torch.tensor([p not in unused for p in self._trained], dtype=torch.int32)
        all_reduce_(used, self._backend, ReduceOp.MAX)
        for parameter, anywhere in zip(self._trained, used.tolist(), strict=True):
            if not anywhere and not RowGradient(parameter).flat.any():
                parameter.grad = None

    def _adopt_arrival_order(self, arrivals: dict[Tensor, None]) -> None:
        """Use from now on the order in which gradients arrived on rank 0; the others come last.

        Every rank takes part, with any arrivals. If rank 0 had no batch, it is the order of the
        first rank that had one.
        """
        root = self.join.leader if self.join is not None else 0
        place = {p: i for i, p in enumerate(self._trained)}
        before = [place[p] for p in self._bucket_of]
        mine = list(dict.fromkeys([*(place[p] for p in arrivals), *before]))
        self._arrivals = None
        order = broadcast(torch.tensor(mine, dtype=torch.int64), self._backend, root).tolist()
        if order != before:
            # Gradients stay in the old memory, as long as they live; the next pass moves them.
            self._order = list(dict.fromkeys([*(self._trained[i] for i in order), *self._order]))
            self._make_buckets()

    # Errors ---------------------------------------------------------------------------------

    def check_averaged(self) -> None:
        """Refuse a step on gradients of which owners have their own alone."""
        late = [p for p in self._unsynchronized if p in self._owned.rank_of and p.grad is not None]
        if late:
            self._refuse(
                f"a step on {self._names[late[0]]}, whose owner has its own gradients only, of "
                "no_sync(): call sync_gradients() before"
            )

    def check_step(self, parameter: Tensor) -> None:
        """Refuse an optimizer's step on a parameter inside a pass that has not averaged it."""
        if self._open or not self.synchronize:
            name, rank = self._names[parameter], self._backend.rank
            problem = (  # of all ranks: if of one only, its next pass tells the others
                f"an optimizer steps on {name} inside a backward pass, as in a hook: gradients are "
                "averaged by the end of it, and each rank would step by its own. Step after "
                "backward(), or use FSDP, whose post-accumulate hooks see averages"
            )
            refuse("DDP", rank, problem)

    def _explain(self, error: DistributedError) -> None:
        explain(error, UNANSWERED if self._left_out else AVERAGING)

    def _refuse(self, problem: str, kind: type[DistributedError] = MisuseError) -> NoReturn:
        rank = self._backend.rank
        error = kind(f"rank {rank}: DDP: {problem}", rank=rank, op="DDP")
        self._backend.fail(error)  # the others wait for our gradients
        raise error


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more


class BackwardBucket(Bucket):
    """A bucket of gradients, which a backward pass brings one by one.

    in_pieces   whether `put` leaves this rank's own slice, which nobody else reads, in place
    pending     the parameters whose gradients have not come in this pass
    """

    def __init__(
        self, run: Sequence[Tensor], backend: Backend, owner: int | None, *, in_pieces: bool
    ) -> None:
        super().__init__(run, backend)
        backend.check_movable(self.flat, "DDP")
        self.owner = owner
        self.pieces: dict[int, Tensor] = {}
        self.pending = set(run)
        in_pieces = in_pieces and owner is None and self.flat.nbytes >= LARGE and self.flat.is_cpu
        slices = chunk_ranges(self.flat.numel(), backend.world_size)
        self._own = slices[backend.rank] if in_pieces else (0, 0)

    def put(self, parameter: Tensor) -> None:
        """Make a parameter's complete gradient (None are zeros) a view of the bucket."""
        grad, view, (low, high) = parameter.grad, self.views[parameter], self._own
        start = (view.data_ptr() - self.flat.data_ptr()) // view.itemsize
        first, last = max(low - start, 0), min(high - start, view.numel())  # of its elements
        if first < last:
            self.pieces.pop(start + first, None)
        if grad is None:
            view.zero_()
        elif grad.data_ptr() != view.data_ptr() or grad.stride() != view.stride():
            values = grad.detach()  # it has a graph after backward(create_graph=True)
            if first < last and values.is_contiguous():
                self.pieces[start + first] = copy_others_part(view, values, first, last)
            else:
                view.copy_(values)
        parameter.grad = view.detach()  # not the view itself, whose `.data` a program may replace
        if type(grad) is GradientPart:
            mark_part(parameter)
