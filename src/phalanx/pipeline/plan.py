"""The plan of a pipeline: its configuration, the layers of each stage, and the costs of layers."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from copy import deepcopy
from fractions import Fraction
from functools import cache
from itertools import accumulate, chain, pairwise
from operator import index
from statistics import median
from time import perf_counter
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from phalanx.core.backend import Backend
from phalanx.errors import InvalidWorldSizeError, MisuseError, UnsupportedOperationError
from phalanx.parallel.guards import refuse
from phalanx.parallel.wrapper import Wrapper, named_plainly, slices_in, walk
from phalanx.pipeline.schedules import SCHEDULES, even_sizes
from phalanx.pipeline.stage_p2p import Tree, flatten, map_tensors
from phalanx.wire.control import learned

MOST_PASSES = 2**29  # each has a tag


class PipelineParallelConfig(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The cut of a model into a pipeline, and its schedule. The same on every rank.

    num_stages         p, number of ranks that share the layers. `Pipeline` checks that it is the
                       backend's world size; without a backend it gives `bubble`
    num_micro_batches  m, number of parts of a batch, such as 4 * num_stages: more, less bubble
    schedule           `gpipe`, `1f1b`, `interleaved_1f1b`, `zb_h1` or `zb_v`; `schedules.py`
                       compares them
    num_chunks         v, number of runs of layers on each rank: for `interleaved_1f1b` 2 or more,
                       by default 2; for `zb_v` 2; for the others 1

    Raises ValueError, or TypeError for arguments that are no numbers.
    """

    num_stages: int
    num_micro_batches: int
    schedule: str = "1f1b"
    num_chunks: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_stages", "num_micro_batches", "num_chunks"):
            value = getattr(self, name)
            if type(value) is not int and (value is not None or name != "num_chunks"):
                raise TypeError(f"{name} has to be a whole number, not {value!r}")
            if value is not None and value < 1:
                raise ValueError(f"{name} has to be 1 or more, not {value}")
        if self.schedule not in SCHEDULES:
            known = ", ".join(SCHEDULES)
            raise ValueError(f"there is no schedule {self.schedule!r}; there are {known}")
        row = SCHEDULES[self.schedule]
        if row.more_chunks and self.num_chunks == 1:
            raise ValueError(f"{self.schedule} needs 2 chunks or more; with 1 it is 1f1b")
        if not row.more_chunks and self.num_chunks not in (None, row.chunks):
            number = f"{row.chunks} chunk{'s' if row.chunks > 1 else ''}"
            raise ValueError(
                f"{self.schedule} has {number} on each rank, not {self.num_chunks}; "
                "interleaved_1f1b may have any number from 2 on"
            )
        if self.chunks * self.num_stages * self.num_micro_batches > MOST_PASSES:
            raise ValueError(f"stages x chunks x micro-batches may be {MOST_PASSES:,} at most")

    @property
    def chunks(self) -> int:
        """Number of runs of layers on each rank: `num_chunks`, or the schedule's default."""
        return self.num_chunks or SCHEDULES[self.schedule].chunks

    @property
    def bubble(self) -> float:
        """The share of the time in which ranks wait, in theory: (p-1) / (v m + p-1) with 1F1B.

        It assumes stages that take equally long and messages that take no time.
        """
        row = SCHEDULES[self.schedule]
        return row.bubble(self.num_stages, self.num_micro_batches, self.chunks)

    def to_json(self) -> str:
        """Return it as JSON, without fields that have their defaults."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> PipelineParallelConfig:
        """Return the config in JSON. Raise ValueError for other text, or impossible fields."""
        return msgspec.json.decode(text, type=learned(cls))


# ------------------------------------------------------------------------------
# How layers are cut into stages: by equal numbers of layers, or by equal costs.


class PipelineStage(NamedTuple):
    """The layers [start_layer, end_layer), and their rank."""

    start_layer: int
    end_layer: int
    rank: int


def split_into_stages(num_layers: int, num_stages: int) -> list[PipelineStage]:
    """Cut layers into stages one after the other, of sizes that differ by at most one.

        split_into_stages(7, 3)      [0, 3) on rank 0, [3, 5) on rank 1, [5, 7) on rank 2

    The larger stages come first. Raises ValueError for no stages, and for more than layers.
    """
    num_layers, num_stages = index(num_layers), index(num_stages)
    _check_number(num_layers, num_stages)
    return _stages([0, *accumulate(even_sizes(num_layers, num_stages))])


def balance_stages(costs: Sequence[float], num_stages: int) -> list[PipelineStage]:
    """Cut layers into stages such that the largest cost of a stage is as small as possible.

    costs        of each layer, in any unit, 0 or more: seconds (see `measure_layer_costs`), FLOPs,
                 bytes of parameters

        balance_stages([1, 1, 1, 3], 2)      [0, 3) on rank 0, [3, 4) on rank 1

    A pipeline is as fast as its slowest stage. No stage is empty. Of several such splits this gives
    the one whose stages differ least (the sum of squares), and of those the one with the larger
    first: equal costs are split as by `split_into_stages`. Exact for floats, too; about n * n
    operations for n layers. Raises ValueError as that, and for a cost below 0 or not finite.
    """
    _check_number(len(costs), num_stages)
    for layer, cost in enumerate(costs):
        if not (math.isfinite(cost) and cost >= 0):
            raise ValueError(f"the cost of layer {layer} is {cost!r}; it has to be 0 or more")
    exact = [Fraction(cost) for cost in costs]
    scale = math.lcm(*(cost.denominator for cost in exact))  # sums of whole numbers are exact
    upto = [0, *accumulate(int(cost * scale) for cost in exact)]
    most = _smallest_maximum(upto, num_stages)
    n = len(costs)

    @cache
    def best(start: int, stages: int) -> tuple[float, int]:
        """Return the least sum of squares of the layers from `start` on, and the end of its first
        stage.

        It is infinite if these layers cannot be so many stages.
        """
        if stages == 1:
            total = upto[n] - upto[start]
            return (total * total if total <= most else math.inf), n
        least, first_end = math.inf, n
        furthest = min(bisect_right(upto, upto[start] + most) - 1, n - stages + 1)
        for end in range(furthest, start, -1):  # the longest first, which wins a tie
            rest, _ = best(end, stages - 1)
            if rest == math.inf:
                break  # a shorter stage leaves even more to the others
            squares = (upto[end] - upto[start]) ** 2 + rest
            if squares < least:
                least, first_end = squares, end
        return least, first_end

    ends = [0]
    for stages in range(num_stages, 0, -1):
        ends.append(best(ends[-1], stages)[1])
    return _stages(ends)


def _check_number(num_layers: int, num_stages: int) -> None:
    if num_stages < 1:
        raise ValueError(f"there have to be 1 or more stages, not {num_stages}")
    if num_stages > num_layers:
        raise ValueError(
            f"{num_layers} layers cannot be {num_stages} stages: each needs a layer. Use fewer "
            "stages, or fewer chunks on each"
        )


def _stages(ends: list[int]) -> list[PipelineStage]:
    return [PipelineStage(start, end, rank) for rank, (start, end) in enumerate(pairwise(ends))]


def _smallest_maximum(upto: list[int], num_stages: int) -> int:
    """Return the least possible cost of the largest of `num_stages` stages, by bisection."""

    def fits(most: int) -> bool:
        start = 0
        for _ in range(num_stages):
            start = bisect_right(upto, upto[start] + most) - 1
        return start == len(upto) - 1

    low, high = 0, upto[-1]
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low


# ------------------------------------------------------------------------------


class PipelinePlan(NamedTuple):
    """The layers of each stage; the same on every rank.

    names    of all layers, in their order
    stages   p * v of them, each with its layers and its rank
    lines    a description of the pipeline, for comparison with other ranks
    """

    names: tuple[str, ...] = ()
    stages: tuple[PipelineStage, ...] = ()
    lines: Sequence[str] = ()

    def names_in(self, stage: int) -> tuple[str, ...]:
        """Return the names of a stage's layers."""
        start, end, _ = self.stages[stage]
        return self.names[start:end]

    def describe_stage(self, stage: int) -> str:
        """Return a stage for a message: `stage 1 (layers 4 to 7)`."""
        names = self.names_in(stage)
        which = f"layer {names[0]}" if len(names) == 1 else f"layers {names[0]} to {names[-1]}"
        return f"stage {stage} ({which})"


def named_layers(layers: nn.Sequential | Sequence[nn.Module]) -> dict[str, nn.Module]:
    """Return the layers by their names: a container's own, or else their numbers."""
    if isinstance(layers, (nn.Sequential, nn.ModuleList)):
        pairs = [(name, layer) for name, layer in layers._modules.items()]  # repeated ones, too
    elif isinstance(layers, nn.Module) or not isinstance(layers, Sequence):
        raise TypeError(
            f"layers have to be an nn.Sequential or a list of modules, not a "
            f"{type(layers).__qualname__}: a pipeline runs them one after the other"
        )
    else:
        pairs = [(str(number), layer) for number, layer in enumerate(layers)]
    for name, layer in pairs:
        if not isinstance(layer, nn.Module):
            raise TypeError(f"layer {name} is a {type(layer).__qualname__}, not an nn.Module")
    return {name: layer for name, layer in pairs if layer is not None}


def make_plan(
    layers: dict[str, nn.Module],
    config: PipelineParallelConfig,
    stages: Sequence[PipelineStage] | None,
    rank: int,
    world_size: int,
) -> PipelinePlan:
    """Assign layers to stages, and stages to ranks.

    Raises `InvalidWorldSizeError` unless there are as many ranks as stages in the configuration,
    ValueError for layers that cannot be cut up so. `UnsupportedOperationError` for parameters that
    ranks would share, `MisuseError` for layers of this rank on the meta device.
    """
    p, count = config.num_stages, config.num_stages * config.chunks
    if p != world_size:
        raise InvalidWorldSizeError(
            f"rank {rank}: the configuration has {p} stages, the backend {world_size} ranks: each "
            "rank is one. For more ranks give each pipeline a subgroup of them",
            rank=rank,
        )
    if stages is None:
        stages = split_into_stages(len(layers), count)
    else:
        _check_stages(stages, len(layers), count)
    lines = [
        *(f"layer {name}: {_describe(layer)}" for name, layer in layers.items()),
        f"num_micro_batches={config.num_micro_batches}",
        f"schedule={config.schedule!r}",
        f"num_chunks={config.chunks}",
        f"stages {[tuple(stage[:2]) for stage in stages]}",
    ]
    rank_of = SCHEDULES[config.schedule].rank_of
    on_ranks = tuple(stage._replace(rank=rank_of(n, p)) for n, stage in enumerate(stages))
    plan = PipelinePlan(tuple(layers), on_ranks, lines)
    _check_parameters(plan, layers, rank)
    return plan


def _check_stages(stages: Sequence[PipelineStage], num_layers: int, count: int) -> None:
    if not isinstance(stages, Sequence) or not all(isinstance(s, PipelineStage) for s in stages):
        raise TypeError(
            "stages have to be a list of PipelineStage(start_layer, end_layer, rank), such as "
            f"balance_stages gives, not {stages!r}"
        )
    if len(stages) != count:
        raise ValueError(f"{count} stages are needed (ranks x chunks), {len(stages)} were given")
    start = 0
    for number, stage in enumerate(stages):
        if stage.start_layer != start or stage.end_layer <= start:
            raise ValueError(
                f"stage {number} has to begin with layer {start} and have a layer or more, not to "
                f"be [{stage.start_layer}, {stage.end_layer})"
            )
        start = stage.end_layer
    if start != num_layers:
        raise ValueError(f"the stages end with layer {start} of {num_layers}")


def _describe(layer: nn.Module) -> str:
    """Describe a layer for a comparison, as the plain model has it: ranks may differ in wrappers,
    in frozen parameters, and in devices.
    """
    slices = slices_in(layer)
    shapes = [
        f"{name} {str(p.dtype).removeprefix('torch.')} "
        + ("lazy" if is_lazy(p) else str(list(slices[p].shape if p in slices else p.shape)))
        for name, p in named_plainly(layer, "_parameters")
    ]
    plain = next(part for _, part in walk(layer) if not isinstance(part, Wrapper))
    return f"{type(plain).__qualname__}({', '.join(shapes)})"


def _check_parameters(plan: PipelinePlan, layers: dict[str, nn.Module], rank: int) -> None:
    """Raise for a parameter that two ranks would train, or that is not in this rank's memory."""
    first: dict[nn.Parameter, tuple[int, str]] = {}
    placed = [(n, name) for n in range(len(plan.stages)) for name in plan.names_in(n)]
    for number, name in placed:
        owner = plan.stages[number].rank
        for key, parameter in layers[name].named_parameters(remove_duplicate=False):
            other, other_name = first.setdefault(parameter, (owner, f"{name}.{key}"))
            if other != owner:
                raise UnsupportedOperationError(
                    f"{other_name} on rank {other} and {name}.{key} on rank {owner} are one "
                    "parameter, and a pipeline would train two: put both layers on one rank "
                    "(`stages=`), or give each its own",
                    rank=other,
                    peer=owner,
                    op="Pipeline",
                )
    for number, name in placed:
        layer, is_mine = layers[name], plan.stages[number].rank == rank
        for key, tensor in chain(layer.named_parameters(), layer.named_buffers()):
            if is_mine and tensor.is_meta:
                raise MisuseError(
                    f"rank {rank}: {name}.{key} is on the meta device, and this rank trains "
                    f"{plan.describe_stage(number)}: build those layers for real here",
                    rank=rank,
                    op="Pipeline",
                )


def check_averaging(
    layers: Mapping[str, nn.Module],
    own: nn.Sequential,
    backend: Backend,
    replicas: Backend | None,
) -> tuple[int, dict[str, nn.Parameter]]:
    """Return 1 if layers are in wrappers that average, 2 if in each micro-batch, as FSDP, else 0;
    and the parameters of `own` outside.

    Raises `MisuseError` if one of `own`, this rank's layers, averages with another stage, or with
    others than the replicas, or skips non-finite gradients, which it would do for one micro-batch
    in one stage.
    """

    def averaging(layer: nn.Module) -> list[Wrapper]:
        return [part for part in layer.modules() if isinstance(part, Wrapper) and part.averages]

    inside: set[nn.Parameter] = set()
    for name, wrapper in ((n, w) for n, layer in own.named_children() for w in averaging(layer)):
        inside.update(wrapper.parameters())
        what = f"layer {name} is in {type(wrapper).__name__}"
        shared = set(wrapper.backend.ranks) & set(backend.ranks)
        if wrapper.backend.engine is backend.engine and len(shared) > 1:
            what += " over ranks that train other layers: wrap it over those that have the same "
            refuse("Pipeline", backend.rank, what + 'stage, such as mesh["data"]')
        if getattr(wrapper, "_finite", None) is not None:
            what += " with skip_nonfinite, which would leave out a micro-batch in one stage only: "
            refuse("Pipeline", backend.rank, what + "let phalanx.GradScaler skip the whole step")
        other = wrapper.optimizers_apart or wrapper.backend is not replicas
        if replicas is not None and other:
            refuse("Pipeline", backend.rank, what + ", and not in DDP or FSDP over replicas=")
    wrappers = [wrapper for layer in layers.values() for wrapper in averaging(layer)]
    kinds = [getattr(w, "in_rounds", 0) + 1 for w in wrappers if w.backend.world_size > 1]
    return max(kinds, default=0), {
        name: p for name, p in named_plainly(own, "_parameters") if p not in inside
    }


def measure_layer_costs(
    layers: nn.Sequential | Sequence[nn.Module], inputs: Tree, *, repeats: int = 3
) -> list[float]:
    """Measure the seconds of a forward and a backward pass through each layer.

    inputs    of the first layer, such as a micro-batch
    repeats   number of measurements, besides a first one that does not count; of these the
              median is taken

    The costs are for `balance_stages`. Layers are copied, one at a time: none of their gradients,
    buffers or random states changes. Ranks measure differently, and have to cut alike:
    `broadcast_object` the costs of one.
    """

    def with_grad(_: str, tensor: Tensor) -> Tensor:  # a copy that may be changed in place
        copy = tensor.detach().clone()
        if copy.is_floating_point() or copy.is_complex():
            return copy.requires_grad_().clone()
        return copy

    costs = []
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        for layer in named_layers(layers).values():
            copied = deepcopy(layer)
            times = []
            for _ in range(repeats + 1):
                given = map_tensors(with_grad, inputs, "inputs")
                began = perf_counter()
                outputs = copied(given)
                results = [t for t in flatten(outputs, "outputs")[1] if t.requires_grad]
                torch.autograd.backward(results, [torch.ones_like(t) for t in results])
                times.append(perf_counter() - began)
            costs.append(median(times[1:]))
            inputs = map_tensors(lambda _, tensor: tensor.detach(), outputs, "outputs")
    return costs
