"""What a rank holds of a model, by the names that the plain model has for it.

A model is a plain module, a wrapper of one (DDP, FSDP), or a module or pipeline with wrappers in
it. Names are as if no wrapper were there. A tensor that has several names goes by the first; the
others are its aliases.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from phalanx.collectives import all_gather_object
from phalanx.core.backend import Backend
from phalanx.errors import CheckpointMismatchError, MisuseError, UnsupportedOperationError
from phalanx.parallel.wrapper import Slice, Wrapper, walk
from phalanx.tensor.layer import ParallelLayer


class Part(NamedTuple):
    """A parameter: `tensor` is this rank's part of it, which is `slice` of the whole.

    rank   where optimizers keep something else for it on each rank: which one of how many this is;
           empty on the first, which stands for all
    """

    tensor: Tensor
    slice: Slice
    rank: str = ""

    def name_of(self, path: str) -> str:
        """Where this rank keeps what others keep under `path`, too."""
        return f"{path}@{self.rank}" if self.rank else path


class ModelParts(NamedTuple):
    """What a rank holds of a model.

    parameters   by name
    buffers      those of the state dict, by name; every rank has all of each
    aliases      the other names of these, each with the one that they go by
    stateful     modules with `get_extra_state`, by the key of that in the state dict
    wrappers     in the model, or around it
    """

    parameters: dict[str, Part]
    buffers: dict[str, Tensor]
    aliases: dict[str, str]
    stateful: dict[str, nn.Module]
    wrappers: list[Wrapper]


def parts_of(model: nn.Module) -> ModelParts:
    """What this rank holds of `model`.

    Raises `MisuseError` for wrappers inside each other, or a wrapper whose parameters are not as it
    says; `UnsupportedOperationError` for tensors whose elements are not in memory one by one.
    """
    found = ModelParts({}, {}, {}, {}, list(_wrappers(model)))
    first: dict[int, str] = {}
    for name, part in _parameters(model, ""):
        if first.setdefault(id(part.tensor), name) == name:
            found.parameters[name] = _checked(name, part)
        else:
            found.aliases[name] = first[id(part.tensor)]
    for prefix, module in walk(model):
        if isinstance(module, Wrapper):
            continue
        for key, buffer in module._buffers.items():
            if buffer is None or key in module._non_persistent_buffers_set:
                continue
            name = prefix + key
            if first.setdefault(id(buffer), name) == name:
                found.buffers[name] = buffer
                check_tensor(name, buffer)
            else:
                found.aliases[name] = first[id(buffer)]
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            found.stateful[f"{prefix}_extra_state"] = module
    return found


def backend_of(model: nn.Module | None) -> Backend | None:
    """The backend that the model's wrappers have, if it has any.

    Raises `MisuseError` if they have different ones.
    """
    backends = list({id(w.backend): w.backend for w in _wrappers(model)}.values()) if model else []
    if len(backends) > 1:
        raise MisuseError(
            "the model has parts on different backends: say with backend= which ranks save or load "
            "it together"
        )
    return backends[0] if backends else None


def means_of(model: nn.Module, timeout: float) -> dict[Tensor, Tensor]:
    """What is saved in the place of tensors that are not the same on all ranks. Blocks."""
    found: dict[Tensor, Tensor] = {}
    for wrapper in _wrappers(model):
        found.update(wrapper.means(timeout=timeout))
    return found


def check_tensor(name: str, tensor: Tensor) -> None:
    """Raise `UnsupportedOperationError` unless the tensor's elements lie in memory."""
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise UnsupportedOperationError(
            f"{name} is a {type(tensor).__name__}, which holds its elements in a way of its own: a "
            "checkpoint takes plain tensors only"
        )
    if tensor.layout != torch.strided or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        raise UnsupportedOperationError(f"{name} is {kind}: a checkpoint takes dense tensors only")
    if tensor.is_meta:
        raise UnsupportedOperationError(
            f"{name} is on the meta device and has no elements: materialize the model first, such "
            'as with model.to_empty(device="cpu")'
        )


def _wrappers(model: nn.Module) -> Iterator[Wrapper]:
    if isinstance(model, Wrapper):
        yield model
    if not isinstance(model, Wrapper) or model.spreads:
        for child in model.children():
            yield from _wrappers(child)
        return
    for inner in model.module.modules():
        if isinstance(inner, Wrapper):
            raise MisuseError(
                f"the model has a {type(inner).__name__} inside of a {type(model).__name__}: wrap "
                "each part once"
            )


def _parameters(module: nn.Module, prefix: str) -> Iterator[tuple[str, Part]]:
    if isinstance(module, Wrapper) and module.spreads:
        yield from _parameters(module.module, prefix)
        return
    if isinstance(module, Wrapper):
        slices = module.slices()
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        backend = module.backend
        apart = module.optimizers_apart and backend.rank > 0
        rank = f"{backend.rank}/{backend.world_size}" if apart else ""
        for name, parameter in module.named_parameters(remove_duplicate=False):
            yield prefix + name, Part(parameter, slices[names[id(parameter)]], rank)
        return
    for name, plain in module._parameters.items():
        if plain is not None:
            yield prefix + name, Part(plain, Slice.whole(tuple(plain.shape)))
    for name, child in module._modules.items():
        if child is not None:
            yield from _parameters(child, f"{prefix}{name}.")


def _checked(name: str, part: Part) -> Part:
    check_tensor(name, part.tensor)
    shape = tuple(part.tensor.shape)
    if part.tensor.numel() != part.slice.numel or shape not in {part.slice.shape, shape[:1]}:
        raise MisuseError(
            f"{name} has shape {list(shape)} on this rank, which is to hold elements "
            f"{part.slice.start}:{part.slice.stop} of shape {list(part.slice.shape)}: a parameter "
            "was replaced after the model was wrapped"
        )
    return part


# ------------------------------------------------------------------------------
# Models of which ranks hold different parts under the same names: a checkpoint for each part.
#
#   rank 0   tensor 0   data 0  --\
#   rank 2   tensor 0   data 1  --/  folder/tensor0        saved together: what they hold is equal,
#   rank 1   tensor 1   data 0  --\                        or shards of one
#   rank 3   tensor 1   data 1  --/  folder/tensor1
#
# Parts of equal shapes would pass for copies of one another, of which one is kept.


def check_parts_are_apart(
    model: nn.Module | None, backend: Backend | None, folder: str, op: str
) -> None:
    """Raise `CheckpointMismatchError`, on every rank, if parts of one layer meet in one checkpoint.

    That is, if ranks that share a parallel layer save or load together, or in the same folder.
    Blocks, for a model with such layers, until the ranks that share one have told their folders.
    """
    if model is None:
        return
    for name, layer in model.named_modules():
        if not isinstance(layer, ParallelLayer) or layer.backend.world_size == 1:
            continue
        sharing = layer.backend
        together = _members(backend) & _members(sharing) if backend is not None else set()
        folders = [] if len(together) > 1 else all_gather_object(folder, sharing)
        if len(together) > 1 or len(set(map(str, folders))) < len(folders):
            raise CheckpointMismatchError(
                f"{op}: rank {sharing.rank} of {sharing.world_size} that share {name} has its own "
                "part of it, and so has each of the others, under the same names: let ranks with "
                'the same part save and load together, in a folder for each part: mesh["data"] as '
                "the backend, or the wrapper's, and folder / f\"tensor{mesh['tensor'].rank}\". Or "
                "keep full_state_dict(model)",
                rank=sharing.rank,
                op=op,
            )
        return


def _members(backend: Backend) -> set[tuple[int, int]]:
    """The ranks of a group, as those of all groups that have the same connections."""
    return {(id(backend.engine), rank) for rank in backend.group.ranks}
