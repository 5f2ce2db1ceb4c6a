"""Planted faults: each undoes what a wrapper has to do, and a cell of the table has to find it.

A fault is a name, a cell that is right without it, and what is put in the place of what.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

import phalanx
import phalanx.checkpoint.load
import phalanx.compression
import phalanx.fsdp.flat_param
import phalanx.fsdp.gradients
import phalanx.parallel.local_sgd.outer
import phalanx.parallel.local_sgd.periodic
import phalanx.parallel.norms
import phalanx.parallel.sync_batch_norm
import phalanx.pipeline.pipeline
import phalanx.tensor.functions


class Fault(NamedTuple):
    """What is wrong, and the cell that finds it.

    where   what has the attribute: a class or a module; None: every module of the package
    instead makes what is put there, of what is there
    """

    name: str
    way: str
    feature: str
    where: Any
    attribute: str
    instead: Callable[[Any], Any]

    @contextmanager
    def planted(self) -> Iterator[None]:
        """In here it is wrong."""
        places = [self.where] if self.where is not None else _modules_with(self.attribute)
        before = [vars(place)[self.attribute] for place in places]
        for place, value in zip(places, before, strict=True):
            setattr(place, self.attribute, self.instead(value))
        try:
            yield
        finally:
            for place, value in zip(places, before, strict=True):
                setattr(place, self.attribute, value)


def _modules_with(attribute: str) -> list[Any]:
    """The modules of the package that have an attribute; at least one."""
    names = [name for name in sorted(sys.modules) if name.startswith("phalanx.")]
    found = [sys.modules[name] for name in names if attribute in vars(sys.modules[name])]
    assert found, f"no module has {attribute}: what is wrong then is not known any more"
    return found


def nothing(_: Any) -> Any:
    return lambda *given, **options: None


def given_back(_: Any) -> Any:
    """A collective that returns what it was given."""
    return lambda tensor, *given, **options: tensor.clone()


def own_part_only(_: Any) -> Any:
    """An all_gather of this rank's part, as often as there are ranks."""

    def gather(tensor: torch.Tensor, backend: phalanx.Backend, **options: Any) -> torch.Tensor:
        return torch.cat([tensor] * backend.world_size)

    return gather


def counts_twice(no_sync: Any) -> Any:
    @contextmanager
    def twice(self: Any) -> Iterator[None]:
        with no_sync(self):
            yield
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(2)

    return twice


def of_all_ranks(join: Any) -> Any:
    return lambda self, step=None, **options: join(self, step, divide_by_initial_world_size=True)


def same_places(places: Any) -> Any:
    """What is drawn first is drawn again."""
    return lambda self, flat, draw, shards: places(self, flat, 0, shards)


def unaveraged(_: Any) -> Any:
    return lambda self, mean: self._means.append(mean)


def halved(average: Any) -> Any:
    return lambda self, mean: average(self, mean.mul_(0.5))


def overwrites(_: Any) -> Any:
    def finalize(self: Any, used: Any, scale: float = 1.0) -> list[Any]:
        means, self._means, self.used = self._means, [], set()
        for mean in means:
            for p, part in zip(self.flat.parameters, self.flat.split_shard(mean), strict=True):
                p.grad = part
        return list(self.flat.parameters) if means else []

    return finalize


def used_here(finalize: Any) -> Any:
    """A gradient is there if this rank has used the parameter."""
    return lambda self, used, *scale: finalize(self, [n in self.used for n, _ in enumerate(used)])


def once(convert: Any) -> Any:
    """Shards are converted to the dtype that is computed in, and never again."""

    def first(self: Any) -> None:
        if not hasattr(self, "_converted"):
            self._converted = True
            convert(self)

    return first


def forgets(sync: Any) -> Any:
    def forgetful(self: Any, *given: Any, **options: Any) -> Any:
        self.optimizer.state.clear()
        return sync(self, *given, **options)

    return forgetful


def equal_weights(step: Any) -> Any:
    return lambda *given, weights, **options: step(*given, weights=[1.0] * len(weights), **options)


def loads_nothing(_: Any) -> Any:
    return lambda *given: iter([[]])


def unweighted(_: Any) -> Any:
    return lambda self, loss, samples: loss


def of_torch(_: Any) -> Any:
    return torch.amp.GradScaler._unscale_grads_


def told_here(_: Any) -> Any:
    return lambda self: self._told


def ones(_: Any) -> Any:
    return lambda self, weight, count: 1.0


STEP = phalanx.parallel.joined_step.JoinedStep
WRAPPER = phalanx.parallel.joined_step.AveragingWrapper
DDP, SCALER, FEEDBACK = phalanx.DDP, phalanx.GradScaler, phalanx.ErrorFeedback
GRADIENTS = phalanx.fsdp.gradients.FlatGradient
FLAT = phalanx.fsdp.flat_param.FlatParameter
PERIODIC = phalanx.parallel.local_sgd.periodic.PeriodicSync
OUTER = phalanx.parallel.local_sgd.outer.OuterStep
BATCH_NORM = phalanx.parallel.sync_batch_norm
NORMS = phalanx.parallel.norms
PIPELINE = phalanx.pipeline.pipeline
TENSOR = phalanx.tensor.functions
LOAD = phalanx.checkpoint.load
RANDOM_K = phalanx.compression.RandomK
HALVED = GRADIENTS, "_average", halved
SKIPS, CLIPS = "GradScaler, a step skipped", "clip_grad_norm_"
FAULTS = [
    Fault(*row)
    for row in (
        ("rank 0's parameters are not sent", "DDP", "plain", DDP, "broadcast_parameters", nothing),
        ("a buffer is not sent", "DDP", "buffers", DDP, "_broadcast_buffers", nothing),
        ("what was accumulated counts twice", "DDP", "no_sync", WRAPPER, "no_sync", counts_twice),
        ("a batch's size does not count", "DDP", "weighted", DDP, "weighted", unweighted),
        ("a step counts its micro-batches alike", "FULL_SHARD", "step", STEP, "_checked", ones),
        ("ranks without a batch count", "DDP", "join", WRAPPER, "join", of_all_ranks),
        ("a residual is dropped", "DDP", "TopK", FEEDBACK, "store_residual", nothing),
        (
            "a residual is dropped on the way to a shard",
            "FULL_SHARD",
            "TopK",
            FEEDBACK,
            "store_residual",
            nothing,
        ),
        ("the same values are left out again", "DDP", "RandomK", RANDOM_K, "_places", same_places),
        ("gradients of autocast have another factor", "hybrid", "autocast", *HALVED),
        (
            "the scaler skips on one rank only",
            "FULL_SHARD",
            SKIPS,
            SCALER,
            "_unscale_grads_",
            of_torch,
        ),
        ("the scaler skips on one stage only", "1F1B", SKIPS, SCALER, "_unscale_grads_", of_torch),
        ("the norm is that of one shard", "FULL_SHARD", CLIPS, NORMS, "all_reduce", given_back),
        ("the norm is that of one stage", "1F1B", CLIPS, NORMS, "all_reduce", given_back),
        ("replicas are not averaged", "hybrid", "plain", GRADIENTS, "_average", unaveraged),
        ("the mean over replicas has another factor", "hybrid", "plain", *HALVED),
        (
            "a second pass overwrites the first",
            "FULL_SHARD",
            "two passes",
            GRADIENTS,
            "finalize",
            overwrites,
        ),
        (
            "a gradient is dropped where a rank has none",
            "FULL_SHARD",
            "unused in a group",
            GRADIENTS,
            "finalize",
            used_here,
        ),
        (
            "unsharded parameters are those of before the step",
            "FULL_SHARD",
            "mixed_precision",
            FLAT,
            "convert",
            once,
        ),
        ("a sync does nothing", "LocalSGD", "plain", PERIODIC, "_take_mean", nothing),
        ("a sync leaves buffers alone", "LocalSGD", "buffers", PERIODIC, "_sync_buffers", nothing),
        (
            "what each rank has is not loaded",
            "LocalSGD",
            "checkpoint",
            PERIODIC,
            "load_own_state",
            nothing,
        ),
        ("the outer momentum is lost", "DiLoCo", "plain", OUTER, "sync", forgets),
        (
            "statistics are those of one rank",
            "DDP",
            "SyncBatchNorm",
            BATCH_NORM,
            "all_gather",
            own_part_only,
        ),
        ("micro-batches add up", "1F1B", "plain", PIPELINE, "PipelineStep", equal_weights),
        ("parts of a sum are not added", "tensor", "plain", TENSOR, "all_reduce", given_back),
        (
            "the optimizer's state is not loaded",
            "FULL_SHARD",
            "checkpoint",
            LOAD,
            "into_optimizer",
            loads_nothing,
        ),
        ("a notice is heard on one rank", "DDP", "Notice", phalanx.Notice, "given", told_here),
    )
]
