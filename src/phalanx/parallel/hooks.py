"""Hooks on parameters: they tell a reducer that a gradient has come, and do not keep it alive."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from phalanx.errors import MisuseError


class Watcher(Protocol):
    """Who is told."""

    def gradient_came(self, parameter: nn.Parameter) -> None:
        """A parameter's gradient has been accumulated; called inside the backward pass."""


def watch_gradients(watcher: Watcher, parameters: Iterable[nn.Parameter]) -> None:
    """Tell the watcher of every gradient, as long as it lives."""
    hook = _GradHook(watcher)
    handles = [
        p.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        for p in parameters
    ]
    weakref.finalize(watcher, _remove, handles)  # so that the module may be wrapped again


def check_alone(names: Mapping[nn.Parameter, str], rank: int) -> None:
    """Raise `MisuseError` if somebody watches one of these parameters already."""
    for parameter, name in names.items():
        for hook in (parameter._post_accumulate_grad_hooks or {}).values():
            if isinstance(hook, _GradHook) and hook.alive:
                raise MisuseError(
                    f"rank {rank}: DDP: another DDP averages the gradients of {name} already; "
                    "delete that one first",
                    rank=rank,
                    op="DDP",
                )


class _GradHook:
    def __init__(self, watcher: Watcher) -> None:
        self._watcher = weakref.ref(watcher)

    @property
    def alive(self) -> bool:
        return self._watcher() is not None

    @torch.no_grad()
    def __call__(self, parameter: nn.Parameter) -> None:
        watcher = self._watcher()
        if watcher is not None:
            watcher.gradient_came(parameter)


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
