"""`phalanx bench`: its options, and what it shows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx import files
from phalanx.errors import MisuseError

if TYPE_CHECKING:
    from phalanx.ops.bench.report import BenchReport

_WIDEST = 1000  # characters of a line


def bench_command(
    context: typer.Context,
    *,
    operations: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[OPERATION]...",
            help="all_reduce, all_gather, reduce_scatter, broadcast, all_to_all, reduce, gather, "
            "scatter, p2p (ping_pong and stream), barrier; or ddp and fsdp, training steps.",
            show_default="all_reduce",
        ),
    ] = None,
    backends: Annotated[
        str,
        typer.Option(
            help="Which take part: shm, hybrid, tcp (Phalanx's own), phalanx-gloo, phalanx-mpi "
            "(Phalanx over those; MPI's ranks are mpirun's), stock (torch.distributed over "
            "Phalanx), gloo (itself)."
        ),
    ] = "shm,tcp,stock,gloo",
    ranks: Annotated[str, typer.Option(metavar="N,...", help="Numbers of ranks.")] = "2",
    sizes: Annotated[
        str, typer.Option(help="Bytes of a message: ranges and lists, as in 8..256M or 8,64K,16M.")
    ] = "8..64M",
    factor: Annotated[int, typer.Option(help="Between the sizes of a range.")] = 8,
    rounds: Annotated[int, typer.Option(help="Rounds that count; medians are shown.")] = 11,
    seconds: Annotated[float, typer.Option(help="What a round of small messages should take.")] = (
        0.02
    ),
    memory: Annotated[
        str,
        typer.Option(
            help="Kinds of memory: ordinary (in place, or into given memory), registered (from "
            "backend.empty), fresh (a new result each time), into (not in place)."
        ),
    ] = "ordinary,registered",
    algorithms: Annotated[
        str,
        typer.Option(
            help="Of Phalanx's backends: auto; ring, direct, ...; fixed (each by name); all."
        ),
    ] = "auto",
    machine: Annotated[
        bool,
        typer.Option(help="Also time a plain socket pair (one way), a memory copy, a step alone."),
    ] = True,
    baseline: Annotated[str, typer.Option(help="Which the others are compared with.")] = "gloo",
    width: Annotated[
        int,
        typer.Option(
            help="Of the layers of a training step.", show_default="1024 for ddp, 2048 for fsdp"
        ),
    ] = 0,
    optimizer: Annotated[
        str,
        typer.Option(
            "--optimizer",
            help="Of a training step: sgd, adamw, adafactor. With --algorithms all, ddp is also "
            "timed in DDP.step, and sharded, with a ShardedOptimizer.",
        ),
    ] = "sgd",
    threads: Annotated[int, typer.Option(help="Threads of torch in each rank.")] = 1,
    beside: Annotated[
        int,
        typer.Option(
            metavar="N", help="Busy processes on each host, beside the ranks, as a data loader is."
        ),
    ] = 0,
    back_to_back: Annotated[
        bool,
        typer.Option(
            "--back-to-back",
            help="At least 20 calls a round, and the median call of the slowest rank: if a root "
            "may run ahead, the mean of a few calls hides the waits of the others.",
        ),
    ] = False,
    peaks: Annotated[
        bool,
        typer.Option(
            "--peaks",
            help="Of training steps: also the peak of a rank's memory, in fresh processes for each "
            "library; and the peak where the C library gives freed memory back at once.",
        ),
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all figures there.")
    ] = None,
    tune: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Time every algorithm of Phalanx's backends, and write there which is the best "
            "when: with PHALANX_TUNING=FILE, auto picks by it.",
        ),
    ] = None,
) -> None:
    """Time operations of Phalanx beside other libraries, in the same processes.

    Rounds of all libraries are interleaved, so other load of the machine affects all alike. A line
    shows the median round, in microseconds of a call on the slowest rank; half of the rounds lie
    between the quartiles. Every round's results are checked, to the last element. Bandwidths are
    those of the NCCL tests: bytes are the larger of what a rank gives and gets, and the bus
    bandwidth is what its link has to carry. K and M are 1024 and 1024 K; a GB is 1e9. "x gloo" is
    the time of gloo, divided by the line's: above 1 the line is faster.

    Training steps (ddp, fsdp) have to give the results of one process that has all samples. Their
    time is compared with that of the same step alone, without communication: the median of the
    rounds' ratios. torch's own DDP and `fully_shard` run over Gloo, and as `stock` over Phalanx.

    A library that is not installed is left out, and the reason is given. Ranks are processes of
    this host, with one thread each (OMP_NUM_THREADS=1). Under a launcher (phalanx run, torchrun,
    mpirun, srun) the ranks are the launcher's, on all its hosts.

        phalanx bench

        phalanx bench all_gather --backends shm,gloo --ranks 2,4 --sizes 8..256M --json gather.json

        phalanx bench all_reduce --backends tcp --algorithms all

        phalanx bench fsdp --backends shm,tcp,gloo --peaks

        phalanx bench --tune tuning.json --ranks 2,4

    The exit code is 1 if any result was wrong.
    """
    from phalanx.ops.bench import peers, request, start  # noqa: PLC0415
    from phalanx.ops.bench import report as reports  # noqa: PLC0415

    table = context.obj or peers.PEERS  # benchmarks/other_libraries.py has more
    options: dict[str, Any] = {**context.params, "peers": table, "tune": tune is not None}
    for name in ("operations", "ranks", "json_file"):
        del options[name]  # the others are those of a request, by the same names
    default = ["all_reduce"] if tune is None else []
    wanted = request.make_request(operations or default, **options)
    counts = request.parse_ranks(ranks)
    for path in (json_file, tune):  # before anything is measured
        if path is not None and not path.absolute().parent.is_dir():
            raise MisuseError(f"{path}: there is no folder {path.absolute().parent}")
        if path is not None and path.exists() and not path.is_file():
            raise MisuseError(f"{path} is there, and no regular file: name another one")
    report = start.new_report(wanted, counts, table)
    if _run_and_show(report):
        if json_file is not None:
            files.write(os.path.realpath(json_file), reports.as_json(report))
            typer.echo(f"{json_file}: all figures")
        if tune is not None:
            files.write(os.path.realpath(tune), reports.as_tuning(report))
            typer.echo(
                f"{tune}: with PHALANX_TUNING={tune} in the environment of every rank, and the "
                "same file on every host, auto picks by it"
            )
    raise typer.Exit(1 if report.wrong else 0)


def _run_and_show(report: BenchReport) -> bool:
    """Run and show the report; return whether this process has it. A failed one is shown, too."""
    from rich.console import Console  # noqa: PLC0415
    from rich.measure import Measurement  # noqa: PLC0415

    from phalanx.ops.bench.report import legend, notes, tables  # noqa: PLC0415
    from phalanx.ops.bench.start import run_bench  # noqa: PLC0415

    try:
        with Console(stderr=True).status("starting ranks") as status:
            return run_bench(report, status.update)
    finally:
        console = Console(highlight=False)
        shown = list(tables(report))
        for table in shown:  # whole, even in a file
            wanted = Measurement.get(console, console.options.update_width(_WIDEST), table).maximum
            console.width = max(console.width, wanted)
            console.print(table)
        for text in (*legend(shown), *notes(report)) if report.lines or report.left_out else ():
            console.print(text, markup=False, soft_wrap=True)
