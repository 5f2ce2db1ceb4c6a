"""A rank's training state: model, optimizer, random states; by names that all ranks share.

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
from itertools import count
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from phalanx.core.random_state import RandomState, current, restore, seeded
from phalanx.errors import MisuseError, UnsupportedOperationError
from phalanx.optim import ShardedOptimizer
from phalanx.parallel.wrapper import Slice, Wrapper, walk
from phalanx.wire.codec import decode, encode


class ParameterShard(NamedTuple):
    """A parameter or buffer: `tensor` is this rank's part of it, which is `slice` of the whole.

    owner   if optimizers keep different state for it on each rank: "<rank>/<ranks>" of this one;
            empty on rank 0, whose state stands for all
    """

    tensor: Tensor
    slice: Slice
    owner: str = ""

    def name_of(self, path: str) -> str:
        """Return the name of this rank's version of `path`, which other ranks store, too."""
        return f"{path}@{self.owner}" if self.owner else path


class ModelState(NamedTuple):
    """A rank's part of a model.

    parameters   by name
    buffers      those of the state dict, by name; every rank has all of each
    aliases      the other names of these, each with the name that is stored
    stateful     modules with `get_extra_state`, by its key in the state dict
    wrappers     in the model, or around it, by the names that all ranks have for them
    """

    parameters: dict[str, ParameterShard]
    buffers: dict[str, ParameterShard]
    aliases: dict[str, str]
    stateful: dict[str, nn.Module]
    wrappers: dict[str, Wrapper]


def model_state(model: nn.Module) -> ModelState:
    """Return this rank's part of `model`.

    Raises `MisuseError` for wrappers inside each other, or a wrapper with other parameters than it
    describes; `UnsupportedOperationError` for tensors whose elements are not in memory one by one.
    """
    found = ModelState({}, {}, {}, {}, wrappers_of(model))
    first: dict[int, str] = {}

    def note(into: dict[str, ParameterShard], name: str, shard: ParameterShard) -> None:
        stored = first.setdefault(id(shard.tensor), name)
        if stored != name:
            found.aliases[name] = stored
            return
        check_tensor(name, shard.tensor)
        shape, part = tuple(shard.tensor.shape), shard.slice
        if shard.tensor.numel() != part.numel or shape not in {part.shape, shape[:1]}:
            raise MisuseError(
                f"{name} has shape {list(shape)} on this rank, which is to hold elements "
                f"{part.start}:{part.stop} of shape {list(part.shape)}: a parameter was replaced "
                "after the model was wrapped"
            )
        into[name] = shard

    for name, parameter in _parameters(model, ""):
        note(found.parameters, name, parameter)
    for prefix, module in walk(model):
        if isinstance(module, Wrapper):
            continue
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                note(found.buffers, prefix + key, _whole(buffer))
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            found.stateful[f"{prefix}_extra_state"] = module
    return found


def _whole(tensor: Tensor) -> ParameterShard:
    return ParameterShard(tensor, Slice.whole(tuple(tensor.shape)))


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


def wrappers_of(model: nn.Module) -> dict[str, Wrapper]:
    """Return the wrappers in a model, or around it, by names: 0, 1, ...

    Ranks of a pipeline have different ones, named by the prefix of their parameters, such as
    `blocks.3.`. Raises `MisuseError` for one inside of another.
    """
    found: dict[str, Wrapper] = {}
    numbers = count()

    def visit(module: nn.Module, prefix: str, spread: bool) -> None:
        if not isinstance(module, Wrapper):
            for name, child in module.named_children():
                visit(child, f"{prefix}{name}.", spread)
            return
        found[prefix if spread else str(next(numbers))] = module
        if module.spreads:
            visit(module.module, prefix, True)
            return
        for inner in module.module.modules():
            if isinstance(inner, Wrapper):
                raise MisuseError(
                    f"the model has a {type(inner).__name__} inside of a {type(module).__name__}: "
                    "wrap each part once"
                )

    visit(model, "", False)
    return found


def _parameters(module: nn.Module, prefix: str) -> Iterator[tuple[str, ParameterShard]]:
    if not isinstance(module, Wrapper):
        for name, plain in module._parameters.items():
            if plain is not None:
                yield prefix + name, _whole(plain)
        for name, child in module._modules.items():
            if child is not None:
                yield from _parameters(child, f"{prefix}{name}.")
    elif module.spreads:
        yield from _parameters(module.module, prefix)
    else:
        slices, backend = module.slices(), module.backend
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        apart = module.optimizers_apart and backend.rank > 0
        owner = f"{backend.rank}/{backend.world_size}" if apart else ""
        for name, parameter in module.named_parameters(remove_duplicate=False):
            part = slices[names[id(parameter)]]
            yield prefix + name, ParameterShard(parameter, part, owner)


def named_groups(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, ParameterShard]
) -> list[dict[str, Tensor]]:
    """Return the parameters of each group by name; `MisuseError` for one of another model."""
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


def kept_by(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, ParameterShard]
) -> tuple[str, Mapping[str, ParameterShard]]:
    """Return an optimizer's kind, and the parameters that it keeps state of, in their shape there.

    Of a `ShardedOptimizer` that of the inner one, and what this rank owns: whole parameters.
    """
    if not isinstance(optimizer, ShardedOptimizer):
        return type(optimizer).__name__, parameters
    kept = {}
    for name, shard in parameters.items():
        if shard.tensor in optimizer.owned:
            shape = shard.slice.shape
            whole = ParameterShard(shard.tensor.new_empty(()).expand(shape), Slice.whole(shape))
            kept[name] = shard if shard.tensor.shape == shape else whole
    return type(optimizer.inner).__name__, kept


# ------------------------------------------------------------------------------
# Random states: torch's, Python's, NumPy's if it is imported, the GPU's if it is used
#
# A rank's are stored as the bytes of one object. If another number of ranks loads, each rank is
# seeded with a hash of rank 0's states, the number of ranks and its own: ranks differ from each
# other, and the run is reproducible.


def capture_random_state() -> Tensor:
    """Return the current states, as bytes."""
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
    """Try saved random states on other generators; return them. ValueError if they are none."""
    try:
        states = cast("dict[str, Any]", decode(memoryview(bytearray(saved.tolist()))))
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
    return states


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
