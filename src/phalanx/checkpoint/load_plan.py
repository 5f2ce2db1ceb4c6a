"""Whether a checkpoint fits a model and an optimizer, and what this rank has to read of it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from phalanx.checkpoint.manifest import Json, Manifest, OptimizerRecord, StateRecord, from_json
from phalanx.checkpoint.state import ModelState, ParameterShard, named_groups, path_of
from phalanx.checkpoint.tensor_files import Reader
from phalanx.errors import CheckpointMismatchError
from phalanx.parallel.wrapper import Slice, Wrapper
from phalanx.wire.memory import copy_bits

_SHOWN = 8


StateToLoad = Tensor | Json
"""State for a parameter under one key: a flat tensor of the parameter's shape, or a value."""


class LoadPlan:
    """What to load into a model, and an optimizer of its parameters.

    To make one changes nothing, and requests tensors from the reader; `apply` may be called when
    they are read. Raises `CheckpointMismatchError`, naming what is missing or has another shape or
    dtype.

    unused   names in the checkpoint that the model and the optimizer of this rank do not have
    """

    def __init__(
        self,
        manifest: Manifest,
        reader: Reader,
        model: ModelState,
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        self.unused: list[str] = []
        self._manifest = manifest
        self._reader = reader
        self._optimizer = optimizer
        self._tensors: list[tuple[Tensor, Tensor]] = []  # of the model, and their elements, flat
        self._own: list[tuple[Wrapper, dict[str, Tensor]]] = []
        self._values: list[tuple[nn.Module, Json]] = []
        self._groups: list[tuple[Json, list[tuple[Tensor, dict[str, StateToLoad]]]]] = []
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
            self._tensors.append((shard.tensor, flat))
        for key, module in model.stateful.items():
            self._values.append((module, self._reader.value(manifest.values[key])))
        for number, wrapper in enumerate(model.wrappers):
            prefix = f"own/{number}/"
            keys = [name[len(prefix) :] for name in manifest.state if name.startswith(prefix)]
            own = {key: self._reader.whole(prefix + key) for key in wrapper.needs(keys)}
            self._own.append((wrapper, own))
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
            options = self._reader.value(_options_of(number, places, saved))
            states = []
            for name, parameter in group.items():
                shard, records = model.parameters[name], saved.state.get(there[name], {})
                state = {}
                for key, record in records.items():
                    of_rank = shard.name_of(path_of(there[name], key))
                    apart = bool(record.tensor) and of_rank in manifest.state
                    mine = StateRecord(tensor=of_rank) if apart else record
                    state[key] = self._plan_state(name, key, mine, shard)
                states.append((parameter, state))
            self._groups.append((options, states))
        self._reader.value(saved.shared)
        used = set(there.values())
        self.unused += [f"the optimizer's {name}" for name in group_of if name not in used]

    def _plan_state(
        self, name: str, key: str, record: StateRecord, shard: ParameterShard
    ) -> StateToLoad:
        here = (shard.slice.start, shard.slice.stop)
        if record.tensor:
            tensor = self._reader.record(record.tensor)
            if tensor.shape != shard.slice.shape:
                raise CheckpointMismatchError(
                    f"the optimizer's {key} of {name} has shape {list(tensor.shape)} there, and "
                    f"the parameter {list(shard.slice.shape)} here"
                )
            return self._reader.part(tensor, *here)
        if not record.own:
            return self._reader.value(record.value)
        for own in record.own:
            if (own.start, own.stop) == here:
                return self._reader.value(own.value)
        parts = shown([f"{each.start}:{each.stop}" for each in record.own])
        raise CheckpointMismatchError(
            f"the optimizer's {key} of {name} cannot be cut otherwise than it was: it was saved "
            f"for elements {parts}, and this rank has {here[0]}:{here[1]}. Load it with the number "
            "of ranks and the strategy that it was saved with, or without the optimizer"
        )

    def apply(self) -> None:
        """Change the model and the optimizer, in place."""
        with ExitStack() as writing, torch.no_grad():
            for wrapper, _ in self._own:
                writing.enter_context(wrapper.writing())
            for tensor, flat in self._tensors:
                copy_bits(tensor.detach(), flat.view(tensor.shape))
        for wrapper, own in self._own:
            wrapper.load_own_state(own)
        for module, value in self._values:
            module.set_extra_state(from_json(value, self._reader.whole))
        if self._optimizer is not None:
            self._apply_optimizer(self._optimizer)

    def _apply_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.state.clear()
        for group, (options, states) in zip(optimizer.param_groups, self._groups, strict=True):
            for key, value in from_json(options or {}, self._copy).items():
                if isinstance(group.get(key), Tensor) and isinstance(value, Tensor):
                    group[key].copy_(value)  # a captured graph refers to this tensor
                else:
                    group[key] = value
            steps_on_cpu = not (group.get("capturable") or group.get("fused"))
            for parameter, state in states:
                if state:
                    optimizer.state[parameter] = {
                        key: self._placed(value, parameter, key == "step" and steps_on_cpu)
                        for key, value in state.items()
                    }
        assert self._manifest.optimizer is not None
        optimizer.state.update(from_json(self._manifest.optimizer.shared or {}, self._copy))

    def _placed(self, value: StateToLoad, parameter: Tensor, on_cpu: bool) -> object:
        """State laid out as the parameter; tensors of values on its device, or on the CPU."""
        if not isinstance(value, Tensor):
            device = torch.device("cpu") if on_cpu else parameter.device
            return from_json(value, lambda name: self._copy(name).to(device))
        flat = value.view(parameter.shape)
        if parameter.is_contiguous() and parameter.device == flat.device:
            return flat
        like = torch.empty_like(parameter, dtype=flat.dtype, requires_grad=False)
        copy_bits(like, flat)
        return like

    def _copy(self, name: str) -> Tensor:
        """A tensor of a value; several values may refer to one stored tensor."""
        return self._reader.whole(name).clone()


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
