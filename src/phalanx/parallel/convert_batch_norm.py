"""Put a `SyncBatchNorm` in the place of every batch norm of a model."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from phalanx.backends.base import Backend
from phalanx.errors import UnsupportedOperationError
from phalanx.parallel.sync_batch_norm import SyncBatchNorm


def convert_sync_batchnorm(module: nn.Module, backend: Backend) -> nn.Module:
    """The module with a `SyncBatchNorm` in the place of each `BatchNorm1d`, `2d` and `3d`.

    Works in place, and returns the module (if it is itself a batch norm, the one that replaces it).
    A replacement has the same parameters, buffers, hooks, mode and settings: the same objects, so
    an optimizer may exist already. The layer that it replaces is not to be used any more. Nothing
    is sent. Convert before the module is wrapped in DDP.

    Raises `UnsupportedOperationError`, before anything is changed, for other kinds of batch norm:
    subclasses, of which it cannot know what else they do, and lazy ones that have not run.
    """
    new: dict[nn.Module, SyncBatchNorm] = {}  # a layer in two places is one layer afterwards
    for path, layer in module.named_modules():
        if type(layer) in _REPLACED:
            new[layer] = _replacement(layer, backend, path)
        elif isinstance(layer, _BatchNorm):
            raise UnsupportedOperationError(_why_not(path or "the module", layer))
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if child in new:
                parent._modules[name] = new[child]
    return new.get(module, module)


_REPLACED = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, SyncBatchNorm)


def _replacement(layer: nn.Module, backend: Backend, path: str) -> SyncBatchNorm:
    new = SyncBatchNorm.__new__(SyncBatchNorm)
    new.__dict__.update(layer.__dict__, backend=backend, label=f"SyncBatchNorm {path}".strip())
    return new


def _why_not(path: str, layer: nn.Module) -> str:
    kind = type(layer)
    if isinstance(layer, LazyModuleMixin):
        remedy = (
            "does not know its size yet: run one batch through the model before it is converted"
        )
    elif isinstance(layer, nn.SyncBatchNorm):
        remedy = "speaks to torch.distributed: build the model with plain batch norms"
    else:
        remedy = "does what only it knows: replace it by a phalanx.SyncBatchNorm by hand"
    return (
        f"convert_sync_batchnorm: {path} is a {kind.__module__}.{kind.__qualname__}, which {remedy}"
    )
