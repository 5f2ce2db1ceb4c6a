"""`phalanx bench` with two more libraries, DeepSpeed and MLX: the same options, the same output.

    python benchmarks/other_libraries.py all_reduce --backends shm,deepspeed,mlx --sizes 8..1M

A library that is not installed is left out, and the reason is given. This file is also the example
of how to measure a library of your own: subclass `Peer`, and give it a row of `PEERS`.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import typer
from torch import Tensor

from phalanx.cli.bench import BENCH_HELP, bench_command
from phalanx.errors import DistributedError
from phalanx.tools.bench import peers
from phalanx.tools.bench.operations import BenchOperation, PreparedCall
from phalanx.tools.bench.peer import Binder, Peer, RankContext
from phalanx.tools.bench.peers import PeerRow, PeerTable

# ------------------------------------------------------------------------------
# DeepSpeed's all_reduce in shared memory, written in C++ with AVX: for inference on processors.
#
# It compiles itself when it is first used, which takes about a minute and a C++ compiler.


def lacks_deepspeed() -> str:
    """Why there is no such operation; empty if there may be."""
    if importlib.util.find_spec("deepspeed") is None:
        return "deepspeed is not installed: pip install deepspeed ninja"
    if not (shutil.which("c++") or shutil.which("g++")):
        return "deepspeed compiles its operation, and there is no C++ compiler"
    return ""


class DeepSpeed(Peer):
    """`inference_all_reduce_`: a float32 sum in place, on ranks of one host, all of which spin."""

    def __init__(self, context: RankContext) -> None:
        super().__init__(context)
        control = context.control
        if len(set(control.topology)) > 1:
            raise RuntimeError("its ranks have to share one host")
        beside = str(Path(sys.executable).parent)  # where pip puts ninja
        os.environ["PATH"] = f"{beside}{os.pathsep}{os.environ.get('PATH', '')}"
        # The names of its shared memory are made of these.
        port = str(control.from_root(secrets.randbelow(1 << 30)))
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
        control.barrier()  # everyone has it open: the names are not needed any more
        for path in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer*_phalanx-bench_{port}_*"):
            path.unlink(missing_ok=True)

    @property
    def binders(self) -> Mapping[str, Binder]:
        """One operation."""
        return {"all_reduce": self._prepare}

    def _prepare(
        self, operation: BenchOperation, source: Tensor | None, out: Tensor | None, *_: object
    ) -> PreparedCall:
        return PreparedCall(operation, source, out, partial(self._all_reduce, source))


# ------------------------------------------------------------------------------
# MLX's collectives over its ring of TCP connections. Its arrays never change: results are new.

_FUNCTIONS = {"all_reduce": "all_sum", "all_gather": "all_gather"}


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

    def __init__(self, context: RankContext) -> None:
        super().__init__(context)
        control = context.control
        if len(set(control.topology)) > 1:
            raise RuntimeError("this benchmark starts it on one host only")
        mx: Any = importlib.import_module("mlx.core")
        with ExitStack() as stack:
            # It wants to be told every rank's port: one that was free just now.
            probe = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            ports = control.gather(probe.getsockname()[1])
            file = stack.enter_context(tempfile.NamedTemporaryFile("w", suffix=".json"))
            json.dump([[f"127.0.0.1:{port}"] for port in ports], file)
            file.flush()
            probe.close()
            control.barrier()
            os.environ["MLX_RANK"], os.environ["MLX_HOSTFILE"] = str(self.rank), file.name
            self._group: Any = mx.distributed.init(strict=True, backend="ring")
        self._mx: Any = mx

    @property
    def binders(self) -> Mapping[str, Binder]:
        """What its ring has that others have, too."""
        return dict.fromkeys(_FUNCTIONS, self._prepare)

    def _prepare(
        self, operation: BenchOperation, source: Tensor | None, *_: object
    ) -> PreparedCall:
        assert source is not None
        return MlxCall(operation, source, self._mx, self._group)


class MlxCall(PreparedCall):
    """Evaluated at once, since an operation of MLX is a promise until someone needs it."""

    def __init__(self, operation: BenchOperation, source: Tensor, mx: Any, group: Any) -> None:
        super().__init__(operation, source, None, self._call)
        self._mx, self._group, self._stream = mx, group, mx.cpu
        self._function = getattr(mx.distributed, _FUNCTIONS[operation.name])
        self._given: Any = None
        self._result: Any = None

    def load(self) -> None:
        """Copy what is given into an array."""
        assert self.source is not None
        self._given = self._mx.array(self.source.numpy())

    def _call(self) -> None:
        self._result = self._function(self._given, group=self._group, stream=self._stream)
        self._mx.eval(self._result)

    def store(self) -> None:
        """Copy what came back."""
        numpy: Any = importlib.import_module("numpy")  # MLX brings it, Phalanx does not
        self.out = torch.from_numpy(numpy.array(self._result))


# ------------------------------------------------------------------------------

SCRIPT = str(Path(__file__).resolve())
PEERS: PeerTable = {
    "deepspeed": PeerRow(DeepSpeed, lacks_deepspeed, script=SCRIPT),
    "mlx": PeerRow(Mlx, lacks_mlx, script=SCRIPT),
}
"""The ranks of the benchmark read this table, too: each runs this file, but not as a program."""


def main() -> None:
    """Run the command line of this process; exit codes are those of `phalanx bench`."""
    app = typer.Typer(
        add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False
    )
    app.command(help=BENCH_HELP)(bench_command)
    try:
        app(obj={**peers.PEERS, **PEERS})
    except DistributedError as error:
        sys.stderr.write(f"{Path(__file__).name}: {error}\n")
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
