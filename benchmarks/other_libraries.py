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
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import typer

from phalanx.cli import bench
from phalanx.errors import DistributedError
from phalanx.ops.bench import peers
from phalanx.ops.bench.operations import PreparedCall
from phalanx.ops.bench.peer import Call, Peer, RankContext
from phalanx.ops.bench.peers import PeerRow, PeerTable

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
        if len(set(context.backend.topology)) > 1:
            raise RuntimeError("its ranks have to share one host")
        beside = str(Path(sys.executable).parent)  # where pip puts ninja
        os.environ["PATH"] = f"{beside}{os.pathsep}{os.environ.get('PATH', '')}"
        # The names of its shared memory are made of these.
        port = str(context.gather(secrets.randbelow(1 << 30))[0])
        names = {"LOCAL_SIZE": str(self.size), "MASTER_ADDR": "phalanx-bench", "MASTER_PORT": port}
        before = {name: os.environ.get(name) for name in names}
        try:
            os.environ.update(names)
            builders: Any = importlib.import_module("deepspeed.ops.op_builder.cpu")
            builders.ShareMemCommBuilder().load(verbose=False).initialize(self.size, self.rank)
        finally:
            for name, value in before.items():
                os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        all_reduce = torch.ops.deepspeed.inference_all_reduce_
        self.does = {"all_reduce": lambda call: partial(all_reduce, call.source)}
        context.backend.barrier()  # everyone has it open: the names are not needed any more
        for path in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer*_phalanx-bench_{port}_*"):
            path.unlink(missing_ok=True)


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

    def __init__(self, context: RankContext) -> None:
        super().__init__(context)
        if len(set(context.backend.topology)) > 1:
            raise RuntimeError("this benchmark starts it on one host only")
        mx: Any = importlib.import_module("mlx.core")
        with ExitStack() as stack:
            # It wants to be told every rank's port: one that was free just now.
            probe = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            ports = context.gather(probe.getsockname()[1])
            file = stack.enter_context(tempfile.NamedTemporaryFile("w", suffix=".json"))
            json.dump([[f"127.0.0.1:{port}"] for port in ports], file)
            file.flush()
            probe.close()
            context.backend.barrier()
            os.environ["MLX_RANK"], os.environ["MLX_HOSTFILE"] = str(self.rank), file.name
            self._group: Any = mx.distributed.init(strict=True, backend="ring")
        self._mx: Any = mx
        self.does = dict.fromkeys(_FUNCTIONS, self._collective)  # which others have, too

    def _collective(self, call: PreparedCall) -> Call:
        """Evaluated at once, since an operation is a promise until someone needs it."""
        mx, group = self._mx, self._group
        function = getattr(mx.distributed, _FUNCTIONS[call.operation.name])
        numpy: Any = importlib.import_module("numpy")  # MLX brings it, Phalanx does not
        given: Any = None
        result: Any = None

        def load() -> None:
            nonlocal given
            given = mx.array(call.source.numpy())

        def once() -> None:
            nonlocal result
            result = function(given, group=group, stream=mx.cpu)
            mx.eval(result)

        def store() -> None:
            call.out = torch.from_numpy(numpy.array(result))

        call.load, call.store = load, store
        return once


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
    app.command(help=bench.__doc__)(bench.bench_command)
    try:
        app(obj={**peers.PEERS, **PEERS})
    except DistributedError as error:
        sys.stderr.write(f"{Path(__file__).name}: {error}\n")
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
