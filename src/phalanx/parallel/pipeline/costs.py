"""What each layer costs, measured: seconds of a forward and a backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from statistics import median
from time import perf_counter

import torch
from torch import Tensor, nn

from .plan import named_layers
from .trees import Tree, flatten, map_tensors

__all__ = ["measure_layer_costs"]


def measure_layer_costs(
    layers: nn.Sequential | Sequence[nn.Module], inputs: Tree, *, repeats: int = 3
) -> list[float]:
    """Seconds that a forward and a backward pass through each layer take; for `balance_stages`.

    inputs    those of the first layer: a micro-batch, say
    repeats   how often each is measured; the median counts, after one that does not

    Layers are copied, one at a time: nothing of them changes, no gradient, buffer or random state.
    Two ranks measure two things, and have to cut alike: let one of them measure, and
    `broadcast_object` what it found.
    """
    costs = []
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        for layer in named_layers(layers).values():
            copied = deepcopy(layer)
            times = []
            for _ in range(repeats + 1):
                given = map_tensors(_as_leaf, inputs, "inputs")
                began = perf_counter()
                outputs = copied(given)
                results = [t for t in flatten(outputs, "outputs")[1] if t.requires_grad]
                torch.autograd.backward(results, [torch.ones_like(t) for t in results])
                times.append(perf_counter() - began)
            costs.append(median(times[1:]))
            inputs = map_tensors(lambda _, tensor: tensor.detach(), outputs, "outputs")
    return costs


def _as_leaf(_: str, tensor: Tensor) -> Tensor:
    """A tensor through which a gradient goes back, and that may be changed in place."""
    copy = tensor.detach().clone()
    if copy.is_floating_point() or copy.is_complex():
        return copy.requires_grad_().clone()
    return copy
