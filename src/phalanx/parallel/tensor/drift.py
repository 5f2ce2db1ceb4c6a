"""Whether what is whole on every rank is still the same there, and what is not."""

from __future__ import annotations

from torch import nn

from phalanx.parallel.agreement import check_agreement, describe_with_values
from phalanx.parallel.tensor.layer import ParallelLayer, owners

REMEDY = (
    "It is whole on every rank, and stays equal only if its gradients are. A norm that sees a part "
    'of the features, the heads or the sequence has to be a "sequence_norm"; another parameter '
    "there goes through copy_to_ranks before it is used; dropout where activations are whole "
    "has to drop the same on every rank"
)


def check_whole_parameters(module: nn.Module) -> None:
    """Raise `DesyncError`, on every rank, unless the parameters that are not cut are the same bits.

    They are at first, and stay so if the plan is right. A plan that leaves out a norm in a region
    where ranks have parts is not wrong in its shapes, so nothing else tells: call this after the
    first step of a new model, and as often as you like. Names the first parameter that differs, and
    the ranks in the minority. Every rank that shares layers calls it. Blocks for a message of 8
    bytes; costs reading the parameters once.
    """
    cut = owners(module)
    whole = [
        describe_with_values(name, parameter)
        for name, parameter in module.named_parameters()
        if parameter not in cut
    ]
    layers = [layer for layer in module.modules() if isinstance(layer, ParallelLayer)]
    for backend in dict.fromkeys(layer.backend for layer in layers):
        check_agreement(whole, backend, op="check_whole_parameters", remedy=REMEDY)
