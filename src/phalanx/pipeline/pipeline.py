"""Pipeline: every rank has some of the layers, and each micro-batch passes through all of them.

    rank 0   F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
    rank 1   .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
    rank 2   .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .

The schedule that is drawn is 1F1B; all are in schedules.py.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from math import isnan, nan
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.collectives import all_gather, broadcast, chunk_ranges
from phalanx.core.backend import Backend
from phalanx.core.call import check_timeout
from phalanx.errors import (
    DistributedError,
    MisuseError,
    PeerLostError,
    RankStopped,
    SizeMismatchError,
)
from phalanx.parallel.compressor_state import with_versions
from phalanx.parallel.gradient_parts import mark_part
from phalanx.parallel.joined_step import checked_weight
from phalanx.parallel.sync_batch_norm import SyncBatchNorm
from phalanx.parallel.uneven import NothingCounts
from phalanx.parallel.wrapper import Wrapper
from phalanx.pipeline.handshake import NO_BATCH, Begun, check_same_plan, handshake, step_metadata
from phalanx.pipeline.plan import (
    PipelineParallelConfig,
    PipelinePlan,
    PipelineStage,
    check_averaging,
    make_plan,
    named_layers,
)
from phalanx.pipeline.schedules import SCHEDULES, ActionKind, PipelineBubble
from phalanx.pipeline.stage_p2p import Layouts, StageP2P, Tree, map_tensors
from phalanx.pipeline.step import PipelineStep, ReplicaStep

LossFunction = Callable[[Any, Any], Tensor]
Batch = tuple[Tree, Tree]
Weight = float | Tensor | None


class Pipeline(Wrapper):
    """Layers one after the other, cut into stages, one or more on each rank of `backend`.

        pipeline = Pipeline(layers, backend, PipelineParallelConfig(4, 16))
        optimizer = torch.optim.AdamW(pipeline.parameters())        # of this rank's layers
        for inputs, targets in batches:     # used on the first stage, and on the last
            optimizer.zero_grad()
            loss = pipeline.train_step(inputs, targets, loss_function)
            phalanx.clip_grad_norm_(pipeline, 1.0)                  # the norm over all stages
            optimizer.step()

    layers    all of them, on every rank: an nn.Sequential, or a list of modules. Only this rank's
              are kept, as `module`; the others are not touched, and may be on the meta device
    backend   the ranks; as many as the configuration has stages
    config    the cut of the layers, and the schedule
    stages    the layers of each stage, by default equally many (see `balance_stages`).
              Stage s is on rank s % p; with `zb_v`, stage p + n is on rank p - 1 - n
    replicas  the ranks with the same layers in other pipelines, if each step has a `weight`

    # Notes
    Losses and gradients are the plain model's up to rounding, with two exceptions of every
    pipeline: a batch norm sees micro-batches (its running statistics, too), and dropout draws on
    each rank from that rank's random state.

    `parameters()` are this rank's, under their names in the plain model: all ranks' `state_dict`s
    together are the plain model's, which each rank can load. A layer takes and gives a tensor on
    the CPU, or tuples, lists and dicts of tensors and None; shapes are sent once a kind of batch.

    Each stage has its own optimizer; losses are scaled by `GradScaler(backend)`; torch's norm, of
    one stage, is refused. `save_checkpoint(folder, model=pipeline, optimizer=optimizer, step=n)`
    writes the whole model's state, for any number of stages, and for a plain model.

    Raises on every rank `DesyncError` if the ranks have different pipelines,
    `UnsupportedOperationError` if layers on different ranks share a parameter.
    `InvalidWorldSizeError`, ValueError, TypeError or `MisuseError` for arguments that make no
    pipeline. Only the comparison of the arguments has been sent then.

    # On a mesh
    `Pipeline(layers, mesh["stage"], config)`, a part of the batch for each rank of `mesh["data"]`,
    and layers in DDP or FSDP over it, which average in each backward pass: each rank wraps all of
    its own that it trains; those of others may be wrapped or plain. Or after a step
    `all_reduce_coalesced_([p.grad for p in pipeline.parameters()], mesh["data"], ReduceOp.MEAN)`.
    For parts that are not equal pass `replicas=mesh["data"]`, and in each step a `weight`. Layers
    may also be cut over `mesh["tensor"]` by `parallelize`, on every rank alike. All ranks with the
    same part then save and load a checkpoint together: `backend=mesh["data", "stage"]`.
    """

    spreads = True

    def __init__(
        self,
        layers: nn.Sequential | Sequence[nn.Module],
        backend: Backend,
        config: PipelineParallelConfig,
        *,
        stages: Sequence[PipelineStage] | None = None,
        replicas: Backend | None = None,
    ) -> None:
        plan, own, averages, problem = PipelinePlan(), nn.Sequential(), 0, None
        outside: dict[str, nn.Parameter] = {}
        try:
            if not isinstance(config, PipelineParallelConfig):
                raise TypeError(f"config has to be a PipelineParallelConfig, not {config!r}")
            named = named_layers(layers)
            plan = make_plan(named, config, stages, backend.rank, backend.world_size)
            mine = [n for n, stage in enumerate(plan.stages) if stage.rank == backend.rank]
            names = [name for number in mine for name in plan.names_in(number)]
            own = nn.Sequential(OrderedDict((name, named[name]) for name in names))
            averages, outside = check_averaging(named, own, backend, replicas)
            place = None if replicas is None else (replicas.rank, replicas.world_size)
            plan = plan._replace(lines=[*plan.lines, f"replicas {place}"])
        except Exception as error:
            problem = error
        averages = check_same_plan(plan.lines, averages, problem, backend)
        super().__init__(own, backend)
        self._weighted, self._averages = replicas is not None, averages
        self._replicas = replicas or backend.subgroup([backend.rank])
        backend.bind(self._replicas)
        self._never_averaged = outside if averages or self._replicas.world_size > 1 else {}
        for part in own.modules():
            if isinstance(part, Wrapper) and part.averages and part.compression is not None:
                part.compression.waits_for_step = True
        self.config = config
        self._plan = plan
        self._layouts: Layouts = {}
        self._measured: tuple[float, float] | None = None
        self._peak = 0

    @property
    def stages(self) -> list[PipelineStage]:
        """All stages, p * v of them: the layers and the rank of each."""
        return list(self._plan.stages)

    @property
    def peak_activations(self) -> int:
        """The most micro-batches whose activations this rank held at one time in the last step.

        Counted for each chunk. With 1F1B it is the number of stages from this one on. If a backward
        pass is done in two parts, all activations are held until both are done.
        """
        return self._peak

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load this rank's layers; `state_dict` may be the whole model's."""
        others = tuple(f"{name}." for name in self._plan.names if name not in self.module._modules)
        own = {key: value for key, value in state_dict.items() if not key.startswith(others)}
        return super().load_state_dict(with_versions(own, state_dict), *args, **kwargs)

    def train_step(
        self,
        inputs: Tree,
        targets: Tree,
        loss: LossFunction,
        *,
        weight: Weight = None,
        timeout: float | None = None,
    ) -> Tensor:
        """Run forward and backward of one batch; return the mean loss, the same bits on every rank.

        inputs    the batch: a tensor, or tuples, lists and dicts of tensors, samples along dim 0.
                  Used on rank 0; others may give None
        targets   the same; used on the rank of the last stage: the last, with `zb_v` rank 0
        loss      loss(outputs, targets) -> the mean over the samples of a micro-batch; called on
                  the rank of the last stage. Micro-batches, of sizes that differ by one at most,
                  count by their samples. With a weight, the sum over the samples
        weight    of what counts in the batch, such as its tokens without padding; given on one rank
                  or more. Gradients, and the loss, in double precision, are those of (sum of all
                  losses) / (sum of all weights), the same on all `replicas`. With 0 this one adds
                  nothing: batch and loss may be None. A batch may have fewer samples than
                  micro-batches, unless there is FSDP
        timeout   seconds that this rank waits for a message at most; by default the backend's

        Gradients are added to `.grad` of this rank's parameters: zero them, and step the optimizer,
        yourself. Blocks until this rank's part is done; some ranks are done before others.
        Sends run while the rank computes: for each micro-batch the output of a stage once to the
        next, and its gradient once back; 48 bytes to begin the step together and 16 for the loss.
        Replicas agree on weights, in 16 bytes, and on the loss, in 8; DDP averages once a step.

        Raises on every rank, before anything else is sent: `SizeMismatchError` for fewer samples
        than micro-batches, and for batches that differ in size; `MisuseError`,
        `UnsupportedObjectError`, `DesyncError`; ValueError for a weight that is none, or if all are
        0. An error in a layer or the loss is raised unchanged on its rank; the others raise a
        `PeerLostError` at once, and the group is broken: messages may still be under way.
        """
        return self._train("train_step", (inputs, targets), loss, timeout, weight)

    @contextmanager
    def join(self, step: Callable[[], object]) -> Iterator[None]:
        """Let each of the `replicas` train in here on its own number of batches.

        step    whatever follows `train_step`, such as the optimizer's

        All ranks of a pipeline leave the block together, or there is a `DesyncError`. They take
        part in the steps of the others, with weight 0, and call `step` after each, until all have
        left. Raises `MisuseError` without `replicas`.
        """
        if not self._weighted:
            self._refuse("join() without replicas=, the ranks that have the others' batches")
        yield
        with suppress(NothingCounts):
            while True:
                self._train("join", (None, None), None, None, 0.0)
                step()

    def _train(self, call: str, *given: Any) -> Tensor:
        with self.backend.progress.one_step(self):
            step, result = self._run(call, *given)
        for parameter in self.parameters() if self.backend.world_size > 1 else ():
            mark_part(parameter)
        self._measured = step.busy, step.span
        self._peak = step.most_alive
        return result

    def evaluate(
        self, inputs: Tree, targets: Tree, loss: LossFunction, *, timeout: float | None = None
    ) -> Tensor:
        """Return the mean loss of one batch, as `train_step`, without gradients and in eval mode.

        Restores the modes afterwards. A batch with fewer samples than micro-batches is cut into as
        many micro-batches as it has samples.
        """
        modes = [(part, part.training) for part in self.module.modules()]
        self.module.eval()
        try:
            return self._run("evaluate", (inputs, targets), loss, timeout, None)[1]
        finally:
            for part, training in modes:
                part.training = training

    def pipeline_bubble(self) -> PipelineBubble:
        """Return the measured share of the last train_step in which ranks waited, and the theory.

        Every rank calls it. Costs a message of 16 bytes. It has a meaning only if ranks compute at
        the same time: not with more ranks than processors, nor in `simulate`, where they take
        turns. Raises `MisuseError` before the first step.
        """
        if self._measured is None:
            self._refuse("there is no train_step yet to measure the bubble of")
        mine = torch.tensor([self._measured], dtype=torch.float64)
        busy, span = all_gather(mine, self.backend).unbind(1)
        # The ranks begin a step together: the longest span is the step's.
        measured = 1 - busy.sum() / (self.backend.world_size * span.max())
        return PipelineBubble(float(measured), self.config.bubble)

    def forward(self, *_: object) -> None:
        """Raise `MisuseError`: a pipeline is not called, since a rank has only some layers."""
        problem = "it cannot be called, since this rank has only some of the layers: use "
        self._refuse(problem + "train_step or evaluate")

    def _run(
        self, call: str, batch: Batch, loss: LossFunction, timeout: float | None, weight: Weight
    ) -> tuple[PipelineStep, Tensor]:
        """Run a step; return the mean loss."""
        begin = partial(self._begin, call, batch, loss, timeout, weight)
        begun = None if self._weighted and call != "evaluate" else begin()
        if begun is not None and isnan(begun.weight):
            return self._passes(call, batch, loss, timeout, begun)
        with ReplicaStep(self, self._replicas, lambda: begun or begin()) as joined:
            step, _ = self._passes(call, batch, loss, timeout, joined.begun)
            joined.scaled = sum(step.losses)
        mean = torch.tensor(joined.loss, dtype=torch.float64)
        return step, broadcast(mean, self.backend, self._plan.stages[-1].rank)

    def _begin(
        self, call: str, batch: Batch, loss: LossFunction, timeout: float | None, weight: Weight
    ) -> Begun:
        """Begin a step together with the other ranks of this pipeline."""
        train, counts, given, problem = call != "evaluate", (NO_BATCH, NO_BATCH), nan, None
        try:
            if timeout is not None:
                check_timeout(timeout)
            if weight is not None:
                given = checked_weight(weight, "train_step()")
            if train:
                self._check_averaged(given)
            if given == 0 and any(isinstance(m, SyncBatchNorm) for m in self.modules()):
                raise MisuseError(
                    "weight 0 with a SyncBatchNorm, which needs all replicas' batches"
                )
            if given != 0:
                few = not train or (self._averages < 2 and (self._weighted or not isnan(given)))
                needed = 1 if few else self.config.num_micro_batches
                counts = self._samples(*batch, loss, needed)
        except Exception as error:
            problem = error
        used = self.backend.rank == 0 and problem is None and given != 0
        metadata = step_metadata(self.module, batch[0] if used else None)
        waits = timeout if problem is None else None
        return handshake(call, counts, metadata, given, problem, self.backend, timeout=waits)

    def _passes(
        self, call: str, batch: Batch, loss: LossFunction, timeout: float | None, begun: Begun
    ) -> tuple[PipelineStep, Tensor]:
        """Run this rank's passes; return the mean loss, unless it is that of all replicas."""
        config, backend, plan = self.config, self.backend, self._plan
        row, ranks, rank = SCHEDULES[config.schedule], [s.rank for s in plan.stages], backend.rank
        train, means, (inputs, targets) = call != "evaluate", isnan(begun.weight), batch
        m = min(config.num_micro_batches, samples := begun.samples)
        ranges = chunk_ranges(samples, m) if m else []
        sizes = [end - start for start, end in ranges]
        seconds = backend.timeout if timeout is None else timeout
        step = PipelineStep(
            plan,
            self.module,
            StageP2P(backend, self._layouts, begun.metadata, sizes, ranks, seconds),
            inputs=_micro_batches(inputs, ranges, "inputs") if rank == ranks[0] else [],
            targets=_micro_batches(targets, ranges, "targets") if rank == ranks[-1] else [],
            weights=[size / samples if means else begun.scale for size in sizes],
            loss=None if means else torch.tensor(nan),
            loss_function=loss,
            train=train,
            splits=row.passes == 3,
        )
        actions = row.generator(rank, backend.world_size, m, config.chunks) if m else iter(())
        try:
            return step, step.run([a for a in actions if train or a.kind is ActionKind.F])
        except RankStopped:
            raise
        except BaseException as error:
            self._fail_replicas(_told_to_all(error, rank, step.doing))
            raise

    def _fail_replicas(self, error: DistributedError) -> None:
        """Break the groups of the layers' wrappers: replicas may wait there for this rank."""
        backend, peer = self.backend, error.peer
        wrappers = [part for part in self.modules() if isinstance(part, Wrapper)]
        groups = dict.fromkeys(wrapper.backend for wrapper in wrappers)
        causes = [group.failure.culprit for group in groups if group.failure is not None]
        blamed = backend.rank if peer is None or peer >= backend.world_size else peer
        for group in groups:
            group.fail(error, culprit=causes[0] if causes else backend.ranks[blamed])

    def _check_averaged(self, weight: float) -> None:
        if self._averages and not (self._weighted or isnan(weight)):
            raise MisuseError("a weight is one of all replicas: name them, Pipeline(replicas=)")
        for name, parameter in self._never_averaged.items():
            if parameter.requires_grad:
                raise MisuseError(
                    f"{name} is trained outside of what averages gradients, such as DDP, and "
                    "other layers inside: its replicas would differ. Let each rank wrap all "
                    "layers of its own that it trains, or, without replicas=, no rank any"
                )

    def _samples(
        self, inputs: Tree, targets: Tree, loss: LossFunction, needed: int
    ) -> tuple[int, int]:
        """Return the numbers of samples of inputs and targets. Raise if a batch cannot be used."""
        rank, last = self.backend.rank, self._plan.stages[-1].rank
        given = (("inputs", inputs, 0), ("targets", targets, last))
        for name, tree, user in given:
            if tree is None and rank == user:
                raise MisuseError(f"there are no {name}, and this is the rank that uses them")
        if rank == last and not callable(loss):
            raise MisuseError(f"the loss has to be a function of outputs and targets, not {loss!r}")
        counts = [NO_BATCH if tree is None else _samples_in(tree, name) for name, tree, _ in given]
        for count in counts:
            if NO_BATCH < count < needed:
                raise SizeMismatchError(
                    f"a batch of {count} samples cannot be {needed} micro-batches: each needs a "
                    "sample. Give a larger batch, or leave the last one out (drop_last)"
                )
        return counts[0], counts[1]


def _told_to_all(error: BaseException, rank: int, doing: str) -> DistributedError:
    """Return the error for the ranks that wait; it names this rank's activity."""
    if isinstance(error, DistributedError):
        if not error.message.startswith("rank "):
            error.message = f"rank {rank}: {error.message}"
        error.message = f"{error.message.rstrip('.')}. Pipeline: rank {rank} was in {doing}"
        error.rank = rank
        return error
    text = f"rank {rank}: Pipeline: {doing} failed: {error!r}"
    if hasattr(error, "add_note"):  # since Python 3.11
        error.add_note(text)
    return PeerLostError(text, rank=rank, op="Pipeline")


def _samples_in(tree: Tree, name: str) -> int:
    """Return the number of samples in a batch: the length of its tensors' first dim.

    Raises `SizeMismatchError` if they differ, and for a batch without tensors;
    `UnsupportedObjectError` for other objects than tensors; `MisuseError` for the result of a
    computation that autograd has recorded, through which each micro-batch would go back once more.
    """
    lengths: dict[str, int] = {}

    def note(path: str, tensor: Tensor) -> None:
        if tensor.grad_fn is not None:
            raise MisuseError(
                f"{path} comes from a computation that autograd has recorded: detach() it, or put "
                "what computes it into the pipeline"
            )
        if tensor.ndim == 0:
            raise SizeMismatchError(f"{path} has no dim 0 to cut into micro-batches")
        lengths[path] = len(tensor)

    map_tensors(note, tree, name)
    if not lengths:
        raise SizeMismatchError(f"{name} has no tensor in it")
    if len(set(lengths.values())) > 1:
        each = ", ".join(f"{path} has {length}" for path, length in lengths.items())
        raise SizeMismatchError(f"the tensors of a batch have one number of samples, but {each}")
    return next(iter(lengths.values()))


def _micro_batches(tree: Tree, ranges: list[tuple[int, int]], name: str) -> list[Tree]:
    """Return the batch cut along dim 0: for each range its rows of every tensor, as views."""

    def rows(start: int, end: int) -> Tree:
        return map_tensors(lambda _, tensor: tensor[start:end], tree, name)

    return [rows(*run) for run in ranges]
