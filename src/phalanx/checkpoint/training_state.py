"""What an optimizer keeps, by the names of the parameters that it is about.

What it keeps for a parameter is a table of keys. A tensor of the parameter's own shape (momentum,
Adam's averages) is cut like the parameter. A number, a 0-dim tensor (Adam's step), text and so on
are the same whatever part of the parameter a rank has. Anything else belongs to the part it was
made for (Adafactor's rows and columns, L-BFGS's history): it fits that part only.
"""

from __future__ import annotations

import hashlib
import random
import sys
from array import array
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from phalanx.checkpoint.manifest import OptionsRecord, Own, StateRecord
from phalanx.checkpoint.model_parts import Part
from phalanx.checkpoint.plan import Holdings, OptimizerDescription
from phalanx.core.random_state import RandomState, current, restore, seeded
from phalanx.errors import MisuseError, UnsupportedObjectError
from phalanx.wire.codec import decode, encode

NOT_OPTIONS = frozenset({"params", "param_names"})


def named_groups(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, Part]
) -> list[dict[str, Tensor]]:
    """For each parameter group its parameters, by name.

    Raises `MisuseError` if the optimizer has one that the model does not.
    """
    names = {id(part.tensor): name for name, part in parameters.items()}
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
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, Part], holdings: Holdings
) -> OptimizerDescription:
    """What the optimizer keeps; tensors go into `holdings`. Raises as `named_groups` does."""
    groups = named_groups(optimizer, parameters)
    options = [
        {key: value for key, value in group.items() if key not in NOT_OPTIONS}
        for group in optimizer.param_groups
    ]
    state = {
        name: optimizer.state[parameter]
        for group in groups
        for name, parameter in group.items()
        if parameter in optimizer.state
    }
    for name, of_parameter in state.items():
        for key in of_parameter:
            if not isinstance(key, str):
                raise UnsupportedObjectError(
                    f"the optimizer keeps something for {name} under {key!r}: a checkpoint takes "
                    "text as keys"
                )
    alike = _keys_cut_like_parameters(state, parameters)
    return OptimizerDescription(
        kind=type(optimizer).__name__,
        groups=[
            OptionsRecord(list(group), holdings.json(given, f"optimizer/group{number}"))
            for number, (group, given) in enumerate(zip(groups, options, strict=True))
        ],
        state={
            name: {
                key: _describe(path_of(name, key), value, key in alike, part, holdings)
                for key, value in of_parameter.items()
            }
            for name, of_parameter in state.items()
            for part in [parameters[name]]
        },
        shared=holdings.json(
            {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)},
            "optimizer/shared",
        ),
    )


def path_of(name: str, key: str) -> str:
    """What a tensor that is kept for a parameter is called in a checkpoint."""
    return f"optimizer/{name}/{key}"


def _keys_cut_like_parameters(
    state: Mapping[str, Mapping[Any, Any]], parameters: Mapping[str, Part]
) -> set[Any]:
    """The keys under which every tensor has its parameter's shape.

    A parameter without dimensions says nothing about a tensor without: others do, or the name.
    """
    alike: dict[Any, bool] = {}
    telling: set[Any] = {"step"}
    for name, of_parameter in state.items():
        parameter = parameters[name].tensor
        for key, value in of_parameter.items():
            if isinstance(value, Tensor):
                same = value.shape == parameter.shape
                alike[key] = alike.get(key, True) and same
                if parameter.ndim > 0 and same:
                    telling.discard(key)
    return {key for key, all_are in alike.items() if all_are and key not in telling}


def _describe(path: str, value: object, alike: bool, part: Part, holdings: Holdings) -> StateRecord:
    if alike and isinstance(value, Tensor):
        name = part.name_of(path)
        holdings.add("state", name, value, part.slice, equal=True)
        return StateRecord(tensor=name)
    if _is_common(value):
        return StateRecord(value=holdings.json(value, path))
    start, stop = part.slice.start, part.slice.stop
    own = Own(start, stop, holdings.json(value, f"{path}/{start}-{stop}"))
    return StateRecord(own=[own])


def _is_common(value: object) -> bool:
    """Whether it has no tensor with dimensions in it."""
    match value:
        case Tensor():
            return value.ndim == 0
        case list() | tuple():
            return all(map(_is_common, value))
        case dict():
            return all(map(_is_common, value.values()))
    return True


# ------------------------------------------------------------------------------
# The random states of a rank: torch's, Python's, NumPy's if it is in use, the GPU's if one is.
#
# They are kept as the bytes of one object. With another number of ranks there is none for each of
# them: then every rank is seeded with a hash of what rank 0 had, the number of ranks and its own,
# so that they differ from each other and the run is the same each time.


def capture() -> Tensor:
    """The states as they are now, as bytes."""
    state = current()
    version, words, gauss = state.python
    numpy = state.numpy
    saved: dict[str, Any] = {
        "torch": state.torch,
        "python": (version, array("I", words).tobytes(), gauss),
    }
    if numpy is not None:
        name, keys, position, has_gauss, cached = numpy
        words = array("I", keys.tolist()).tobytes()
        saved["numpy"] = (str(name), words, int(position), int(has_gauss), float(cached))
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        saved["cuda"] = torch.cuda.get_rng_state()
    return torch.frombuffer(encode(saved), dtype=torch.uint8)


def check(saved: Tensor) -> dict[str, Any]:
    """What `capture` put together. Raises ValueError if it is something else.

    Nothing global is touched: generators of its own are given the states.
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


def bring_back(states: dict[str, Any]) -> None:
    """Make the generators go on from there. Those that it has no state of stay as they are."""
    restore(RandomState(states["torch"], states["python"], states.get("numpy")))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def reseed(saved: Tensor, rank: int, world_size: int) -> None:
    """Seed rank `rank` of `world_size`, given what rank 0 of another number of ranks had."""
    text = f"{world_size} ranks go on from {hashlib.sha256(bytes(saved.tolist())).hexdigest()}"
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
    restore(seeded(seed, rank))
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(torch.initial_seed())
