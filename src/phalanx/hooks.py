"""The table of modules of `phalanx.ops` that the library starts, and never imports.

    started by                   requested by                        module
    a rank, as its group forms   PHALANX_METRICS                     ops/observe/metrics.py
                                 PHALANX_WATCH                       ops/observe/watch/publish.py
    a launcher, with its ranks   nothing: every job can be watched   ops/observe/watch/launcher.py
    Scalars                      a target, such as "jsonl:FILE"      ops/loggers.py

A module is imported on request. The library works without `phalanx.ops`: requests are then refused
in words, on every rank before anything is sent.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from phalanx.errors import MisuseError

OPS = "phalanx.ops"
OF_RANKS: Mapping[str, str] = MappingProxyType(
    {"PHALANX_METRICS": f"{OPS}.observe.metrics", "PHALANX_WATCH": f"{OPS}.observe.watch.publish"}
)
"""What asks for it, and the module: `check(environ)`, `begin(backend, world, environ)`."""
OF_LAUNCHERS = f"{OPS}.observe.watch.launcher"
LOGGERS = f"{OPS}.loggers"


def check_observers(environ: Mapping[str, str]) -> None:
    """Raise `MisuseError` for a variable whose request is impossible, or not installed."""
    for module in _asked_for(environ):
        module.check(environ)


def begin_observers(backend: Any, world: Any, environ: Mapping[str, str]) -> None:
    """Start the observers that the environment requests, in a rank that has its backend.

    world   its place in the job, if the launcher has not told it by the environment
    """
    for module in _asked_for(environ):
        module.begin(backend, world, environ)


def load(module: str, asked_by: str) -> Any:
    """Return a module of `phalanx.ops`; `MisuseError` if that is not installed."""
    if not has_ops():
        raise MisuseError(
            f"{asked_by} needs {OPS}, which this installation of Phalanx does not have: install "
            "the whole package, or leave it out"
        )
    return importlib.import_module(module)


def has_ops() -> bool:
    """Return whether `phalanx.ops` is installed."""
    return find_spec(OPS) is not None


def _asked_for(environ: Mapping[str, str]) -> Iterator[Any]:
    for variable, module in OF_RANKS.items():
        if environ.get(variable, "").strip():
            yield load(module, f"{variable}={environ[variable]}")
