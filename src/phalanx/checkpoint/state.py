"""What a rank holds of a training: model, optimizer, random states; by names that all ranks share.

A model is a plain module, a wrapper (DDP, FSDP), or a module or pipeline with wrappers in it. Names
are those of the plain model, as if no wrapper were there. A tensor that has several names is stored
under the first; the others are its aliases.
"""

from __future__ import annotations

import hashlib
import random
import sys
from array import array
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from phalanx.checkpoint.manifest import (
    Json,
    OptimizerRecord,
    OptionsRecord,
    ShardValue,
    StateRecord,
    to_json,
)
from phalanx.checkpoint.tensor_files import METADATA, FileKind, TensorShard
from phalanx.collectives import all_gather_object
from phalanx.core.backend import Backend, SubBackend
from phalanx.core.random_state import RandomState, current, restore, seeded
from phalanx.errors import (
    CheckpointMismatchError,
    MisuseError,
    UnsupportedObjectError,
    UnsupportedOperationError,
)
from phalanx.parallel.wrapper import Slice, Wrapper, walk
from phalanx.tensor.layer import ParallelLayer
from phalanx.wire.codec import decode, encode


class ParameterShard(NamedTuple):
    """A parameter: `tensor` is this rank's part of it, which is `slice` of the whole.

    owner   where optimizers keep different state for it on each rank: "<rank>/<ranks>" of this one;
            empty on rank 0, whose state stands for all
    """

    tensor: Tensor
    slice: Slice
    owner: str = ""

    def name_of(self, path: str) -> str:
        """The name for this rank's version of what other ranks store under `path`, too."""
        return f"{path}@{self.owner}" if self.owner else path


class ModelState(NamedTuple):
    """What a rank holds of a model.

    parameters   by name
    buffers      those of the state dict, by name; every rank has all of each
    aliases      the other names of these, each with the name that is stored
    stateful     modules with `get_extra_state`, by its key in the state dict
    wrappers     in the model, or around it
    """

    parameters: dict[str, ParameterShard]
    buffers: dict[str, Tensor]
    aliases: dict[str, str]
    stateful: dict[str, nn.Module]
    wrappers: list[Wrapper]


def model_state(model: nn.Module) -> ModelState:
    """What this rank holds of `model`.

    Raises `MisuseError` for wrappers inside each other, or a wrapper whose parameters are not as it
    says; `UnsupportedOperationError` for tensors whose elements are not in memory one by one.
    """
    found = ModelState({}, {}, {}, {}, list(_wrappers(model)))
    first: dict[int, str] = {}
    for name, parameter in _parameters(model, ""):
        if first.setdefault(id(parameter.tensor), name) == name:
            _check_parameter(name, parameter)
            found.parameters[name] = parameter
        else:
            found.aliases[name] = first[id(parameter.tensor)]
    for prefix, module in walk(model):
        if isinstance(module, Wrapper):
            continue
        for key, buffer in module._buffers.items():
            if buffer is None or key in module._non_persistent_buffers_set:
                continue
            name = prefix + key
            if first.setdefault(id(buffer), name) == name:
                check_tensor(name, buffer)
                found.buffers[name] = buffer
            else:
                found.aliases[name] = first[id(buffer)]
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            found.stateful[f"{prefix}_extra_state"] = module
    return found


def backend_of(model: nn.Module | None) -> Backend | None:
    """The backend of the model's wrappers; None without any.

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
    """Means over the ranks, which are saved instead of tensors that differ between them. Blocks."""
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


def _parameters(module: nn.Module, prefix: str) -> Iterator[tuple[str, ParameterShard]]:
    if isinstance(module, Wrapper) and module.spreads:
        yield from _parameters(module.module, prefix)
        return
    if isinstance(module, Wrapper):
        slices = module.slices()
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        backend = module.backend
        apart = module.optimizers_apart and backend.rank > 0
        owner = f"{backend.rank}/{backend.world_size}" if apart else ""
        for name, parameter in module.named_parameters(remove_duplicate=False):
            shard = ParameterShard(parameter, slices[names[id(parameter)]], owner)
            yield prefix + name, shard
        return
    for name, plain in module._parameters.items():
        if plain is not None:
            yield prefix + name, ParameterShard(plain, Slice.whole(tuple(plain.shape)))
    for name, child in module._modules.items():
        if child is not None:
            yield from _parameters(child, f"{prefix}{name}.")


def _check_parameter(name: str, parameter: ParameterShard) -> None:
    check_tensor(name, parameter.tensor)
    shape, part = tuple(parameter.tensor.shape), parameter.slice
    if parameter.tensor.numel() != part.numel or shape not in {part.shape, shape[:1]}:
        raise MisuseError(
            f"{name} has shape {list(shape)} on this rank, which is to hold elements "
            f"{part.start}:{part.stop} of shape {list(part.shape)}: a parameter was replaced after "
            "the model was wrapped"
        )


# ------------------------------------------------------------------------------
# Tensor-parallel layers: ranks hold different parts under the same names
#
#   rank 0   tensor 0   data 0  --\
#   rank 2   tensor 0   data 1  --/  folder/tensor0        saved together: replicas, or FSDP shards
#   rank 1   tensor 1   data 0  --\
#   rank 3   tensor 1   data 1  --/  folder/tensor1
#
# Saved together, parts of equal shapes would be taken for replicas, of which only one is written.


def check_layer_parts_apart(
    model: nn.Module | None, backend: Backend | None, folder: str, op: str
) -> None:
    """Raise `CheckpointMismatchError`, on every rank, if parts of one layer meet in one checkpoint.

    That is, if ranks that share a parallel layer save or load together, or in the same folder.
    Blocks, for a model with such layers, until the ranks that share one have exchanged folders.
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
    """The ranks of a group, numbered alike in all groups that were made of one backend."""
    whole = backend
    while isinstance(whole, SubBackend):
        whole = whole.parent
    return {(id(whole), rank) for rank in backend.ranks}


# ------------------------------------------------------------------------------
# What could be written


class LocalTensors:
    """The tensors that this rank could write: descriptions, and the tensors by kind and name."""

    def __init__(self) -> None:
        self.held: list[TensorShard] = []
        self.tensors: dict[tuple[FileKind, str], Tensor] = {}

    def add(
        self, kind: FileKind, name: str, tensor: Tensor, part: Slice | None = None, *, equal: bool
    ) -> None:
        """Add a tensor, or the `part` of one; see `TensorShard`.

        Raises `MisuseError` for a name that is taken already.
        """
        if (kind, name) in self.tensors or name == METADATA:
            raise MisuseError(f"two tensors would be named {name}: give one another name")
        check_tensor(name, tensor)
        part = part or Slice.whole(tuple(tensor.shape))
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.held.append(TensorShard(kind, name, dtype, part.shape, part.start, part.stop, equal))
        self.tensors[kind, name] = tensor.detach()

    def json(self, value: object, path: str) -> Json:
        """The value as JSON; its tensors are added, under names that begin with `path`.

        Of ranks that have the same value, the first writes its tensors.
        """

        def keep(tensor: Tensor, name: str) -> str:
            while ("state", name) in self.tensors:
                name += "'"
            self.add("state", name, tensor, equal=False)
            return name

        return to_json(value, path, keep)

    def add_model(self, model: ModelState, means: Mapping[Tensor, Tensor]) -> dict[str, Json]:
        """Add parameters and buffers, or their means over the ranks; return modules' extra state.

        Buffers may differ between ranks: rank 0's are written.
        """
        for name, parameter in model.parameters.items():
            tensor = means.get(parameter.tensor, parameter.tensor)
            self.add("model", name, tensor, parameter.slice, equal=True)
        for name, buffer in model.buffers.items():
            self.add("model", name, means.get(buffer, buffer), equal=False)
        return {
            key: self.json(module.get_extra_state(), f"model/{key}")
            for key, module in model.stateful.items()
        }


# ------------------------------------------------------------------------------
# The optimizer. Of what it keeps for a parameter,
#
#     tensors of the parameter's shape      are sharded like it: momentum, Adam's averages
#     values without other tensors          are the same for every shard: the number of steps, text
#     anything else                         is for the shard that it was made for, and no other:
#                                           Adafactor's rows and columns, the history of L-BFGS


def named_groups(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, ParameterShard]
) -> list[dict[str, Tensor]]:
    """For each parameter group its parameters, by name.

    Raises `MisuseError` if the optimizer has one that the model does not.
    """
    names = {id(parameter.tensor): name for name, parameter in parameters.items()}
    groups: list[dict[str, Tensor]] = []
    for number, group in enumerate(optimizer.param_groups):
        groups.append({})
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                raise MisuseError(
                    f"the optimizer's parameter {place} of group {number} (shape "
                    f"{list(parameter.shape)}) is not one of the model's: make the optimizer from "
                    "the parameters of the model that is saved or loaded, after wrapping it"
                )
            groups[-1][names[id(parameter)]] = parameter
    return groups


def describe_optimizer(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, ParameterShard], local: LocalTensors
) -> OptimizerRecord:
    """What the optimizer keeps; its tensors are added to `local`. Raises as `named_groups` does."""
    groups = named_groups(optimizer, parameters)
    options = [
        {key: value for key, value in group.items() if key not in {"params", "param_names"}}
        for group in optimizer.param_groups
    ]
    state = {
        name: optimizer.state[parameter]
        for group in groups
        for name, parameter in group.items()
        if parameter in optimizer.state
    }
    sharded = _sharded_keys(state, parameters)
    return OptimizerRecord(
        kind=type(optimizer).__name__,
        groups=[
            OptionsRecord(list(group), local.json(given, f"optimizer/group{number}"))
            for number, (group, given) in enumerate(zip(groups, options, strict=True))
        ],
        state={
            name: {
                key: _describe(path_of(name, key), value, key in sharded, parameters[name], local)
                for key, value in of_parameter.items()
            }
            for name, of_parameter in state.items()
        },
        shared=local.json(
            {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)},
            "optimizer/shared",
        ),
    )


def path_of(name: str, key: str) -> str:
    """The name in a checkpoint of a tensor that an optimizer keeps for a parameter."""
    return f"optimizer/{name}/{key}"


def _sharded_keys(
    state: Mapping[str, Mapping[object, object]], parameters: Mapping[str, ParameterShard]
) -> set[str]:
    """The keys under which every tensor has its parameter's shape.

    That a 0-dim parameter has a 0-dim "step" says nothing: another parameter has to have one of
    its shape, too.
    """
    same_shape: dict[str, bool] = {}
    unclear = {"step"}
    for name, of_parameter in state.items():
        parameter = parameters[name].tensor
        for key, value in of_parameter.items():
            if not isinstance(key, str):
                raise UnsupportedObjectError(
                    f"the optimizer keeps something for {name} under {key!r}: a checkpoint takes "
                    "text as keys"
                )
            if isinstance(value, Tensor):
                same = value.shape == parameter.shape
                same_shape[key] = same_shape.get(key, True) and same
                if parameter.ndim > 0 and same:
                    unclear.discard(key)
    return {key for key, same in same_shape.items() if same} - unclear


def _describe(
    path: str, value: object, sharded: bool, parameter: ParameterShard, local: LocalTensors
) -> StateRecord:
    if sharded and isinstance(value, Tensor):
        name = parameter.name_of(path)
        local.add("state", name, value, parameter.slice, equal=True)
        return StateRecord(tensor=name)
    if not _has_dimensions(value):
        return StateRecord(value=local.json(value, path))
    start, stop = parameter.slice.start, parameter.slice.stop
    return StateRecord(own=[ShardValue(start, stop, local.json(value, f"{path}/{start}-{stop}"))])


def _has_dimensions(value: object) -> bool:
    """Whether there is a tensor in it that has dimensions."""
    match value:
        case Tensor():
            return value.ndim > 0
        case list() | tuple():
            return any(map(_has_dimensions, value))
        case dict():
            return any(map(_has_dimensions, value.values()))
    return False


# ------------------------------------------------------------------------------
# Random states: torch's, Python's, NumPy's if it is imported, the GPU's if it is used
#
# A rank's are stored as the bytes of one object. If another number of ranks loads, each rank is
# seeded with a hash of rank 0's states, the number of ranks and its own: ranks differ from each
# other, and the run is reproducible.


def capture_random_state() -> Tensor:
    """The states as they are now, as bytes."""
    state = current()
    version, words, gauss = state.python
    saved: dict[str, Any] = {
        "torch": state.torch,
        "python": (version, array("I", words).tobytes(), gauss),
    }
    if state.numpy is not None:
        name, keys, position, has_gauss, cached = state.numpy
        words = array("I", keys.tolist()).tobytes()
        saved["numpy"] = (str(name), words, int(position), int(has_gauss), float(cached))
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        saved["cuda"] = torch.cuda.get_rng_state()
    return torch.frombuffer(encode(saved), dtype=torch.uint8)


def check_random_state(saved: Tensor) -> dict[str, Any]:
    """What `capture_random_state` has saved. Raises ValueError if it is something else.

    The global generators are not touched: the states are tried on others.
    """
    try:
        states: Any = decode(memoryview(bytearray(saved.tolist())))
        torch.Generator().set_state(states["torch"])
        version, words, gauss = states["python"]
        states["python"] = (version, tuple(array("I", words)), gauss)
        random.Random().setstate(states["python"])
        if "numpy" in states:
            name, keys, *rest = states["numpy"]
            states["numpy"] = (name, array("I", keys).tolist(), *rest)
            if (numpy := sys.modules.get("numpy")) is not None:
                numpy.random.RandomState().set_state(states["numpy"])
    except (KeyError, TypeError, RuntimeError, AttributeError) as error:
        raise ValueError(f"the random state cannot be read: {error}") from error
    checked: dict[str, Any] = states
    return checked


def restore_random_state(states: dict[str, Any]) -> None:
    """Set the global generators to these states; a generator without one stays as it is."""
    restore(RandomState(states["torch"], states["python"], states.get("numpy")))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def reseed(saved: Tensor, rank: int, world_size: int) -> None:
    """Seed rank `rank` of `world_size`, from rank 0's states of another number of ranks."""
    text = f"{world_size} ranks go on from {hashlib.sha256(bytes(saved.tolist())).hexdigest()}"
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
    restore(seeded(seed, rank))
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(torch.initial_seed())
