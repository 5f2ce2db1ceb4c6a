"""What the shapes and dtypes of a step's messages may depend on, besides the number of samples."""

from __future__ import annotations

import torch
from torch import nn

from .agreement import digest_of
from .layouts import Layout
from .trees import Tree

__all__ = ["circumstances"]


def circumstances(module: nn.Module, inputs: Tree) -> int:
    """A hash of what this rank contributes; where it differs, shapes are told anew.

    Which parts are in training mode, which parameters are frozen, default dtype, autocast; and of
    the inputs, all but the number of samples.
    """
    layout, _ = Layout.of(inputs, "inputs")
    return digest_of(
        [part.training for part in module.modules()],
        [parameter.requires_grad for parameter in module.parameters()],
        str(torch.get_default_dtype()),
        str(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else "",
        repr(layout.structure),
        [(spec.dtype, spec.shape[1:], spec.needs_grad) for spec in layout.specs],
    )
