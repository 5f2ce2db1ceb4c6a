"""DeepSpeed's all_reduce in shared memory, written in C++ with AVX: for inference on processors.

It compiles itself when it is first used, which takes about a minute and a C++ compiler.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import secrets
import shutil
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.bench.exchange import Exchange
from phalanx.bench.operations import Operation
from phalanx.bench.peers.peer import Binder, Peer, Place

__all__ = ["DeepSpeed", "lacks_deepspeed"]


def lacks_deepspeed() -> str:
    """Why there is no such operation; empty if there may be."""
    if importlib.util.find_spec("deepspeed") is None:
        return "deepspeed is not installed: pip install deepspeed ninja"
    if not (shutil.which("c++") or shutil.which("g++")):
        return "deepspeed compiles its operation, and there is no C++ compiler"
    return ""


class DeepSpeed(Peer):
    """`inference_all_reduce_`: a float32 sum in place, on ranks of one host, all of which spin."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        if len(set(place.control.topology)) > 1:
            raise RuntimeError("its ranks have to share one host")
        beside = str(Path(sys.executable).parent)  # where pip puts ninja
        os.environ["PATH"] = f"{beside}{os.pathsep}{os.environ.get('PATH', '')}"
        # The names of its shared memory are made of these.
        port = str(place.control.from_root(secrets.randbelow(1 << 30)))
        names = {"LOCAL_SIZE": str(self.size), "MASTER_ADDR": "phalanx-bench", "MASTER_PORT": port}
        before = {name: os.environ.get(name) for name in names}
        try:
            os.environ.update(names)
            builders: Any = importlib.import_module("deepspeed.ops.op_builder.cpu")
            builders.ShareMemCommBuilder().load(verbose=False).initialize(self.size, self.rank)
        finally:
            for name, value in before.items():
                os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        self._all_reduce = torch.ops.deepspeed.inference_all_reduce_
        place.control.barrier()  # everyone has it open: the names are not needed any more
        for path in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer*_phalanx-bench_{port}_*"):
            path.unlink(missing_ok=True)

    @property
    def binders(self) -> Mapping[str, Binder]:
        """One operation."""
        return {"all_reduce": self._exchange}

    def _exchange(
        self, operation: Operation, source: Tensor | None, out: Tensor | None, *_: object
    ) -> Exchange:
        return Exchange(operation, source, out, partial(self._all_reduce, source))
