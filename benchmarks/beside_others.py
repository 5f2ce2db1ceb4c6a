"""Phalanx beside other libraries on this machine: `make beside`, or with its page `ARGS=--write`.

Two ranks of this host, without GPUs. All libraries run in the same processes, in interleaved
rounds, and every result is checked: sums to the last bit, and the weights after training steps
against those of one process that has all samples.

    all_reduce  in place: Phalanx over shared memory and TCP, torch's Gloo
    ddp         a training step of 6 layers of 1024 x 1024 with the whole model on each rank:
                phalanx.DDP, torch's DDP, Accelerate, DeepSpeed (ZeRO stages 0 and 2), torchft
    fsdp        one of 4 layers of 2048 x 2048 in shards: phalanx.FSDP, torch's `fully_shard`,
                DeepSpeed (ZeRO stage 3)

Each has its library's defaults. A time is the median of the rounds, of a call on the slower rank.
The ratio of training steps is the median of the rounds' ratios. A library that is not installed is
left out; docs/beside-others.md says so, in the part that `--write` makes.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pages
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.optim import Optimizer

from phalanx.ops.bench import peers
from phalanx.ops.bench.operations import (
    OPTIMIZERS,
    Factory,
    PreparedCall,
    Tensors,
    TrainedModel,
    task_of,
)
from phalanx.ops.bench.peers import Call, Peer, PeerRow, PeerTable, RankContext, make_group
from phalanx.ops.bench.report import BenchReport
from phalanx.ops.bench.request import make_request
from phalanx.ops.bench.start import new_report, run_bench
from phalanx.ops.machine import installed_version

PAGE = Path(__file__).parents[1] / "docs" / "beside-others.md"
MARK = "speeds"


class Library(NamedTuple):
    """One that the page names: its package, or several of which one is installed; and its peers."""

    name: str
    packages: tuple[str, ...]
    peers: tuple[str, ...] = ()

    @property
    def version(self) -> str:
        """Of the package that is installed; empty if none is."""
        return next(filter(None, map(installed_version, self.packages)), None) or ""


LIBRARIES = (
    Library("Phalanx", ("phalanx",), ("shm", "tcp")),
    Library("torch", ("torch",), ("gloo",)),
    Library("DeepSpeed", ("deepspeed",), ("deepspeed-0", "deepspeed-2", "deepspeed-3")),
    Library("Accelerate", ("accelerate",), ("accelerate",)),
    Library("Horovod", ("horovod",)),
    Library("torchft", ("torchft", "torchft-nightly"), ("torchft",)),
    Library("Hivemind", ("hivemind",)),
)
NAMES = {
    "shm": "Phalanx, shared memory",
    "tcp": "Phalanx, TCP",
    "gloo": "torch over Gloo",
    "accelerate": "Accelerate over Gloo",
    "deepspeed-0": "DeepSpeed over Gloo, stage 0",
    "deepspeed-2": "DeepSpeed over Gloo, ZeRO stage 2",
    "deepspeed-3": "DeepSpeed over Gloo, ZeRO stage 3",
    "torchft": "torchft over Gloo",
}
SIZES = {8: "8 B", 64 << 10: "64 KiB", 1 << 20: "1 MiB", 64 << 20: "64 MiB"}

# ------------------------------------------------------------------------------
# The libraries' training steps, on torch's group over Gloo.


def lacks(package: str) -> str:
    """Why a library cannot be measured; empty if it can."""
    return "" if importlib.util.find_spec(package) else f"{package} is not installed"


class Stepper:
    """What a training loop asks of an optimizer, by functions of a library.

    inner  torch's optimizer, whose own step is timed and whose state is cleared
    """

    def __init__(
        self, inner: Optimizer, zero_grad: Callable[[], object], step: Callable[[], object]
    ) -> None:
        self.inner, self.zero_grad, self.step = inner, zero_grad, step


class OverGloo(Peer):
    """A library that trains on torch's group, unless it says otherwise with whole parameters."""

    def __init__(self, context: RankContext) -> None:
        super().__init__(context)
        self.group = make_group("gloo", context)
        self.does = {"ddp": self._step}

    def _step(self, call: PreparedCall) -> Call:
        return self.step(call, self.wrap)

    def wrap(self, module: nn.Module) -> TrainedModel:
        """Return the model as the library trains it."""
        raise NotImplementedError

    def close(self) -> None:
        """Leave the group."""
        if dist.is_initialized():
            dist.destroy_process_group(self.group)


class Accelerate(OverGloo):
    """`Accelerator.prepare`, of the model and of the optimizer."""

    def wrap(self, module: nn.Module) -> TrainedModel:
        accelerator: Any = importlib.import_module("accelerate").Accelerator(cpu=True)
        model = accelerator.prepare(module)

        def optimizer(factory: Factory) -> Any:
            inner = factory(model.parameters())
            prepared = accelerator.prepare(inner)
            return Stepper(inner, prepared.zero_grad, prepared.step)

        return TrainedModel(
            model,
            module.state_dict,
            module.load_state_dict,
            passes=lambda loss: accelerator.backward(loss()),
            optimizer=optimizer,
        )


class DeepSpeed(OverGloo):
    """`deepspeed.initialize` with a stage of ZeRO.

    0 averages gradients; 2 cuts them and the optimizer's state into parts; 3 cuts the model, too
    """

    def __init__(self, stage: int, context: RankContext) -> None:
        os.environ["DS_ACCELERATOR"] = "cpu"  # it looks for devices otherwise
        super().__init__(context)
        self._stage = stage
        if stage == 3:
            self.does = {"fsdp": self._step}

    def wrap(self, module: nn.Module) -> TrainedModel:
        deepspeed: Any = importlib.import_module("deepspeed")
        inner = OPTIMIZERS[self.optimizer](module.parameters())
        [operation] = self.does
        config = {
            "train_micro_batch_size_per_gpu": task_of(operation, self.width).batch,
            "zero_optimization": {"stage": self._stage},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 1 << 40,
        }
        engine, *_ = deepspeed.initialize(
            model=module, optimizer=inner, config=config, dist_init_required=False
        )
        stepper: Any = Stepper(inner, lambda: None, engine.step)  # its step sets them to zero
        whole, restore = self._parameters(module, engine)
        return TrainedModel(
            engine,
            whole,
            restore,
            passes=lambda loss: engine.backward(loss()),
            optimizer=lambda _: stepper,
        )

    def _parameters(
        self, module: nn.Module, engine: Any
    ) -> tuple[Callable[[], Tensors], Callable[[Tensors], object]]:
        """What returns the whole parameters, and what gives them other values.

        From stage 1 on the optimizer has a copy of its own part, which gets these, too.
        """
        zero: Any = importlib.import_module("deepspeed").zero
        utils: Any = importlib.import_module("deepspeed.utils")
        named = dict(module.named_parameters())

        def whole() -> Tensors:
            with zero.GatheredParameters([*named.values()]):
                return {name: value.detach().clone() for name, value in named.items()}

        def restore(values: Tensors) -> None:
            with zero.GatheredParameters([*named.values()], modifier_rank=0):
                for name, value in named.items():
                    value.detach().copy_(values[name])
            for name, value in named.items():
                utils.safe_set_full_fp32_param(value, values[name])

        def restore_replicas(values: Tensors) -> None:
            module.load_state_dict(values)
            if self._stage:
                engine.optimizer.refresh_fp32_params()

        if self._stage == 3:
            return whole, restore
        return module.state_dict, restore_replicas


class Torchft(OverGloo):
    """`torchft.ddp`, whose ranks agree on the members of each step by way of a lighthouse."""

    def __init__(self, context: RankContext) -> None:
        super().__init__(context)
        torchft: Any = importlib.import_module("torchft")
        wait = datetime.timedelta(seconds=context.timeout)
        self._lighthouse: Any = None
        address = ""
        if self.rank == 0:
            coordination: Any = importlib.import_module("torchft.coordination")
            self._lighthouse = coordination.LighthouseServer(
                bind="127.0.0.1:0", min_replicas=self.size
            )
            address = self._lighthouse.address()
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._manager: Any = torchft.Manager(
            pg=torchft.ProcessGroupGloo(timeout=wait),
            min_replica_size=self.size,
            load_state_dict=None,
            state_dict=None,
            init_sync=False,  # all begin with the same weights
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=self._store.port,
            lighthouse_addr=context.gather(address)[0],
            replica_id=f"beside_{self.rank}",
            timeout=wait,
        )

    def wrap(self, module: nn.Module) -> TrainedModel:
        torchft: Any = importlib.import_module("torchft")
        model = torchft.DistributedDataParallel(self._manager, module)

        def optimizer(factory: Factory) -> Any:
            inner = factory(module.parameters())
            wrapped = torchft.Optimizer(self._manager, inner)
            return Stepper(inner, wrapped.zero_grad, wrapped.step)

        return TrainedModel(model, module.state_dict, module.load_state_dict, optimizer=optimizer)

    def close(self) -> None:
        """End the manager, and the lighthouse."""
        self._manager.shutdown()
        if self._lighthouse is not None:
            self._lighthouse.shutdown()
        super().close()


SCRIPT = str(Path(__file__).resolve())
PEERS: PeerTable = {
    "accelerate": PeerRow(Accelerate, partial(lacks, "accelerate"), script=SCRIPT),
    "deepspeed-0": PeerRow(partial(DeepSpeed, 0), partial(lacks, "deepspeed"), script=SCRIPT),
    "deepspeed-2": PeerRow(partial(DeepSpeed, 2), partial(lacks, "deepspeed"), script=SCRIPT),
    "deepspeed-3": PeerRow(partial(DeepSpeed, 3), partial(lacks, "deepspeed"), script=SCRIPT),
    "torchft": PeerRow(Torchft, partial(lacks, "torchft"), script=SCRIPT),
}
"""The ranks read this table, too: each runs this file, but not as a program."""

# ------------------------------------------------------------------------------
# The part of the page.

Reports = Mapping[str, BenchReport]  # by operation
OURS = ("shm", "tcp", "gloo")
TAKING_PART: Mapping[str, tuple[str, ...]] = {
    "all_reduce": OURS,
    "ddp": (*OURS, "accelerate", "deepspeed-0", "deepspeed-2", "torchft"),
    "fsdp": (*OURS, "deepspeed-3"),
}


def measure(
    rounds: int,
    say: Callable[[str], None],
    *,
    operations: Sequence[str] = tuple(TAKING_PART),
    width: int = 0,
) -> Reports:
    """Run the operations, one after the other, each in fresh ranks.

    width  of the trained layers; 0: the operation's own
    """
    table = {**peers.PEERS, **PEERS}
    reports = {}
    for operation in operations:
        request = make_request(
            [operation],
            backends=",".join(TAKING_PART[operation]),
            sizes=",".join(map(str, SIZES)),
            rounds=rounds,
            memory="ordinary",
            machine=False,
            width=width,
            peers=table,
        )
        reports[operation] = new_report(request, [2], table)
        run_bench(reports[operation], say)
    return reports


def page_part(reports: Reports, day: str, load: float) -> str:
    """What stands between the page's marks: all reports, the day, and the load at the end."""
    lines = [*_circumstances(reports, day, load), "", *_libraries(reports)]
    lines += ["", *_collectives(reports["all_reduce"])]
    for operation in ("ddp", "fsdp"):
        lines += ["", *_steps(reports[operation])]
    return "\n".join(lines) + "\n"


def _circumstances(reports: Reports, day: str, load: float) -> Iterator[str]:
    first = reports["all_reduce"]
    machine = first.machine
    yield "| | |"
    yield "|---|---|"
    yield f"| date | {day} |"
    system = pages.short_system(machine["system"])
    yield f"| machine | {machine['processor']}, {machine['cores']} cores, {system} |"
    yield f"| Python | {machine['python']} |"
    loads = f"{machine['load']:.1f}, {load:.1f}"
    yield f"| load average at the start, and at the end of two ranks' work | {loads} |"
    yield f"| rounds that count | {first.request.rounds} |"
    yield "| ranks | 2, with one thread each |"


def _libraries(reports: Reports) -> Iterator[str]:
    measured = {line.entry.peer for report in reports.values() for line in report.lines}
    left_out = {left.peer: left.reason for r in reports.values() for left in r.left_out}
    yield "| library | version | state |"
    yield "|---|---|---|"
    for library in LIBRARIES:
        failed = [left_out[peer] for peer in library.peers if peer in left_out]
        if not library.version:
            state = "not installed: no number is given"
        elif failed:
            state = f"failed: {' '.join(failed[0].split())[:200].replace('|', '/')}"
        elif measured & set(library.peers):
            state = "measured"
        else:
            state = "installed, not measured"
        yield f"| {library.name} | {library.version or 'not installed'} | {state} |"


def _collectives(report: BenchReport) -> Iterator[str]:
    """Microseconds of the medians, and Gloo's over Phalanx's."""
    found = {(line.bytes, line.entry.peer): line for line in report.lines}
    names = [NAMES[peer] for peer in report.request.backends]
    yield f"| all_reduce, us | {' | '.join(names)} | Gloo / shared memory | Gloo / TCP |"
    yield "|---|" + "---:|" * (len(names) + 2)
    for size, shown in SIZES.items():
        row = [found[size, peer] for peer in report.request.backends]
        gloo = found[size, "gloo"]
        ratios = [f"{gloo.times(found[size, peer]):.1f}" for peer in ("shm", "tcp")]
        times = [f"{line.median * 1e6:,.0f}" for line in row]
        yield f"| {shown} | {' | '.join((*times, *ratios))} |"


def _steps(report: BenchReport) -> Iterator[str]:
    """Milliseconds of the medians, with quartiles; and torch's time over each."""
    (operation,) = report.request.operations
    (torch_s,) = (line for line in report.lines if line.entry.peer == "gloo")
    yield f"| {operation}: {task_of(operation, 0)} | ms | quartiles | torch's time / this |"
    yield "|---|---:|---:|---:|"
    for line in report.lines:
        low, high = (f"{seconds * 1e3:.0f}" for seconds in line.quartiles)
        times = f"{line.median * 1e3:.0f} | {low} to {high} | {torch_s.times(line):.2f}"
        yield f"| {NAMES[line.entry.peer]} | {times} |"


def complaints(reports: Reports) -> Iterator[str]:
    """Wrong results, each in a line."""
    for report in reports.values():
        for line in report.wrong:
            yield f"WRONG: {line}: {line.wrong} elements"


def main(words: Sequence[str] | None = None) -> int:
    """Measure; the exit status is 1 if a result was wrong, and then no page is written."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=21, help="that count (default: %(default)s)")
    parser.add_argument("--write", action="store_true", help=f"into docs/{PAGE.name}, too")
    asked = parser.parse_args(words)
    with Console(stderr=True).status("starting ranks") as status:
        reports = measure(asked.rounds, status.update)
    day = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    part = page_part(reports, day, os.getloadavg()[0])
    sys.stdout.write(part)
    wrong = list(complaints(reports))
    for text in wrong:
        print(text, file=sys.stderr)
    if asked.write and not wrong:
        pages.rewrite(PAGE, MARK, part)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
