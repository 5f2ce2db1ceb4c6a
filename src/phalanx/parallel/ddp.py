"""DDP: every rank has the whole model and a part of each batch; gradients are averaged.

    rank 0   forward | backward  g3   g2   g1 |  step
                                  \\    \\    \\
    network                     [g3] [g2  g1]         averaged while backward still runs
                                  /    /    /
    rank 1   forward | backward  g3   g2   g1 |  step

(Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training".)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx.compression import Compressor
from phalanx.core.backend import Backend
from phalanx.errors import DistributedError, UnsupportedOperationError
from phalanx.parallel.averaging import MESSAGE, GradientAveraging, broadcast_all_
from phalanx.parallel.guards import (
    BEGINNING,
    UNANSWERED,
    DriftCheck,
    FiniteCheck,
    Skip,
    check_same_model,
    explain,
)
from phalanx.parallel.joined_step import AveragingWrapper, InStep, Scaled, checked_weight
from phalanx.parallel.reducer import Reducer
from phalanx.parallel.uneven import Join, JoinPhase
from phalanx.parallel.wrapper import claim
from phalanx.torch_internals import backward_number, disable_dynamo


class DDP(AveragingWrapper):
    """A module whose gradients are averaged over the ranks of `backend`, during backward.

        model = DDP(model, backend)                 # parameters and buffers become rank 0's
        loss_of(model(inputs), targets).backward()  # every `.grad` is now the mean over the ranks
        optimizer.step()

    With equal batch sizes and a loss that is a mean, these are the gradients of the joined batch.
    For other batches, and micro-batches, see `step`; for different numbers of them `join`.

    module         the model; the same on every rank, in structure. Its parameters and buffers are
                   overwritten with rank 0's here, in place, so an optimizer may exist already
    backend        the ranks that train together
    bucket_size    bytes of gradients that are sent as one message. The first backward pass fills
                   buckets in reverse order of the parameters; later ones in the order in which
                   gradients arrived on rank 0 then
    broadcast_buffers       in training, buffers are rank 0's at the start of each forward pass
    find_unused_parameters  a parameter that a rank's backward pass does not reach counts as zeros
                   there; its gradient stays None if no rank's pass reached it. Costs one small
                   message. Without it, such a parameter is an error that names it
    skip_nonfinite          if gradients of a rank are infinite or NaN, every `.grad` of all
                   ranks becomes None, so that `optimizer.step()` does nothing. A warning in the log
                   names the ranks and their first such parameters; so do `skipped_steps` and
                   `last_skip`. Sums under `no_sync` from before are dropped, too. Costs reading
                   each bucket once before it is averaged and once after, and a message of 8 bytes.
                   Not together with torch's GradScaler, which checks the averages by itself
    check_replicas_every    after each such number of averaging backward passes, a hash of all
                   parameters is compared over the ranks: `DesyncError`, on every rank, names the
                   first one that differs and the ranks in the minority. 0: never. Costs reading
                   the parameters once, and a message of 8 bytes
    compression             send less: `ErrorFeedback(TopK(0.01))`, `PowerSGD(4)`, ...; see below
    reproducible            add up gradients in rank order, whatever the backend and the sizes: the
                   same bits as with any other. Not with compression

    # Notes
    Gradients live in the buckets' memory, which the next backward pass writes again: clone those
    to keep. A step of an optimizer in a hook, inside the pass, is a `MisuseError` on every rank.
    A step sends 2(p-1)/p of the gradients' bytes from each of p ranks. `state_dict` and the names
    of parameters are those of the plain module, which is `.module`.

    Only additions of backward passes to `.grad` are averaged: `torch.autograd.grad`, and `backward`
    with other `inputs=`, send nothing. Ranks have to freeze and unfreeze parameters alike, or a
    `DesyncError` names one. Sparse gradients (`nn.Embedding(sparse=True)`) are averaged at the end
    of a pass, not compressed: each rank sends its rows, p-1 times.

    Raises `DesyncError`, on every rank, if the ranks' models or options differ, naming the first
    parameter or option that does; `UnsupportedOperationError` if a parameter's dtype cannot be
    compressed.

    # Compression
    Buckets are averaged by a copy of the compressor, `.compression`, as they are at the end of a
    pass: add up gradients of several passes under `no_sync`. Its state for each gradient (the
    residual of error feedback) stays as it was if a pass fails, if its step is skipped, or
    if the averages are not finite. Else it counts like a gradient: a rank that has no batch left
    still sends it. With a scaled loss (torch's GradScaler) it has that scale: call
    `.compression.scale_` when the scale changes. `state_dict` has this rank's, too, under keys of
    its own (`own_state`), which `load_state_dict` of a DDP takes, and that of a plain module only
    with `strict=False`; `.module.state_dict()` is without them.
    """

    shards_optimizers = True
    made_anew = frozenset({"_averaging", "_finite", "_reducer", "owners"})

    def __init__(
        self,
        module: nn.Module,
        backend: Backend,
        *,
        bucket_size: int = MESSAGE,
        broadcast_buffers: bool = True,
        find_unused_parameters: bool = False,
        skip_nonfinite: bool = False,
        check_replicas_every: int = 0,
        compression: Compressor | None = None,
        reproducible: bool = False,
    ) -> None:
        super().__init__(module, backend)
        if bucket_size < 1:
            raise ValueError(f"bucket_size must be at least 1 byte, not {bucket_size}")
        if check_replicas_every < 0:
            raise ValueError(
                f"check_replicas_every must be a number of backward passes, or 0 for never, not "
                f"{check_replicas_every}"
            )
        if reproducible and compression is not None:
            raise ValueError("reproducible=True has no meaning for gradients that are compressed")
        self._check_compression(compression)
        self.broadcast_buffers = broadcast_buffers
        self._options = {
            "bucket_size": bucket_size,
            "broadcast_buffers": broadcast_buffers,
            "find_unused_parameters": find_unused_parameters,
            "skip_nonfinite": skip_nonfinite,
            "check_replicas_every": check_replicas_every,
            "reproducible": reproducible,
        }
        tables = [m for m in module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
        self._sparse: set[Tensor] = {table.weight for table in tables if table.sparse}
        sparse = [name for name, p in module.named_parameters() if p in self._sparse]
        options = {**self._options, "compression": compression, "sparse": sparse}
        check_same_model(module, backend, options)
        self.broadcast_parameters()
        self.compression = deepcopy(compression)
        self.attach()

    def attach(self) -> None:
        """Average the gradients of the module's parameters from now on."""
        module, backend, options = self.module, self.backend, self._options
        self._complete = False  # not known yet: whether parameters came later
        named = dict(module.named_parameters())
        names: dict[Tensor, str] = {p: name for name, p in named.items()}
        for parameter in named.values() if self.compression is not None else ():
            claim(parameter, self)
        exact = bool(options["reproducible"])
        self._averaging = GradientAveraging(backend, self.compression, names, reproducible=exact)
        self._finite = FiniteCheck(names, backend) if options["skip_nonfinite"] else None
        every = options["check_replicas_every"]
        self._reducer = Reducer(
            named,
            backend,
            sparse=self._sparse,
            bucket_size=options["bucket_size"],
            find_unused_parameters=bool(options["find_unused_parameters"]),
            averaging=self._averaging,
            finite=self._finite,
            drift=DriftCheck(module.named_parameters, backend, every) if every else None,
        )

    def regrouped(self) -> None:
        super().regrouped()
        self._reducer.close()
        self.attach()

    # As a module ----------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._begin_forward()
        return self._reducer.watch(self.module(*args, **kwargs))

    @disable_dynamo()  # torch.compile runs it as it is, and compiles the module's forward
    def _begin_forward(self) -> None:
        if backward_number() >= 0:  # by activation checkpointing: nothing begins then
            return
        reducer = self._reducer
        reducer.begin_forward()
        if self.training:
            if not self._complete:
                reducer.check_complete(dict(self.module.named_parameters()))
                self._complete = True  # once: to look each time would cost more than it is worth
            sends = self.broadcast_buffers and reducer.synchronize
            sends = sends and next(self.module.buffers(), None) is not None
            if reducer.join is not None and (sends or reducer.join.throws):
                reducer.join.exchange(JoinPhase.FORWARD)
            if sends:
                self._broadcast_buffers()

    def _broadcast_buffers(self) -> None:
        join = self._reducer.join
        # As .data: a buffer of batch norm that an earlier forward pass has saved for its
        # backward is not used there, and need not count as changed.
        buffers = [buffer.data for buffer in self.module.buffers()]
        root = join.leader if join is not None else 0
        try:
            broadcast_all_(buffers, self.backend, root, label="DDP's buffers, at a forward pass")
        except DistributedError as error:
            explain(error, UNANSWERED if self._reducer.unanswered else BEGINNING)
            raise

    # Of a ShardedOptimizer ------------------------------------------------------------------

    def deal(self, ranks: Mapping[nn.Parameter, int], key: object) -> None:
        for name, parameter in self.named_parameters():
            if parameter in ranks and parameter in self._sparse:
                problem = f"a ShardedOptimizer takes no sparse gradients, as {name} has"
                self._refuse(problem, UnsupportedOperationError)
        super().deal(ranks, key)
        if self.backend.world_size > 1:
            self._reducer.give_to({p: rank for p, (rank, _) in self.owners.items()})

    def other_parts(self) -> tuple[Backend | None, Iterable[nn.Parameter]]:
        """Return the ranks, if each has the gradients of parameters that it owns, and these."""
        return (self.backend, self.owners) if self.owners else super().other_parts()

    def before_step(self, optimizer: Optimizer) -> None:
        super().before_step(optimizer)
        self._reducer.check_averaged()

    # For the user ---------------------------------------------------------------------------

    def broadcast_parameters(self, root: int = 0) -> None:
        """Overwrite parameters and buffers with those of rank `root`, in place."""
        self.backend.check_rank(root, "root")
        tensors = [*self.module.parameters(), *self.module.buffers()]
        broadcast_all_(tensors, self.backend, root)

    def weighted(self, loss: Tensor, samples: float) -> Tensor:
        """Return the loss, a mean over this rank's `samples`, scaled to count with that weight.

            loss = F.cross_entropy(ddp(x), y)
            ddp.weighted(loss, len(x)).backward()

        The averaged gradients are then those of the joined batch, for any share of each rank.
        `samples` is the number behind the mean: rows, tokens, or a sum of weights. A rank
        with 0 of them contributes zeros, even if its loss is NaN; it runs forward and backward like
        the others (of an empty or any batch), or has left a `join` block.

        Called once a backward pass, on the whole loss, by every rank; under `no_sync`, too: there
        each micro-batch becomes a joined one. Blocks for one message of 16 bytes. Raises
        ValueError unless `samples` is finite and not negative.
        """
        count = checked_weight(samples, "weighted(loss, samples)")
        if isinstance(self._reducer.join, InStep):
            self._refuse("weighted() inside step(), whose losses are sums: step.backward(sum)")
        join = self._reducer.join or Join(self, self.backend)
        join.exchange(JoinPhase.WEIGHTING, count)
        factor = count * join.divisor / sum(join.samples) if count else 0.0
        return Scaled.apply(loss, factor, [self._reducer])  # type: ignore[no-any-return, no-untyped-call]

    @property
    def passes(self) -> Reducer:
        return self._reducer

    def answer(self, phase: JoinPhase, group: int = 0) -> None:
        """Take part, without a batch, in what other ranks do next."""
        if phase is JoinPhase.FORWARD:
            if self.broadcast_buffers:
                self._broadcast_buffers()
        elif phase is not JoinPhase.WEIGHTING:
            join = self._reducer.join
            over = join is not None and self.backend.rank not in join.active
            self._reducer.answer(phase, drop=over and not group)

    def begin_answers(self) -> None:
        self._reducer.begin_forward()

    def end_join(self, join: Join) -> None:
        self.broadcast_parameters(join.leader)

    @property
    def bytes_sent(self) -> int:
        """Bytes of gradients that this rank has sent so far, as rings and direct messages send
        them: 2(p-1)/p of all-reduced ones, p-1 times the gathered ones, (p-1)/p of exchanged
        ones, all of those of other owners. In shared memory ranks read them instead.
        """
        return self._averaging.bytes_sent

    @property
    def skipped_steps(self) -> int:
        """Number of steps that `skip_nonfinite` has skipped; the same on every rank."""
        return self._finite.skipped if self._finite is not None else 0

    @property
    def last_skip(self) -> Skip | None:
        """The last skipped step: its number, and by rank the parameter that was not finite."""
        return self._finite.last if self._finite is not None else None

    def sync_gradients(self) -> None:
        """Average gradients that were accumulated under `no_sync` and not averaged since.

        Blocks until they are; every rank has to call it. Does nothing if there are none: after
        an ordinary `backward()` all gradients are final.
        """
        self._reducer.catch_up()
