"""Whether a checkpoint fits a model and an optimizer, and what this rank has to read of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from phalanx.checkpoint.manifest import Json, Manifest, OptimizerRecord, StateRecord, tensors_in
from phalanx.checkpoint.state import ModelState, ParameterShard, named_groups, path_of
from phalanx.checkpoint.tensor_files import Reader
from phalanx.errors import CheckpointMismatchError
from phalanx.parallel.wrapper import Slice

_SHOWN = 8


class LoadedState(NamedTuple):
    """State for a parameter under one key: a flat tensor of its shape, or a value as JSON."""

    flat: Tensor | None
    value: Json


class LoadPlan:
    """What to load into what. Planning changes nothing, and requests tensors from the reader.

    tensors   of the model, each with its new elements, flat
    values    of modules, as JSON
    options   of each parameter group, as JSON; None for a group without parameters
    state     of each parameter, by key
    shared    state of the optimizer that belongs to no parameter, as JSON
    unused    names in the checkpoint that the model and the optimizer of this rank do not have

    Raises `CheckpointMismatchError`, naming what is missing or has another shape or dtype.
    """

    def __init__(
        self,
        manifest: Manifest,
        reader: Reader,
        model: ModelState | None,
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        self.tensors: list[tuple[Tensor, Tensor]] = []
        self.values: list[tuple[nn.Module, Json]] = []
        self.options: list[Json] = []
        self.state: list[tuple[Tensor, dict[str, LoadedState]]] = []
        self.shared: Json = None
        self.unused: list[str] = []
        self._manifest = manifest
        self._reader = reader
        if model is not None:
            self._plan_model(model)
            if optimizer is not None:
                self._plan_optimizer(optimizer, model)

    def _plan_model(self, model: ModelState) -> None:
        manifest = self._manifest
        here = dict(model.parameters)
        for name, buffer in model.buffers.items():
            here[name] = ParameterShard(buffer, Slice.whole(tuple(buffer.shape)))
        there = {name: manifest.aliases.get(name, name) for name in here}
        missing = [name for name in here if there[name] not in manifest.model]
        missing += [key for key in model.stateful if key not in manifest.values]
        if missing:
            raise CheckpointMismatchError(
                f"it has no {shown(missing)}, which the model has: load it into the model that was "
                "saved"
            )
        wrong = []
        for name, shard in here.items():
            record = manifest.model[there[name]]
            dtype = str(shard.tensor.dtype).removeprefix("torch.")
            if (record.dtype, record.shape) != (dtype, shard.slice.shape):
                wrong.append(
                    f"{name} is {record.dtype} {list(record.shape)} there and {dtype} "
                    f"{list(shard.slice.shape)} here"
                )
        if wrong:
            raise CheckpointMismatchError(f"it is of another model: {shown(wrong)}")
        for name, shard in here.items():
            flat = self._reader.part(
                manifest.model[there[name]], shard.slice.start, shard.slice.stop
            )
            self.tensors.append((shard.tensor, flat))
        for key, module in model.stateful.items():
            self.values.append((module, self._requested(manifest.values[key])))
        used = set(there.values())
        self.unused += [name for name in manifest.model if name not in used]
        self.unused += [key for key in manifest.values if key not in model.stateful]

    def _plan_optimizer(self, optimizer: torch.optim.Optimizer, model: ModelState) -> None:
        manifest, saved = self._manifest, self._manifest.optimizer
        if saved is None:
            raise CheckpointMismatchError("it was saved without an optimizer: load it without one")
        groups = named_groups(optimizer, model.parameters)
        if type(optimizer).__name__ != saved.kind:
            raise CheckpointMismatchError(
                f"its optimizer is {saved.kind}, and the one here {type(optimizer).__name__}: load "
                "it without the optimizer"
            )
        group_of = {name: at for at, group in enumerate(saved.groups) for name in group.parameters}
        there = {
            name: name if name in group_of else manifest.aliases.get(name, name)
            for group in groups
            for name in group
        }
        missing = [name for name, stored in there.items() if stored not in group_of]
        if missing:
            raise CheckpointMismatchError(
                f"its optimizer has no {shown(missing)}, which the optimizer here has"
            )
        for number, group in enumerate(groups):
            places = [(name, group_of[there[name]]) for name in group]
            self.options.append(self._requested(_options_of(number, places, saved)))
            for name, parameter in group.items():
                shard = model.parameters[name]
                state = {}
                for key, record in saved.state.get(there[name], {}).items():
                    of_rank = shard.name_of(path_of(there[name], key))
                    apart = bool(record.tensor) and of_rank in manifest.state
                    mine = StateRecord(tensor=of_rank) if apart else record
                    state[key] = self._plan_state(name, key, mine, shard)
                self.state.append((parameter, state))
        self.shared = self._requested(saved.shared)
        used = set(there.values())
        self.unused += [f"the optimizer's {name}" for name in group_of if name not in used]

    def _plan_state(
        self, name: str, key: str, record: StateRecord, shard: ParameterShard
    ) -> LoadedState:
        here = (shard.slice.start, shard.slice.stop)
        if record.tensor:
            tensor = self._reader.record(record.tensor)
            if tensor.shape != shard.slice.shape:
                raise CheckpointMismatchError(
                    f"the optimizer's {key} of {name} has shape {list(tensor.shape)} there, and "
                    f"the parameter {list(shard.slice.shape)} here"
                )
            return LoadedState(self._reader.part(tensor, *here), None)
        if not record.own:
            return LoadedState(None, self._requested(record.value))
        for own in record.own:
            if (own.start, own.stop) == here:
                return LoadedState(None, self._requested(own.value))
        parts = shown([f"{each.start}:{each.stop}" for each in record.own])
        raise CheckpointMismatchError(
            f"the optimizer's {key} of {name} cannot be cut otherwise than it was: it was saved "
            f"for elements {parts}, and this rank has {here[0]}:{here[1]}. Load it with the number "
            "of ranks and the strategy that it was saved with, or without the optimizer"
        )

    def _requested(self, value: Json) -> Json:
        """The value; its tensors are requested."""
        for name in tensors_in(value):
            self._reader.whole(name)
        return value


def _options_of(number: int, places: Sequence[tuple[str, int]], saved: OptimizerRecord) -> Json:
    """The options that the parameters of a group had, each in its saved group."""
    if not places:
        return None
    first, at = places[0]
    for name, other in places:
        if saved.groups[other].options != saved.groups[at].options:
            raise CheckpointMismatchError(
                f"group {number} of the optimizer has {first} and {name}, which had other options "
                f"when they were saved ({saved.groups[at].options} and "
                f"{saved.groups[other].options}): put them into groups of their own"
            )
    return saved.groups[at].options


def shown(names: list[str]) -> str:
    """The first few of many names."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
