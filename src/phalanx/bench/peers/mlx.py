"""MLX's collectives over its ring of TCP connections. Its arrays never change: results are new."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import socket
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from phalanx.bench.exchange import Exchange
from phalanx.bench.operations import Operation
from phalanx.bench.peers.peer import Binder, Peer, Place

__all__ = ["Mlx", "lacks_mlx"]

_FUNCTIONS: Mapping[str, str] = MappingProxyType(
    {"all_reduce": "all_sum", "all_gather": "all_gather"}
)


def lacks_mlx() -> str:
    """Why there is no MLX; empty if there may be."""
    for module in ("mlx", "numpy"):
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed: pip install 'mlx[cpu]' numpy"
    return ""


class Mlx(Peer):
    """`mx.distributed` with the backend `ring`, on this host's processor."""

    memories = frozenset({"fresh"})
    only = "fresh"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        if len(set(place.control.topology)) > 1:
            raise RuntimeError("this benchmark starts it on one host only")
        mx: Any = importlib.import_module("mlx.core")
        with ExitStack() as stack:
            # It wants to be told every rank's port: one that was free just now.
            probe = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            ports = place.control.gather(probe.getsockname()[1])
            file = stack.enter_context(tempfile.NamedTemporaryFile("w", suffix=".json"))
            json.dump([[f"127.0.0.1:{port}"] for port in ports], file)
            file.flush()
            probe.close()
            place.control.barrier()
            os.environ["MLX_RANK"], os.environ["MLX_HOSTFILE"] = str(self.rank), file.name
            self._group: Any = mx.distributed.init(strict=True, backend="ring")
        self._mx: Any = mx

    @property
    def binders(self) -> Mapping[str, Binder]:
        """What its ring has that others have, too."""
        return dict.fromkeys(_FUNCTIONS, self._exchange)

    def _exchange(self, operation: Operation, source: Tensor | None, *_: object) -> Exchange:
        assert source is not None
        return _MlxExchange(operation, source, self._mx, self._group)


class _MlxExchange(Exchange):
    """Evaluated at once, since an operation of MLX is a promise until someone needs it."""

    def __init__(self, operation: Operation, source: Tensor, mx: Any, group: Any) -> None:
        super().__init__(operation, source, None, self._call)
        self._mx, self._group, self._stream = mx, group, mx.cpu
        self._function = getattr(mx.distributed, _FUNCTIONS[operation.name])
        self._given: Any = None
        self._gotten: Any = None

    def load(self) -> None:
        """Copy what is given into an array."""
        assert self.source is not None
        self._given = self._mx.array(self.source.numpy())

    def _call(self) -> None:
        self._gotten = self._function(self._given, group=self._group, stream=self._stream)
        self._mx.eval(self._gotten)

    def store(self) -> None:
        """Copy what came back."""
        numpy: Any = importlib.import_module("numpy")  # MLX brings it, Phalanx does not
        self.out = torch.from_numpy(numpy.array(self._gotten))
