"""The plan of a pipeline: which layers are which stage, and whether they can be."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from torch import nn

from phalanx.errors import InvalidWorldSizeError, MisuseError, UnsupportedOperationError

from .config import PipelineParallelConfig
from .split import PipelineStage, split_into_stages

__all__ = ["Plan", "make_plan"]


class Plan(NamedTuple):
    """The same on every rank.

    names    of all layers, in their order
    stages   p * v of them, each with its layers and its rank
    lines    what it is, for comparison with other ranks
    """

    names: tuple[str, ...]
    stages: tuple[PipelineStage, ...]
    lines: list[str]

    def names_in(self, stage: int) -> tuple[str, ...]:
        """The names of a stage's layers."""
        start, end, _ = self.stages[stage]
        return self.names[start:end]

    def of_rank(self, rank: int) -> list[int]:
        """The numbers of a rank's stages: its chunks."""
        return [number for number, stage in enumerate(self.stages) if stage.rank == rank]

    def words_for(self, stage: int) -> str:
        """A stage for a message: `stage 1 (layers 4 to 7)`."""
        names = self.names_in(stage)
        which = f"layer {names[0]}" if len(names) == 1 else f"layers {names[0]} to {names[-1]}"
        return f"stage {stage} ({which})"


def named_layers(layers: nn.Sequential | Sequence[nn.Module]) -> dict[str, nn.Module]:
    """The layers by their names: a container's own, or else their numbers."""
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
) -> Plan:
    """Decide which layers are which stage.

    Raises `InvalidWorldSizeError` for another number of ranks than the configuration's stages,
    ValueError for layers that cannot be cut up so, `UnsupportedOperationError` for parameters that
    ranks would share, `MisuseError` for layers of this rank on the meta device.
    """
    p, count = config.num_stages, config.num_stages * config.chunks
    if p != world_size:
        raise InvalidWorldSizeError(
            f"rank {rank}: the configuration has {p} stages, the backend {world_size} ranks: each "
            "rank is one. For more ranks give each pipeline a subgroup of them",
            rank=rank,
        )
    cuts = (
        split_into_stages(len(layers), count)
        if stages is None
        else _checked(stages, len(layers), count)
    )
    plan = Plan(
        tuple(layers),
        tuple(cut._replace(rank=number % p) for number, cut in enumerate(cuts)),
        [
            *(_description(name, layer) for name, layer in layers.items()),
            f"num_micro_batches={config.num_micro_batches}",
            f"schedule={config.schedule!r}",
            f"num_chunks={config.chunks}",
            f"stages {[tuple(cut[:2]) for cut in cuts]}",
        ],
    )
    _check_not_shared(plan, layers)
    _check_is_real(plan, layers, rank)
    return plan


def _checked(
    stages: Sequence[PipelineStage], num_layers: int, count: int
) -> Sequence[PipelineStage]:
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
    return stages


def _description(name: str, layer: nn.Module) -> str:
    """A layer for a comparison. Whether it is frozen, and where it lies, each rank may decide."""
    shapes = [
        f"{key} {str(p.dtype).removeprefix('torch.')} "
        + ("lazy" if nn.parameter.is_lazy(p) else str(list(p.shape)))
        for key, p in layer.named_parameters()
    ]
    return f"layer {name}: {type(layer).__qualname__}({', '.join(shapes)})"


def _check_not_shared(plan: Plan, layers: dict[str, nn.Module]) -> None:
    """A parameter in layers of two ranks would be two, which drift apart."""
    seen: dict[nn.Parameter, tuple[int, str]] = {}
    for number, stage in enumerate(plan.stages):
        for name in plan.names_in(number):
            for key, parameter in layers[name].named_parameters(remove_duplicate=False):
                rank, first = seen.setdefault(parameter, (stage.rank, f"{name}.{key}"))
                if rank != stage.rank:
                    raise UnsupportedOperationError(
                        f"{first} on rank {rank} and {name}.{key} on rank {stage.rank} are one "
                        "parameter, and a pipeline would train two: put both layers on one rank "
                        "(`stages=`), or give each its own",
                        rank=rank,
                        peer=stage.rank,
                        op="Pipeline",
                    )


def _check_is_real(plan: Plan, layers: dict[str, nn.Module], rank: int) -> None:
    for number in plan.of_rank(rank):
        for name in plan.names_in(number):
            layer = layers[name]
            for key, tensor in chain(layer.named_parameters(), layer.named_buffers()):
                if tensor.is_meta:
                    raise MisuseError(
                        f"rank {rank}: {name}.{key} is on the meta device, and this rank trains "
                        f"{plan.words_for(number)}: build those layers for real here",
                        rank=rank,
                        op="Pipeline",
                    )
