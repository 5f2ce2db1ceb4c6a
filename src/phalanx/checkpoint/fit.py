"""Whether a checkpoint fits a model and an optimizer, and what of it goes where on this rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from phalanx.checkpoint.manifest import Manifest, OptimizerRecord, StateRecord, TensorRecord
from phalanx.checkpoint.model_parts import ModelParts, Part
from phalanx.checkpoint.optimizer_state import named_groups, path_of
from phalanx.checkpoint.plain import tensors_in
from phalanx.checkpoint.reading import Reader
from phalanx.errors import CheckpointMismatchError
from phalanx.parallel.slices import Slice

_SHOWN = 8


class StateToLoad(NamedTuple):
    """What to keep for a parameter under a key: `flat` in its shape, or a value as JSON."""

    flat: Tensor | None
    value: Any


class Loading(NamedTuple):
    """What goes where.

    tensors   of the model, with their new values in one dimension
    values    of modules, as JSON
    options   of each parameter group, as JSON; None: nothing is known of it
    state     for each parameter
    shared    state for no parameter, as JSON
    unused    names in the checkpoint that nothing here has
    """

    tensors: list[tuple[Tensor, Tensor]]
    values: list[tuple[nn.Module, Any]]
    options: list[Any]
    state: list[tuple[Tensor, dict[str, StateToLoad]]]
    shared: Any
    unused: list[str]


def fit(
    manifest: Manifest,
    reader: Reader,
    parts: ModelParts | None,
    optimizer: torch.optim.Optimizer | None,
) -> Loading:
    """Ask `reader` for what this rank needs; nothing is read or changed yet.

    Raises `CheckpointMismatchError`, naming what is missing or has another shape or dtype.
    """
    loading = Loading([], [], [], [], None, [])
    if parts is None:
        return loading
    _fit_model(manifest, reader, parts, loading)
    if optimizer is None:
        return loading
    if manifest.optimizer is None:
        raise CheckpointMismatchError("it was saved without an optimizer: load it without one")
    return _fit_optimizer(manifest, manifest.optimizer, reader, parts, optimizer, loading)


def refuse_unused(names: list[str]) -> str:
    """What to say of names that no rank has a place for."""
    return f"the model has no place for {shown(names)}, which the checkpoint has"


def shown(names: list[str]) -> str:
    """The first few of many names."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _fit_model(manifest: Manifest, reader: Reader, parts: ModelParts, loading: Loading) -> None:
    here = dict(parts.parameters)
    for name, buffer in parts.buffers.items():
        here[name] = Part(buffer, Slice.whole(tuple(buffer.shape)))
    there = {name: manifest.aliases.get(name, name) for name in here}
    missing = [name for name in here if there[name] not in manifest.model]
    missing += [key for key in parts.stateful if key not in manifest.values]
    if missing:
        raise CheckpointMismatchError(
            f"it has no {shown(missing)}, which the model has: load it into the model that was "
            "saved"
        )
    wrong = [
        f"{name} is {record.dtype} {list(record.shape)} there and {_dtype(part.tensor)} "
        f"{list(part.slice.shape)} here"
        for name, part in here.items()
        for record in [manifest.model[there[name]]]
        if (record.dtype, record.shape) != (_dtype(part.tensor), part.slice.shape)
    ]
    if wrong:
        raise CheckpointMismatchError(f"it is of another model: {shown(wrong)}")
    for name, part in here.items():
        flat = reader.part(manifest.model[there[name]], part.slice.start, part.slice.stop)
        loading.tensors.append((part.tensor, flat))
    for key, module in parts.stateful.items():
        _ask(reader, manifest.values[key])
        loading.values.append((module, manifest.values[key]))
    used = set(there.values())
    loading.unused.extend(name for name in manifest.model if name not in used)
    loading.unused.extend(key for key in manifest.values if key not in parts.stateful)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _fit_optimizer(
    manifest: Manifest,
    saved: OptimizerRecord,
    reader: Reader,
    parts: ModelParts,
    optimizer: torch.optim.Optimizer,
    loading: Loading,
) -> Loading:
    groups = named_groups(optimizer, parts.parameters)
    if type(optimizer).__name__ != saved.kind:
        raise CheckpointMismatchError(
            f"its optimizer is {saved.kind}, and the one here {type(optimizer).__name__}: load it "
            "without the optimizer"
        )
    group_of = {name: at for at, group in enumerate(saved.groups) for name in group.parameters}
    there = _names_there(manifest, group_of)
    missing = [name for group in groups for name in group if there(name) not in group_of]
    if missing:
        raise CheckpointMismatchError(
            f"its optimizer has no {shown(missing)}, which the optimizer here has"
        )
    options: list[Any] = []
    for number, group in enumerate(groups):
        options.append(_options_of(number, [(n, group_of[there(n)]) for n in group], saved))
        for name, parameter in group.items():
            records = saved.state.get(there(name), {})
            part = parts.parameters[name]
            state = {}
            for key, record in records.items():
                own = part.name_of(path_of(there(name), key))
                has_own = bool(record.tensor) and own in manifest.state
                mine = StateRecord(tensor=own) if has_own else record
                state[key] = _fit_state(name, key, mine, part, reader)
            loading.state.append((parameter, state))
    for plain in (*options, saved.shared):
        _ask(reader, plain)
    used = {there(name) for group in groups for name in group}
    unused = [f"the optimizer's {name}" for name in group_of if name not in used]
    return loading._replace(options=options, shared=saved.shared, unused=[*loading.unused, *unused])


def _names_there(manifest: Manifest, known: Mapping[str, int]) -> Any:
    return lambda name: name if name in known else manifest.aliases.get(name, name)


def _options_of(number: int, places: list[tuple[str, int]], saved: OptimizerRecord) -> Any:
    """The options that the group's parameters had; the groups may have been others."""
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


def _fit_state(name: str, key: str, record: StateRecord, part: Part, reader: Reader) -> StateToLoad:
    if record.tensor:
        tensor: TensorRecord = reader.record(record.tensor)
        if tensor.shape != part.slice.shape:
            raise CheckpointMismatchError(
                f"the optimizer's {key} of {name} has shape {list(tensor.shape)} there, and the "
                f"parameter {list(part.slice.shape)} here"
            )
        return StateToLoad(reader.part(tensor, part.slice.start, part.slice.stop), None)
    value = record.value
    if record.own:
        here = (part.slice.start, part.slice.stop)
        own = [own.value for own in record.own if (own.start, own.stop) == here]
        if not own:
            parts = shown([f"{each.start}:{each.stop}" for each in record.own])
            raise CheckpointMismatchError(
                f"the optimizer's {key} of {name} cannot be cut otherwise than it was: it was "
                f"saved for elements {parts}, and this rank has {here[0]}:{here[1]}. Load it with "
                "the number of ranks and the strategy that it was saved with, or without the "
                "optimizer"
            )
        value = own[0]
    _ask(reader, value)
    return StateToLoad(None, value)


def _ask(reader: Reader, plain: Any) -> None:
    """Have the tensors of a value read, too."""
    for name in tensors_in(plain):
        reader.whole(name)
