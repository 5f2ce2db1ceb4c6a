"""The random states of a rank: torch's, Python's, NumPy's if it is in use, the GPU's if one is.

They are kept as the bytes of one object. With another number of ranks there is none for each of
them: then every rank is seeded with a hash of what rank 0 had, the number of ranks and its own, so
that they differ from each other and the run is the same each time.
"""

from __future__ import annotations

import hashlib
import random
import sys
from array import array
from typing import Any

import torch
from torch import Tensor

from phalanx.backends.randomness import RandomState, current, restore, seeded
from phalanx.collectives.object_decoder import decode
from phalanx.collectives.object_encoder import encode


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
